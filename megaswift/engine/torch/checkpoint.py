"""A step of this engine on disk: one format for every strategy and any number of ranks.

A folder holds  state/          float32 weights and optimizer states, whole tensors by parameter name, safetensors
                rng-<rank>.safetensors
                engine.json     what was saved
One tensor at a time is whole, on its way to rank 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import log
from megaswift.bridge.hf_source import HfSource, TensorMeta
from megaswift.bridge.hf_writer import MAX_SHARD_BYTES, HfWriter
from megaswift.disk import sync
from megaswift.engine import rng_state
from megaswift.engine.torch.strategy import WEIGHT
from megaswift.errors import CheckpointError, Problem, UserError

if TYPE_CHECKING:
    from megaswift.engine.torch.engine import TorchEngine

FORMAT = "torch-1"
FACTS = "engine.json"
STATE = "state"


def save(engine: TorchEngine, directory: Path) -> None:
    """Everything into `directory`, on disk when this returns. Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    problem: Problem | None = None
    writer = HfWriter(directory / STATE, _tensors(engine), MAX_SHARD_BYTES, overwrite=True) if engine.rank == 0 else None
    for name, kind in _entries(engine):
        tensor = engine.strategy.full(name, kind)  # collective: goes on when rank 0 cannot write
        if writer is not None and problem is None:
            try:
                writer.add(f"{kind}.{name}", tensor)
            except UserError as error:
                problem = error.problems[0]
    try:
        if engine.allocation is not None and engine.rank == 0:
            engine.allocation.write(directory)
        written = [rng_state.write(directory, engine.rank)]
        if writer is not None and problem is None:
            writer.close()
            (directory / FACTS).write_text(json.dumps(_facts(engine), indent=1) + "\n", encoding="utf-8")
            written.append(directory / FACTS)
        for path in [*written, directory]:
            sync(path)
    except UserError as error:
        problem = error.problems[0]
    except OSError as error:
        problem = Problem(str(directory), f"could not be written ({error})")
    _agree(engine, [problem] if problem else [])


def load(engine: TorchEngine, directory: Path) -> None:
    """The inverse of `save`, under any strategy and number of ranks. Collective; nothing is changed by an unfit checkpoint."""
    facts, source = _open(engine, directory)
    same = facts["world_size"] == engine.layout.world_size
    states = rng_state.read(directory, engine.rank if same else 0)
    _agree(engine, [states] if isinstance(states, Problem) else [])
    assert not isinstance(states, Problem)
    engine.strategy.steps = int(facts["step"])
    for name, kind in _entries(engine):
        engine.strategy.put(name, kind, source.slice(f"{kind}.{name}"))
    if engine.allocation is not None:
        engine.allocation.read(directory)
    if same and rng_state.fits(states[0]):
        rng_state.restore(*states)
    else:
        engine.context.seed(rng_state.fresh_seed(directory))
        log.info(f"{directory} is of {facts['world_size']} processes: same weights and optimizer, random states start anew")


def _entries(engine: TorchEngine) -> list[tuple[str, str]]:
    """(parameter, kind) in one order on every rank. With adapters only what trains: the rest is the base model's."""
    trained = list(engine.strategy.trained())
    weights = trained if engine.adapts else list(engine.shapes)
    return [(n, WEIGHT) for n in weights] + [(n, kind) for n in trained for kind in engine.strategy.states() if engine.strategy.steps]


def _tensors(engine: TorchEngine) -> dict[str, TensorMeta]:
    return {f"{kind}.{name}": TensorMeta(tuple(engine.shapes[name]), torch.float32) for name, kind in _entries(engine)}


def _facts(engine: TorchEngine) -> dict[str, Any]:
    return {"format": FORMAT, "kind": engine.kind, "world_size": engine.layout.world_size, "step": engine.strategy.steps,
            "train_type": engine.cfg.model.train_type, "optimizer": engine.cfg.optim.optimizer}


def _open(engine: TorchEngine, directory: Path) -> tuple[dict[str, Any], HfSource]:
    """engine.json and the tensors' table, after all checks that read no tensor."""
    problems: list[Problem] = []
    facts: dict[str, Any] = {}
    source: HfSource | None = None
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            problems.append(Problem(str(directory), "is a step of the native engine" if isinstance(facts["format"], int) else
                                    f"has format {facts['format']}, this version reads {FORMAT}",
                                    "--engine megatron to go on with it, or --model with its export to start from its weights"))
        else:
            source = HfSource(directory / STATE)
            problems += _differences(engine, facts, source)
    except UserError as error:
        problems += error.problems
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(Problem(str(directory / FACTS), f"cannot be read ({type(error).__name__}: {error})"))
    _agree(engine, problems)
    assert source is not None
    return facts, source


def _differences(engine: TorchEngine, facts: dict[str, Any], source: HfSource) -> list[Problem]:
    now = _facts(engine)
    problems = [Problem(f"--{name} {now[name]}", f"the checkpoint's run had {facts[name]}", f"--{name} {facts[name]}")
                for name in ("train_type", "optimizer") if facts[name] != now[name]]
    if problems:
        return problems
    engine.strategy.steps = int(facts["step"])
    wanted, stored = _tensors(engine), set(source.names())
    problems = [Problem(name, "is in the checkpoint and not in this model") for name in sorted(stored - set(wanted))]
    problems += [Problem(name, "is in this model and not in the checkpoint") for name in sorted(set(wanted) - stored)]
    problems += [Problem(name, f"has shape {source.shape(name)} in the checkpoint and {meta.shape} in this model")
                 for name, meta in wanted.items() if name in stored and tuple(source.shape(name)) != meta.shape]
    return problems[:12]


def _agree(engine: TorchEngine, problems: list[Problem]) -> None:
    """All ranks' problems as one error on every rank, each once."""
    found: list[Any] = [problems]
    if engine.layout.world_size > 1:
        found = [None] * engine.layout.world_size
        dist.all_gather_object(found, problems)
    everyone = list(dict.fromkeys(p for own in found for p in own))
    if everyone:
        raise CheckpointError(everyone)


def whole(engine: TorchEngine, kind: str = WEIGHT) -> dict[str, Tensor]:
    """All whole tensors of a kind by parameter name, on the CPU of rank 0; empty elsewhere. Collective."""
    names = engine.shapes if kind == WEIGHT else engine.strategy.trained()
    found = {}
    for name in names:
        tensor = engine.strategy.full(name, kind)
        if engine.rank == 0:
            found[name] = tensor.detach().to("cpu", copy=True)
    return found

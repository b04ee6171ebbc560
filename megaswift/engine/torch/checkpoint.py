"""A step of this engine on disk: one format for every strategy and any number of ranks.

A folder holds  state/          float32 weights by their names in the model's files (of a run with adapters what trains,
by parameter name),
                                optimizer states by parameter name; whole tensors, safetensors
                rng-<rank>.safetensors
                engine.json     what was saved
A bucket of tensors at a time is whole on its way to rank 0, and one piece (a tensor, or those that become one in files)
on its way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift import distributed, log
from megaswift.base.atomic_writes import fsync_path
from megaswift.bridge.checkpoint.dtypes import saved_dtype_problem
from megaswift.bridge.checkpoint.torch_step import TorchStepSource
from megaswift.bridge.hf.model_folder import persistent_buffers, tensors_by_disk_name
from megaswift.bridge.hf.source import HfSource, TensorMeta
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES, HfWriter
from megaswift.engine import rng_state
from megaswift.engine.buckets import bucket_size, filled
from megaswift.engine.protocol import FileEntries, Receivers
from megaswift.engine.torch import weights as torch_weights
from megaswift.engine.torch.adapters.peft_names import PREFIX, unwrap_peft_model
from megaswift.engine.torch.conversions import conversion_groups, jointly_written_parameters
from megaswift.engine.torch.host_memory import returning_freed_memory_to_system
from megaswift.engine.torch.shared_reads import read_tensors_once_over_ranks
from megaswift.engine.torch.state import EngineState
from megaswift.engine.torch.strategies.parts import is_receiver
from megaswift.engine.torch.strategies.strategy import WEIGHT
from megaswift.errors import ROOM, Problem, UserError
from megaswift.folders.checkpoint import FACTS, WHOLE, CheckpointTensorAndModelPaths

FORMAT = "torch-2"


def save_step(engine: EngineState, directory: Path) -> FileEntries:
    """Everything into `directory`, on disk when this returns; the entries of files whose hashes were computed while
    they were written. Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    problems = write_tensor_stream_to_folder(
        engine, directory / WHOLE, _tensors(engine), _stream_all(engine), lambda writer: writer.close()
    )
    entries = FileEntries()
    try:
        if engine.allocation is not None and engine.rank == 0:
            engine.allocation.write(directory)
        small = []
        if engine.settings.save_rng:
            entries = rng_state.write_rng_state(directory, engine.rank)
        if engine.rank == 0 and not problems:
            (directory / FACTS).write_text(json.dumps(_facts(engine), indent=1) + "\n", encoding="utf-8")
            small.append(directory / FACTS)
        for path in [*small, directory]:
            fsync_path(path)
    except OSError as error:
        problems = [Problem(str(directory), f"could not be written ({error})", ROOM)]
    distributed.raise_on_all_ranks(problems)
    return entries


def write_tensor_stream_to_folder(
    engine: EngineState,
    folder: Path,
    metas: Mapping[str, TensorMeta],
    tensors: Iterable[tuple[str, Tensor]],
    close: Callable[[HfWriter], object],
) -> list[Problem]:
    """A stream of tensors into a folder, on rank 0; what went wrong. Every rank goes through the stream, also when rank
    0 cannot write."""
    problems: list[Problem] = []
    writer: HfWriter | None = None
    try:
        writer = HfWriter(folder, metas, MAX_SHARD_BYTES, overwrite=True) if engine.rank == 0 else None
    except UserError as error:
        problems = list(error.problems)
    with returning_freed_memory_to_system():
        for name, tensor in tensors:
            if writer is not None and not problems:
                try:
                    writer.add(name, tensor)
                except UserError as error:
                    problems = list(error.problems)
    if writer is not None and not problems:
        try:
            close(writer)
        except UserError as error:
            problems = list(error.problems)
    return problems


def stream_weights(
    engine: EngineState, kind: str, to: Receivers = "rank0", on_device: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model's files, whole tensor) on receivers, nothing on other ranks: in host memory or on the
    engine's device. Collective: every rank iterates to the end.

    Weights are all that the files hold, adapters merged in: buffers too, as the router's expert bias of DeepSeek-V3 is
    one.
    """
    bare = unwrap_peft_model(engine.fields.model)
    merging = engine.merging
    device = engine.context.device if on_device else torch.device("cpu")
    if merging is not None:
        names = merging.names
    else:
        names = [n.removeprefix(PREFIX) for n in (engine.shapes if kind == WEIGHT else engine.strategy.trained())]
    groups = jointly_written_parameters(bare, names)
    ordered = [name for group in groups for name in group]
    needed = [PREFIX + name for name in ordered] if merging is None else merging.needed(ordered)
    tensors = gathered(engine, [(name, kind) for name in needed], to)
    if not is_receiver(to):
        for _ in tensors:
            pass
        return
    read = (lambda name: next(tensors)) if merging is None else merging.reader(tensors)
    for group in groups:
        made = {name: read(name).detach().to(device) for name in group}
        yield from tensors_by_disk_name(bare, made).items()
    if kind == WEIGHT:
        model_buffers = persistent_buffers(bare) if merging is None else merging.buffers(bare)
        yield from tensors_by_disk_name(
            bare, {name: tensor.to(device) for name, tensor in model_buffers.items()}
        ).items()


def gathered(engine: EngineState, wanted: Sequence[tuple[str, str]], to: Receivers) -> Iterator[Tensor]:
    """Yield the whole tensor of each (parameter, kind) on receivers, gathered a bucket at a time. Collective."""
    for bucket in filled(wanted, lambda one: 4 * engine.shapes[one[0]].numel(), bucket_size(engine.context.device)):
        yield from engine.strategy.whole(bucket, to)


def meta_tensors_by_disk_name(engine: EngineState) -> dict[str, Tensor]:
    """Return the weights of `stream_weights` on the meta device: shapes and dtypes."""
    bare = unwrap_peft_model(engine.fields.model)
    metas = {name.removeprefix(PREFIX): torch.empty(shape, device="meta") for name, shape in engine.shapes.items()}
    return tensors_by_disk_name(bare, metas) | tensors_by_disk_name(bare, persistent_buffers(bare))


def _stream_all(engine: EngineState) -> Iterator[tuple[str, Tensor]]:
    """Everything under its name in `state`."""
    if not engine.adapts:
        for name, tensor in stream_weights(engine, WEIGHT):
            yield f"{WEIGHT}.{name}", tensor
    entries = list(_entries(engine))
    keys = [f"{kind}.{name}" for name, kind in entries]
    yield from zip(keys, gathered(engine, entries, "rank0"), strict=engine.rank == 0)


def load_step(engine: EngineState, directory: Path) -> None:
    """The inverse of `save_step`, under any strategy and number of ranks. Collective; nothing is changed by an unfit
    checkpoint."""
    facts, source = _open(engine, directory)
    same = facts["world_size"] == engine.layout.world_size
    has_rng = facts.get("random_states", True)
    states: Any = None
    if has_rng:
        states = rng_state.read_rng_state_file(directory, engine.rank if same else 0)
    distributed.raise_on_all_ranks([states] if isinstance(states, Problem) else [])
    engine.strategy.steps = int(facts["step"])
    with returning_freed_memory_to_system():
        if not engine.adapts:
            weights = TorchStepSource(CheckpointTensorAndModelPaths(directory, directory), torch.float32)
            torch_weights.fill_from_files(
                engine, conversion_groups(unwrap_peft_model(engine.fields.model), weights), weights, {}
            )
        stored = {f"{kind}.{name}": (name, kind) for name, kind in _entries(engine)}
        for key, tensor in read_tensors_once_over_ranks(source, list(stored), engine.context):
            engine.strategy.put(*stored[key], tensor)
    if engine.strategy.loss_scale is not None and facts.get("loss_scale"):
        engine.strategy.loss_scale.load_state_dict(facts["loss_scale"])
    if engine.allocation is not None:
        engine.allocation.read(directory)
    if has_rng and same and rng_state.rng_state_fits_generators(states[0]):
        rng_state.restore_rng_state(*states)
        return
    seed = engine.settings.seed, engine.strategy.steps
    engine.context.seed(rng_state.seed_from_saved_rng_state(directory, *seed))
    where = f"by {facts['world_size']} processes"
    log.info(rng_state.reseeding_reason(directory, has_rng, where))


def _entries(engine: EngineState) -> dict[tuple[str, str], TensorMeta]:
    """Return all that has the name of a parameter, as (parameter, kind) in one order on every rank. With adapters also
    what trains, which is all."""
    trained = list(engine.strategy.trained())
    entries = {(n, WEIGHT): TensorMeta(tuple(engine.shapes[n]), torch.float32) for n in trained if engine.adapts}
    if engine.strategy.steps:
        entries |= {(n, kind): meta for n in trained for kind, meta in engine.strategy.states(n).items()}
    return entries


def _tensors(engine: EngineState) -> dict[str, TensorMeta]:
    weights = (
        {}
        if engine.adapts
        else {
            f"{WEIGHT}.{n}": TensorMeta(tuple(t.shape), t.dtype) for n, t in meta_tensors_by_disk_name(engine).items()
        }
    )
    return weights | {f"{kind}.{name}": meta for (name, kind), meta in _entries(engine).items()}


def _facts(engine: EngineState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": engine.kind,
        "world_size": engine.layout.world_size,
        "step": engine.strategy.steps,
        "random_states": engine.settings.save_rng,
        "train_type": engine.build.model.train_type,
        "optimizer": engine.optim.optimizer,
        "loss_scale": None if engine.strategy.loss_scale is None else engine.strategy.loss_scale.state_dict(),
    }


def _open(engine: EngineState, directory: Path) -> tuple[dict[str, Any], HfSource]:
    """engine.json and the tensors' table, after all checks that read no tensor."""
    problems: list[Problem] = []
    facts: dict[str, Any] = {}
    source: HfSource | None = None
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            problems.append(
                Problem(
                    str(directory),
                    f"has format {facts['format']}; this version reads {FORMAT}",
                    f"--model {directory.parent} to start from its weights",
                )
            )
        else:
            source = HfSource(directory / WHOLE)
            problems += _differences(engine, facts, source)
    except UserError as error:
        problems += error.problems
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(Problem(str(directory / FACTS), f"cannot be read ({type(error).__name__}: {error})"))
    distributed.raise_on_all_ranks(problems)
    assert source is not None
    return facts, source


def _differences(engine: EngineState, facts: dict[str, Any], source: HfSource) -> list[Problem]:
    current = _facts(engine)
    problems = [
        Problem(f"--{name} {current[name]}", f"the checkpoint's run had {facts[name]}", f"--{name} {facts[name]}")
        for name in ("train_type", "optimizer")
        if facts[name] != current[name]
    ]
    if problems:
        return problems
    engine.strategy.steps = int(facts["step"])
    expected = _tensors(engine)
    stored = set(source.names())
    problems = [Problem(name, "is in the checkpoint, but not in this model") for name in sorted(stored - set(expected))]
    problems += [
        Problem(name, "is in this model, but not in the checkpoint") for name in sorted(set(expected) - stored)
    ]
    problems += [
        Problem(name, f"has shape {source.shape(name)} in the checkpoint and {meta.shape} in this model")
        for name, meta in expected.items()
        if name in stored and tuple(source.shape(name)) != meta.shape
    ]
    problems += [
        other
        for name, meta in expected.items()
        if name in stored
        and (other := saved_dtype_problem(name, source.dtype(name), meta.dtype, not name.startswith(f"{WEIGHT}.")))
    ]
    return problems[:12]

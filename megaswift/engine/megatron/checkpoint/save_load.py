"""Saving and loading an engine: weights, optimizer and the random states of every rank, on any layout.

A folder holds  .metadata, __<rank>_0.distcp   weights and optimizer states, torch_dist
                metadata.json, common.pt       what Megatron-Core's own loader looks for; never read here
                rng-<rank>.safetensors         random states
                fp8-<rank>.safetensors         scales and amax histories, of delayed FP8 scaling
                engine.json                    layout, model, optimizer and its step
Owns what is saved and loaded, in which order, and what makes a checkpoint unfit. When to save, hashes of the files and
which checkpoint is the latest belong to the trainer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megaswift import distributed, log
from megaswift.base.atomic_writes import fsync_path, write_hashed
from megaswift.bridge.checkpoint import chunk_files as files
from megaswift.bridge.checkpoint import metadata
from megaswift.bridge.checkpoint.entries import KEPT, MAIN, STATES
from megaswift.engine import rng_state
from megaswift.engine.megatron.checkpoint import fp8_history
from megaswift.engine.megatron.checkpoint import optimizer_states as states
from megaswift.engine.megatron.checkpoint import rank_chunks as boxes
from megaswift.engine.megatron.cuda_graphs import set_tracked_rng_states, tracked_rng_states
from megaswift.engine.megatron.lora import checkpoint
from megaswift.engine.megatron.model import finish_weight_gathers
from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight, quantize_from_main_weights
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.state import EngineState
from megaswift.errors import ROOM, Problem

FORMAT = 1
FACTS = "engine.json"
SHOWN = 12
"""Tensors named in one error; the rest are counted."""


def save_engine(engine: EngineState, directory: Path) -> files.Entries:
    """Everything into `directory`, on disk when this returns; the entries of this rank's files. Collective."""
    started = start_save(engine, directory, on_host=False)
    problems: list[Problem] = []
    try:
        started.write()
    except OSError as error:
        problems = [Problem(str(directory), f"could not be written ({error})", ROOM)]
    distributed.raise_on_all_ranks(problems, limit=SHOWN)
    return started.finish()


class StartedRankSave:
    """A save whose content is fixed: `write`, in any thread, then `finish` on all ranks together."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        chunks: Sequence[files.RankTensorChunk],
        stateless: Sequence[files.StatelessBox],
        small: dict[str, bytes],
    ) -> None:
        self.directory = directory
        self.rank = rank
        self.chunks = chunks
        self.small = small
        self.stateless = stateless
        self.saved: list[files.SavedChunk] = []
        self.entries: files.Entries = {}

    def write(self) -> None:
        """This rank's files, on disk when this returns. OSError where they cannot be written. Not collective."""
        self.saved, self.entries = files.write_rank_chunks(self.directory, self.rank, self.chunks)
        self.chunks = ()  # the memory of copies
        self.entries |= {name: write_hashed(self.directory / name, content) for name, content in self.small.items()}
        fsync_path(self.directory)

    def finish(self) -> files.Entries:
        """The tables, by rank 0, after every rank's `write`; the entries of this rank's files. Collective."""
        entries = self.entries | files.write_gathered_metadata(self.directory, self.saved, self.stateless)
        fsync_path(self.directory)
        return entries


def start_save(engine: EngineState, directory: Path, on_host: bool = True) -> StartedRankSave:
    """Fixes what is saved. `on_host`: in copies in host memory, so that training may go on. Collective."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    finish_weight_gathers(engine.chunks)
    states.materialize_states(engine.optimizer)
    parameters = (
        boxes.local_to_global_tensor_slices(engine)
        if engine.lora is None
        else checkpoint.trainable_tensor_slices(engine.lora)
    )
    chunks = [
        *boxes.weight_chunks([(_exact_copy(engine, w), parts) for w, parts in parameters], True),
        *boxes.optimizer_chunks(parameters, states.state_slices(engine.optimizer, write=True), True),
    ]
    chunks += boxes.passthrough_hf_tensor_chunks(engine) if engine.lora is None else []
    facts = _facts(engine, int(distributed.all_max([states.get_step_count(engine.optimizer)])[0]))
    small = {}
    if engine.settings.save_rng:
        small[rng_state.rng_file(directory, engine.rank).name] = rank_rng_file_content()
    if fp8_history.uses_delayed_scaling(engine):
        file = fp8_history.fp8_history_file(directory, engine.rank)
        small[file.name] = fp8_history.fp8_histories_file_content(engine)
    if engine.rank == 0:
        small[FACTS] = (json.dumps(facts, indent=1) + "\n").encode()
    held = files.copy_chunks_to_host(chunks) if on_host else chunks
    return StartedRankSave(directory, engine.rank, held, boxes.stateless_boxes(parameters), small)


def _facts(engine: EngineState, step: int) -> dict[str, Any]:
    spec = engine.spec
    return {
        "format": FORMAT,
        "layout": dataclasses.asdict(engine.layout),
        "dtype": str(engine.config.params_dtype).removeprefix("torch."),
        "model": {
            "family": spec.family,
            "layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocabulary": spec.vocab_size,
            "experts": spec.experts,
        },
        "train_type": engine.train_type,
        "random_states": engine.settings.save_rng,
        "optimizer": {
            "name": engine.optim.optimizer,
            "step": step,
            "scaler": states.get_loss_scaler_state(engine.optimizer),
        },
    }


def load_engine(engine: EngineState, directory: Path) -> None:
    """The inverse of `save_engine`, on this or another layout. Collective; nothing is loaded when the checkpoint is
    unfit."""
    directory = Path(directory)
    facts, index = _read_tables(engine, directory)
    states.materialize_states(engine.optimizer)
    parameters = (
        boxes.local_to_global_tensor_slices(engine)
        if engine.lora is None
        else checkpoint.trainable_tensor_slices(engine.lora)
    )
    slices = states.state_slices(engine.optimizer)
    read = [(w, parts) for w, parts in parameters if not is_fp8_weight(w)]  # FP8 ones follow from their main weights
    wanted = [
        _source(box, index)
        for box in [*boxes.weight_chunks(read, False), *boxes.optimizer_chunks(parameters, slices, False)]
    ]
    items, problems = files.plan_chunk_reads(index, wanted)
    problems += files.damaged_item_problems(directory, index, items)
    same_layout = facts["layout"] == dataclasses.asdict(engine.layout)
    has_rng = facts.get("random_states", True)
    random_states: Any = None
    if has_rng:
        random_states = rng_state.read_rng_state_file(directory, engine.rank if same_layout else 0)
    problems += [random_states] if isinstance(random_states, Problem) else []
    histories: fp8_history.Histories | Problem = {}
    if fp8_history.uses_delayed_scaling(engine):
        histories = fp8_history.read_fp8_histories(engine, directory, same_layout)
        problems += [histories] if isinstance(histories, Problem) else []
    problems += _unused(engine, index, {box.key for box in wanted})
    distributed.raise_on_all_ranks(problems, limit=SHOWN)
    assert not isinstance(histories, Problem)
    files.read_planned_chunks(directory, index, wanted, items)
    states.store_filled_states(engine.optimizer, slices)
    states.set_step_count(engine.optimizer, facts["optimizer"]["step"])
    states.set_loss_scaler_state(engine.optimizer, facts["optimizer"]["scaler"])
    if has_rng and same_layout and fits_rank_rng(random_states[0]):
        restore_rank_rng(*random_states)
    else:
        seed = reseed_rank_generators(engine.context, directory, engine.settings.seed, facts["optimizer"]["step"])
        why = rng_state.reseeding_reason(directory, has_rng, "with another layout or device")
        log.info(f"{why} (seed {seed})")
    if fp8_history.uses_delayed_scaling(engine):
        _restore_histories(engine, histories, same_layout)
    if engine.config.fp8_param:
        quantize_from_main_weights(engine.optimizer, engine.chunks)


def _exact_copy(engine: EngineState, weight: Tensor) -> Tensor:
    """An FP8 weight's exact values, in host memory; another weight itself."""
    return engine.weights.exact(weight).cpu() if is_fp8_weight(weight) else weight


def _restore_histories(engine: EngineState, histories: fp8_history.Histories, same_layout: bool) -> None:
    """Sets what was read; says where the histories come from if not from this rank's own file."""
    empty = max(distributed.all_gather_objects(fp8_history.restore_fp8_histories(engine, histories)))
    if not same_layout and histories:
        log.info("FP8 scaling histories: each module takes that of the first rank which had this module")
    if empty:
        log.warn(
            f"the FP8 scaling histories of {empty} modules are not in the checkpoint, or are of another number of "
            "experts: these modules start with empty histories"
        )


def _read_tables(engine: EngineState, directory: Path) -> tuple[dict[str, Any], Metadata]:
    """engine.json and the tables, after all checks that need no tensor."""
    problems: list[Problem] = []
    facts: dict[str, Any] = {}
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        problems += _differences(engine, facts)
    except FileNotFoundError:
        problems.append(
            Problem(str(directory / FACTS), "is missing: not a checkpoint of this engine, or an interrupted save")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(Problem(str(directory / FACTS), f"cannot be read ({type(error).__name__}: {error})"))
    index = metadata.read_torch_dist_metadata(directory)
    problems += [index] if isinstance(index, Problem) else metadata.missing_or_short_file_problems(directory, index)
    distributed.raise_on_all_ranks(problems, limit=SHOWN)
    assert isinstance(index, Metadata)
    return facts, index


def _differences(engine: EngineState, facts: dict[str, Any]) -> list[Problem]:
    optimizer = facts["optimizer"]
    if not isinstance(optimizer["step"], int) or not isinstance(optimizer["scaler"], dict) or "layout" not in facts:
        return [Problem(FACTS, "has values of the wrong type", "resume from another checkpoint of this run")]
    if facts["format"] != FORMAT:
        return [Problem(FACTS, f"has format {facts['format']}; this version reads {FORMAT}")]
    current = _facts(engine, 0)
    if facts.get("train_type", "full") != current["train_type"]:
        saved_type = facts.get("train_type", "full")
        return [
            Problem(
                f"--train_type {current['train_type']}",
                f"the checkpoint's run had train_type {saved_type}",
                f"--train_type {saved_type}",
            )
        ]
    problems = [
        Problem(
            f"model {name}",
            f"is {facts['model'][name]} in the checkpoint and {value} in this run",
            "use the model that the checkpoint was trained from",
        )
        for name, value in current["model"].items()
        if facts["model"][name] != value
    ]
    saved_name = facts["optimizer"]["name"]
    current_name = current["optimizer"]["name"]
    if saved_name != current_name:
        problems.append(
            Problem(
                f"--optimizer {current_name}",
                f"the checkpoint has the states of {saved_name}",
                f"--optimizer {saved_name}",
            )
        )
    return problems


def _source(box: files.RankTensorChunk, index: Metadata) -> files.RankTensorChunk:
    """Where to read a box: weights of another dtype than the checkpoint's from its float32 main weights, so that they
    are rounded once; main weights from a float32 run's weights."""
    tables = index.state_dict_metadata
    if box.key.startswith(MAIN) and box.key not in tables:
        return dataclasses.replace(box, key=box.key.removeprefix(MAIN))
    if not box.key.startswith(STATES) and MAIN + box.key in tables:
        saved = tables.get(box.key)
        if isinstance(saved, TensorStorageMetadata) and saved.properties.dtype != box.data.dtype:
            return dataclasses.replace(box, key=MAIN + box.key, rounded=True)
    return box


def _unused(engine: EngineState, index: Metadata, own_keys: set[str]) -> list[Problem]:
    """Weights of the checkpoint that no rank of this model has."""
    used = {key.removeprefix(MAIN) for keys in distributed.all_gather_objects(own_keys) for key in keys}
    unused = [key for key in index.state_dict_metadata if not key.startswith((STATES, KEPT)) and key not in used]
    return (
        [Problem(key, "is in the checkpoint but not in this model") for key in sorted(unused)]
        if engine.rank == 0
        else []
    )


def rank_rng_file_content() -> bytes:
    """What the file of this rank's random states holds, with those of Megatron's tracker.

    Megatron's own checkpoints keep one expert state for all expert-parallel ranks (Megatron-LM pull request 6858); here
    each rank has its own.
    """
    return rng_state.rng_state_file_content(tracked_rng_states())


def fits_rank_rng(tensors: dict[str, Tensor]) -> bool:
    """Whether these are states of the generators that this rank has."""
    return rng_state.rng_state_fits_generators(tensors, tracked_rng_states())


def restore_rank_rng(tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Every generator of this rank back to where it stood."""
    set_tracked_rng_states(rng_state.restore_rng_state(tensors, plain))


def reseed_rank_generators(context: ParallelContext, directory: Path, seed: int = 0, step: int = 0) -> int:
    """Fresh states on every rank, from the saved ones of rank 0, else from the run's seed and step. Returns the
    seed."""
    seed = rng_state.seed_from_saved_rng_state(directory, seed, step)
    context.seed(seed)
    return seed

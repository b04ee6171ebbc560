"""Tensors that an engine holds after a step, counted on its ranks, and the model that the counts are made on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes
from megaswift.parallel.layout import Layout
from megaswift.run.faults.out_of_memory import GRADIENTS, OPTIMIZER, WEIGHTS, tensor_memory_holders
from tests.parity.cases import VOCAB, global_batch, own, parse
from tests.parity.measure import build
from tests.te import cuda


@dataclass(frozen=True)
class CountedRun:
    """A parity case (layout and batches) on a model folder."""

    text: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Processes."""
        return parse(self.text).world

    def setup(self) -> tuple[SwiftConfig, Any, Layout]:
        """(the run's configuration, its model, its layout)."""
        case = parse(self.text)
        config = json.loads((self.folder / "config.json").read_text())
        cfg = SwiftConfig(task="sft", model=str(self.folder), **case.config(**self.options))
        return cfg, family_of(config).spec(config), Layout.from_config(cfg.parallel, case.world)


@dataclass(frozen=True)
class Held:
    """Bytes of the storages behind weights, gradients and optimizer states."""

    weights: int
    gradients: int
    optimizer: int
    fp8_copies: int = 0
    """Of weights that Transformer Engine has quantized, in bytes of 8 bits: MXFP8's scales, no float32 ones."""


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, each block once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def count_held(rank: int, world: int, run: CountedRun) -> Held:
    """After one step (on the ranks); of the torch engines gradients of the next one, which drop theirs in a step."""
    if run.options.get("fp8_recipe") == "mxfp8":
        cuda.stand_for(cuda.BLACKWELL)
    case = parse(run.text)
    engine, context = build(case, run.folder, world, **run.options)
    mine = own(global_batch(case, 2), case.dp, context.layout.coordinates(rank).dp)
    assert not engine.train_batch(mine, CrossEntropy(), 1e-3).skipped
    held = _of_megatron(engine) if hasattr(engine, "plain") else _of_torch(engine, mine)
    torch.distributed.barrier()
    context.close()
    return held


def _counters(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Of torch's Adam: a number of steps for each parameter."""
    states = [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    return storages(t for t in states if t.dim() == 0)


def _of_megatron(engine: Any) -> Held:
    from megaswift.engine.megatron.layers.nf4_linear import NF4Matrix
    from megaswift.engine.megatron.optim.optimizer import optimizer_parts

    nf4 = sum(m.nbytes for c in engine.plain for m in c.modules() if isinstance(m, NF4Matrix))
    found = tensor_memory_holders(torch.device("cpu"))
    counters = _counters(part.optimizer for part in optimizer_parts(engine.optimizer))
    copies = storages(_fp8_copies(m for c in engine.plain for m in c.modules()))
    beside = _beside_fp8_weights(p for c in engine.plain for p in c.parameters())
    weights = found.get(WEIGHTS, 0) + nf4 - storages(beside)
    copies += sum(t.nbytes for t in beside if t.dtype == torch.uint8)  # the test device's storages are whole blocks
    return Held(weights, found.get(GRADIENTS, 0), found.get(OPTIMIZER, 0) - counters, copies)


def _beside_fp8_weights(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The transposes of weights in FP8, and their float32 scales: the weights themselves lie in buffers."""
    from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight

    parts = [vars(p).items() for p in parameters if is_fp8_weight(p)]
    names = ("_transpose", "_columnwise_data", "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv")
    return [value for part in parts for name, value in part if name in names and value is not None]


def _fp8_copies(modules: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from (t for t in vars(copy).values() if isinstance(t, Tensor) and t.dtype == torch.uint8)


def _of_torch(engine: Any, batches: Any) -> Held:
    strategy = engine.strategy
    inner = strategy.optimizer.inner if hasattr(strategy, "optimizer") else strategy._inner
    engine.accumulate(batches, CrossEntropy())

    def local(tensors: Iterable[Any]) -> Iterator[Tensor]:
        yield from (t.to_local() if hasattr(t, "to_local") else t for t in tensors)

    parameters = list(engine.fields.parameters())
    states = local(t for s in inner.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = list(states)
    if hasattr(strategy, "_zero"):
        gradients += [g for part in strategy._zero.averaged_gradients.values() for g in part or []]
        optimizer += strategy._zero.single_partition_of_fp32_groups
    return Held(storages(local(parameters)), storages(local(gradients)), storages(optimizer))


@dataclass(frozen=True)
class Saved:
    """Bytes of tensors that autograd keeps, storages once, weights left out."""

    forward: int
    """When the first backward pass begins."""
    peak: int
    """At most, recomputed layers included."""


class SavedBytes:
    """Counts what `saved_tensors_hooks` sees come and go."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {t.untyped_storage().data_ptr() for t in weights}
        self.users: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0
        self.forward: int | None = None

    def pack(self, tensor: Tensor) -> _SavedTensor:
        """A tensor is saved."""
        return _SavedTensor(self, tensor)

    def unpack(self, saved: _SavedTensor) -> Tensor:
        """A backward pass asks for it."""
        if self.forward is None:
            self.forward = self.live
        return saved.tensor

    def add(self, tensor: Tensor, count: int) -> None:
        """One user more or less of the memory behind a tensor."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self.weights:
            return
        before = self.users[place] > 0
        self.users[place] += count
        change = (self.users[place] > 0) - before
        self.sizes.setdefault(place, storage.nbytes())
        self.live += change * self.sizes[place]
        if change < 0:
            del self.sizes[place]
        self.peak = max(self.peak, self.live)


class _SavedTensor:
    """In place of a saved tensor, as long as autograd keeps it."""

    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        counter.add(tensor, 1)

    def __del__(self) -> None:
        self.counter.add(self.tensor, -1)


def full_rows(rows: int, length: int, packed: bool) -> Batch:
    """A micro-batch without padding, in which every token has a label."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))
    bounds = torch.tensor([0, length], dtype=torch.int32) if packed else None
    valid = torch.ones(rows, length, dtype=torch.bool)
    return Batch(ids, ids.clone(), valid.float(), torch.arange(length).repeat(rows, 1), valid, bounds)


def count_saved(rank: int, world: int, run: CountedRun) -> Saved:
    """Of one micro-batch of full rows, in which every token has a label (on the ranks)."""
    case = parse(run.text)
    engine, context = build(case, run.folder, world, **run.options)
    cfg = run.setup()[0]
    batch = full_rows(cfg.train.per_device_train_batch_size, cfg.data.max_length, bool(cfg.data.packing))
    count = SavedBytes(t for c in engine.plain for t in (*c.parameters(), *c.buffers()))
    with torch.autograd.graph.saved_tensors_hooks(count.pack, count.unpack):
        engine.accumulate([batch] * case.total, CrossEntropy())
    torch.distributed.barrier()
    context.close()
    assert count.forward is not None
    return Saved(count.forward, count.peak)


def count_peak(rank: int, world: int, task: tuple[CountedRun, int]) -> int:
    """Bytes that one micro-batch allocates at the peak of its passes, by torch's own count of allocations on a CPU; the
    head's chunks hold so many bytes (on the ranks)."""
    run, chunk = task
    head_memory.CHUNK_SIZES["cpu"] = HeadChunkSizes(chunk, chunk, 1)
    engine, context = build(parse(run.text), run.folder, world, **run.options)
    cfg = run.setup()[0]
    batch = full_rows(cfg.train.per_device_train_batch_size, cfg.data.max_length, packed=False)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    engine.accumulate([batch], CrossEntropy())  # what is made once is there
    # On CPUs without bfloat16 products oneDNN takes float32 copies of both matrices from the same allocator. A pass
    # without it takes seconds.
    with torch.backends.mkldnn.flags(enabled=False), profiler:
        engine.accumulate([batch], CrossEntropy())
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    context.close()
    return max(accumulate(sizes))


CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
"""All sizes are multiples of what buffers and shards are padded to."""
assert CONFIG["vocab_size"] > VOCAB, "the batches' tokens are in the vocabulary"
MOE: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.02,
}


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A model of random weights, made by transformers."""
    import transformers

    if not folder.exists():
        torch.manual_seed(5)
        name = config["architectures"][0].removesuffix("ForCausalLM")
        built = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
        built.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
    return folder

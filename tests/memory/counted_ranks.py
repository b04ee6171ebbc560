"""Tensors that an engine holds after a step, counted on its ranks, and the model that the counts are made on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.losses.sft import CrossEntropy
from megaswift.parallel.layout import Layout
from megaswift.trainers.tensor_memory_holders import GRADIENTS, OPTIMIZER, WEIGHTS, tensor_memory_holders
from tests.parity.cases import VOCAB, global_batch, own, parse
from tests.parity.measure import build


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


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, each block once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def count_held(rank: int, world: int, run: CountedRun) -> Held:
    """After one step (on the ranks); of the torch engines gradients of the next one, which drop theirs in a step."""
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
    from megaswift.engine.megatron.optimizer import optimizer_parts

    nf4 = sum(m.nbytes for c in engine.plain for m in c.modules() if isinstance(m, NF4Matrix))
    found = tensor_memory_holders(torch.device("cpu"))
    counters = _counters(part.optimizer for part in optimizer_parts(engine.optimizer))
    return Held(found.get(WEIGHTS, 0) + nf4, found.get(GRADIENTS, 0), found.get(OPTIMIZER, 0) - counters)


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

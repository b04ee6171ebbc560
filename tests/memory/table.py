"""The table of memory: combinations of family, layout and options, what their runs hold, and what the formulas say.

Owns the choice of the rows (seeded, all pairs of choices) and the comparison of one row.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from megaswift.config import SwiftConfig
from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.errors import ConfigError, LayoutError
from megaswift.families import family_of
from megaswift.losses.contract import Batch
from megaswift.losses.mtp import MultiTokenPrediction
from megaswift.losses.sft import CrossEntropy
from megaswift.memory.activation_bytes import (
    ActivationBytes,
    activation_moments,
    kept_by_chunk,
    last_stage_head,
    passes_by_chunk,
    shared_angle_bytes,
)
from megaswift.memory.layer_activations import layer_input_bytes, mask_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels, MicrobatchSetup
from megaswift.memory.state_bytes import float32_main_bytes, gradient_buffers, held_bytes, state_bytes_per_element
from megaswift.models.spec import ModelSpec
from megaswift.parallel.checks import legal_layout
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import ModelChunk, PipelineSplit, model_chunks_by_stage
from megaswift.parallel.te_attention import te_unsupported_attention_features
from megaswift.run.checks.fit import step_options
from tests.memory.counted_ranks import Held, SavedBytes, _of_megatron, full_rows
from tests.memory.live_bytes import LiveBytes, held_tensors
from tests.memory.of_config import parameters_of, parts_of
from tests.parity.cases import parse
from tests.parity.measure import build
from tests.parity.models import KNOWN
from tests.parity.mtp import MTP

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "sliding_window": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rotary_dim": 16,
}
"""The fields of a variant that are larger than in the parity tests."""
LENGTH = 256
EXPERT_MLPS = ("gpt_oss", "mixtral", "olmoe", "minimax_m2")
"""Model types whose `intermediate_size` is an expert's."""


COUNTS = Path(__file__).parent / "counts.jsonl"
HELD_OUT = Path(__file__).parent / "held_out.jsonl"
"""Rows of another seed on torch's layers, on up to four ranks."""
HELD_OUT_SEED = 778


@dataclass(frozen=True)
class TableRow:
    """One run."""

    family: str
    """A variant of the parity tests."""
    layout: str
    """Words of a parity case: `tp2 sp pp2`."""
    te: bool = False
    """Transformer Engine's modules, on the test device."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.family, self.layout, self.te, tuple(sorted(self.options.items()))))

    @property
    def text(self) -> str:
        """The parity case. Its model is not that of the row: only whether it has experts counts."""
        te = ["te"] if self.te else []
        return " ".join(["moe" if experts_of(self.family) else "dense", *self.layout.split(), *te])

    @property
    def world(self) -> int:
        """Processes."""
        return parse(self.text).world

    @property
    def values(self) -> dict[str, Any]:
        """The options of the run, with those that all rows share."""
        more = {"mtp_num_layers": MTP[self.family]} if self.family in MTP else {}
        case = parse(self.text)
        return {
            "torch_dtype": "bfloat16",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": case.total // case.dp,
            "max_length": LENGTH,
            **more,
            **self.options,
        }

    def config(self, folder: Path | str = "model") -> SwiftConfig:
        """As a run's."""
        return SwiftConfig(task="sft", model=str(folder), **parse(self.text).config(**self.values))


@cache
def model_config(family: str) -> tuple[str, dict[str, Any]]:
    """(model type, fields) of a family's model."""
    kind, fields = KNOWN[family]
    sizes = {name: value for name, value in SIZES.items() if fields.get(name) is not None}
    if kind in EXPERT_MLPS:
        sizes["intermediate_size"] = 128
    return kind, {**fields, **sizes}


def hf_config(family: str) -> Any:
    """The transformers configuration of a family's model."""
    from transformers import AutoConfig

    from tests.parity import deepseek_moe

    kind, fields = model_config(family)
    if kind in ("deepseek", "kimi_k2", "mistral4"):
        deepseek_moe.register()
    return AutoConfig.for_model(kind, **{"rope_theta": 10000.0, **json.loads(json.dumps(fields))})


@cache
def spec_of(family: str) -> ModelSpec:
    """Its model."""
    config = json.loads(hf_config(family).to_json_string(use_diff=False))
    spec = family_of(config).spec(config)
    return replace(spec, features=replace(spec.features, mtp_layers=MTP.get(family, 0)))


@cache
def experts_of(family: str) -> bool:
    """Whether it has experts."""
    return bool(spec_of(family).experts)


def make_folder(family: str, folder: Path) -> Path:
    """A model folder with random weights."""
    import transformers

    from tests.parity import mtp
    from tests.parity.models import randomize

    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").exists():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(hf_config(family))
        randomize(model, 7)
        model.to(torch.float32).save_pretrained(folder, max_shard_size="200KB")
        if layers := MTP.get(family):
            mtp.add_to_folder(folder, model, layers)
    return folder


# Counted


@dataclass(frozen=True)
class Counted:
    """On one rank."""

    held: Held
    forward: int
    """Bytes that autograd keeps when the first backward pass begins."""
    peak: int
    """Bytes of all tensors at the peak of the passes (`LiveBytes`)."""
    expert_rows: list[float]
    """Rows of the experts of each layer in the order of its forward pass; none where ranks exchange no tokens."""
    peak_rows: list[float]
    """The same of the passes with the peak, for which some routers have other biases."""


def full_batch(cfg: SwiftConfig) -> Batch:
    """A micro-batch of full rows; packed ones are documents of one row."""
    rows, length = cfg.train.per_device_train_batch_size, cfg.data.max_length
    if not cfg.data.packing:
        return full_rows(rows, length, False)
    one = full_rows(1, rows * length, True)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    positions = torch.arange(length).repeat(rows)[None]
    return replace(one, cu_seqlens=bounds, positions=positions)


def count_row(rank: int, world: int, task: tuple[TableRow, Path]) -> Counted:
    """Weights, gradients and states after a step, and the bytes of its passes (on the ranks)."""
    row, folder = task
    case = parse(row.text)
    engine, context = build(case, folder, world, **row.values)
    cfg = row.config(folder)
    loss: Any = CrossEntropy()
    if cfg.model.mtp_num_layers:
        loss = MultiTokenPrediction(loss, cfg.model.mtp_num_layers, 0.1)
    batches = [full_batch(cfg) for _ in range(case.total // case.dp)]
    rows = _count_expert_rows(engine) if case.ep > 1 else {}
    count = SavedBytes(t for c in engine.plain for t in (*c.parameters(), *c.buffers()))
    with torch.autograd.graph.saved_tensors_hooks(count.pack, count.unpack):
        engine.accumulate(batches, loss)
    kept_rows = _taken(rows)
    live = LiveBytes(t for c in engine.plain for t in held_tensors(c))
    with live:
        engine.accumulate(batches, loss)
    peak_rows = _taken(rows)
    assert not engine.train_batch(batches, loss, 1e-3).skipped
    held = _of_megatron(engine)
    torch.distributed.barrier()
    context.close()
    assert count.forward is not None
    return Counted(held, count.forward, live.peak, kept_rows, peak_rows)


def _taken(rows: Mapping[Any, list[int]]) -> list[float]:
    """The mean of each layer, which begins anew."""
    found = [statistics.mean(calls) for calls in rows.values()]
    for calls in rows.values():
        calls.clear()
    return found


def _count_expert_rows(engine: Any) -> dict[Any, list[int]]:
    """Rows that each layer's experts get, call by call."""
    found: dict[Any, list[int]] = {}

    def count(module: Any, given: Any) -> None:
        tokens = given[0]
        found[module].append(tokens.reshape(-1, tokens.shape[-1]).shape[0])

    for chunk in engine.plain:
        for name, module in chunk.named_modules():
            if name.endswith("mlp.experts"):
                found[module] = []
                module.register_forward_pre_hook(count)
    return found


# Computed


@dataclass(frozen=True)
class Computed:
    """For the ranks of a stage."""

    held: Held
    all_states: int
    """Bytes of optimizer states of all ranks of the stage: of one rank they are fewer where its shard holds padding."""
    forward: int
    peak: int


def kernels_of(row: TableRow, cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> ComputeKernels:
    """Whose modules the run has."""
    dtype = cfg.model.torch_dtype
    exchange = cfg.parallel.cp_exchange if layout.cp > 1 else None
    own = te_unsupported_attention_features(spec, exchange, cfg.data.shares_rows)
    if not row.te:
        return ComputeKernels(TORCH, TORCH, dtype, False)
    linear = TORCH if cfg.model.train_type == "qlora" else TRANSFORMER_ENGINE
    return ComputeKernels(linear, TORCH if own else TRANSFORMER_ENGINE, dtype, False)


def setup_of(row: TableRow, imbalance: float = 1.0) -> tuple[MicrobatchSetup, SwiftConfig]:
    """What the formulas take, where the fullest rank has so many times the even number of tokens."""
    cfg = row.config()
    spec = spec_of(row.family)
    layout = Layout.from_config(cfg.parallel, row.world)
    kernels = kernels_of(row, cfg, spec, layout)
    options = replace(step_options(cfg, layout.dp), expert_imbalance=imbalance)
    return MicrobatchSetup(options, spec, layout, kernels, parts_of(cfg, spec)), cfg


def _saved(setup: MicrobatchSetup, chunk: ModelChunk) -> int:
    """What autograd keeps: masks too, where attention is not computed again."""
    kept = kept_by_chunk(setup, chunk)
    model = setup.options.model
    whole = list(chunk.layers)
    if model.recompute_granularity == "full":
        whole = whole[model.recompute_num_layers or 1 :] if model.recompute_method == "block" else []
    elif "core_attn" in model.recompute_modules:
        whole = []
    return kept.total + kept.tokens + mask_bytes(setup, whole)


def computed(row: TableRow, stage: int, imbalances: Sequence[float] = (), at_peak: Sequence[float] = ()) -> Computed:
    """What the formulas say, where the experts of each layer of the rank have so many times the even number of rows."""
    setup, cfg = setup_of(row, statistics.mean(imbalances) if imbalances else 1.0)
    layout = setup.layout
    chunks = model_chunks_by_stage(setup.spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel))[stage]
    passes = setup.options.passes
    first, _ = passes_by_chunk(setup, stage, passes)[0]
    forward = sum(count * _saved(setup, chunks[i]) for i, count in first.items()) + shared_angle_bytes(setup)
    forward += last_stage_head(setup).kept if any(chunk.loss for chunk in chunks) else 0
    run = parameters_of(cfg, setup.spec, layout, setup.kernels)
    parameters = run.of_stage(stage)
    held = held_bytes(setup.options, setup.kernels.dtype, layout, parameters)
    main, moments = state_bytes_per_element(setup.options.optim, setup.kernels.dtype)
    sharded = uses_distributed_optimizer(setup.options.distributed_optimizer, setup.options.optim.optimizer)
    ranks = layout.world_size // layout.pp
    states = sum(
        buffer.elements
        * ((float32_main_bytes(setup.options.optim) if buffer.float32 else main) + moments)
        * ranks
        // (buffer.replicas if sharded else 1)
        for buffer in gradient_buffers(setup.options.model, layout, parameters)
    )
    peak = _peak(setup, stage, chunks, at_peak)
    return Computed(
        Held(held.weights + held.first_values, held.gradients, held.optimizer, held.fp8_copies),
        states,
        forward,
        peak,
    )


def _peak(setup: MicrobatchSetup, stage: int, chunks: list[ModelChunk], imbalances: Sequence[float]) -> int:
    """At the peak the last layer has its own rows, and a group of layers that are computed again have theirs; all else
    that is kept is a sum over layers."""

    def moments(imbalance: float, some: list[ModelChunk] = chunks) -> list[ActivationBytes]:
        own = replace(setup, options=replace(setup.options, expert_imbalance=imbalance))
        return list(activation_moments(own, stage, some, setup.options.passes))

    everywhere = moments(statistics.mean(imbalances) if imbalances else 1.0)
    if not imbalances:
        return max(m.total for m in everywhere)
    model = setup.options.model
    if model.recompute_granularity != "full" or model.recompute_method == "block":
        pairs = zip(everywhere, moments(imbalances[-1]), strict=True)
        return max(replace(last, kept=m.kept).total for m, last in pairs)
    # from the last group on: inputs of groups without experts are freed, to those with experts comes a gradient
    (chunk,) = chunks
    moe = setup.spec.moe_layers
    of_layer = dict(zip((layer for layer in chunk.layers if moe[layer]), imbalances, strict=False))
    found = [m.total for m in everywhere if not m.recomputed]
    hidden = layer_input_bytes(setup)
    kept = moments(1.0, [replace(chunk, loss=False)])[0].kept
    every = model.recompute_num_layers or 1
    for first in reversed(range(0, len(chunk.layers), every)):
        group = chunk.layers[first : first + every]
        rows = [of_layer[layer] for layer in group if moe[layer]] or [1.0]
        alone = [replace(chunk, layers=group)]
        pairs = zip(moments(statistics.mean(rows), alone), moments(rows[-1], alone), strict=True)
        found += [replace(last, kept=kept, recomputed=m.recomputed).total for m, last in pairs if m.recomputed]
        kept += hidden if any(moe[layer] for layer in group) else -hidden
    return max(found)


@dataclass(frozen=True)
class Errors:
    """Of one row: the worst rank's, and of the peak the worst of the fullest ranks of the stages."""

    weights: int
    gradients: int
    states: int
    """Bytes of the first three, those of the states over the ranks of a stage."""
    kept: float
    """Share of the counted bytes."""
    peak: float | None
    """Of the passes' tensors; None where stand-ins compute in place of kernels."""
    step: float | None
    """Of these and what the rank holds."""


def errors_of(row: TableRow, ranks: Sequence[Counted]) -> Errors:
    """The formulas compared with the counts."""
    setup, _ = setup_of(row)
    layout = setup.layout
    pp = layout.pp
    even = setup.residual_tokens * max(1, setup.spec.topk) * layout.etp
    per_stage = len(ranks) // pp
    found = []
    for stage in range(pp):
        own = ranks[stage * per_stage : (stage + 1) * per_stage]
        fullest = max(own, key=lambda rank: rank.peak)
        for rank in own:
            c = computed(row, stage, *([n / even for n in rows] for rows in (rank.expert_rows, rank.peak_rows)))
            assert rank.held.optimizer <= c.held.optimizer, "no shard holds more"
            # ranks without rows of their own have the formulas of the fullest
            counted = rank.peak if rank.peak_rows else fullest.peak
            found.append(
                Errors(
                    c.held.weights - rank.held.weights,
                    c.held.gradients - rank.held.gradients,
                    c.all_states - sum(r.held.optimizer for r in own),
                    c.forward / rank.forward - 1,
                    None if row.te else c.peak / counted - 1,
                    None if row.te else (c.peak + _whole(c.held)) / (counted + _whole(rank.held)) - 1,
                )
            )
    names = ("weights", "gradients", "states", "kept", *(() if row.te else ("peak", "step")))
    worst = {name: max((getattr(e, name) for e in found), key=abs) for name in names}
    return Errors(**({"peak": None, "step": None} | worst))


def _whole(held: Held) -> int:
    return held.weights + held.gradients + held.optimizer


# The counts of all rows in a file, a line for each


def read_counts(file: Path = COUNTS) -> dict[TableRow, list[Counted]]:
    """What `scripts/memory_table.py` has counted."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        value = json.loads(line)
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in value["options"].items()}
        row = TableRow(value["family"], value["layout"], value["te"], options)
        found[row] = [Counted(Held(*held), *others) for held, *others in value["ranks"]]
    return found


def write_counts(counts: Mapping[TableRow, Sequence[Counted]], file: Path = COUNTS) -> None:
    """The inverse."""
    lines = []
    for row, ranks in counts.items():
        listed = [[list(asdict(r.held).values()), r.forward, r.peak, r.expert_rows, r.peak_rows] for r in ranks]
        value = {"family": row.family, "layout": row.layout, "te": row.te, "options": dict(row.options)}
        lines.append(json.dumps({**value, "ranks": listed}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


# The choice of the rows

FAMILIES = (
    "dense",
    "llama",
    "llama-bias",
    "mistral-window",
    "qwen2",
    "phi3",
    "glm4",
    "olmo2",
    "olmo3",
    "exaone4",
    "granite",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "hunyuan_v1_dense",
    "ministral3",
    "arcee",
    "moe",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "deepseek_v2-greedy",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "deepseek_v3-mtp",
    "glm4_moe-mtp",
    "qwen3_5-mtp",
    "qwen3_next-mtp",
)
LAYOUTS = (
    "single",
    "dp2",
    "dp2 do",
    "tp2",
    "tp2 sp",
    "tp2 sp dp2 do",
    "tp4 sp",
    "pp2",
    "pp4",
    "pp2 dp2 do",
    "pp2 vpp2",
    "tp2 sp pp2",
    "cp2",
    "cp2 dp2 do",
    "cp2 tp2 sp",
    "cp2 pp2 do",
    "dp2 ep2 do",
    "dp4 ep2 do",
    "dp4 ep4",
    "pp2 dp2 ep2 do",
    "tp2 sp ep2",
    "tp2 sp etp2",
    "tp2 sp dp2 ep2 etp2 do",
    "tp2 sp cp2 ep4",
    "tp2 sp pp2 dp2 do",
)
Choices = dict[str, tuple[Any, ...]]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "full by 2": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
}
TRAIN: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"train_type": "lora", "lora_rank": 8},
    "lora with dropout": {"train_type": "lora", "lora_rank": 8, "lora_dropout": 0.1},
    "qlora": {"train_type": "qlora", "lora_rank": 8},
}
OPTIMIZER: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "bf16 gradients": {"main_grads_dtype": "bf16", "precision_aware_optimizer": True},
    "precision-aware": {"precision_aware_optimizer": True},
    "bf16 moments": {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}
EXPERT: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one by one": {"moe_grouped_gemm": False},
    "padded": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
}
AXES: Choices = {
    "family": FAMILIES,
    "layout": LAYOUTS,
    "te": (False, False, True),
    "recompute": tuple(RECOMPUTE),
    "train": tuple(TRAIN),
    "optimizer": tuple(OPTIMIZER),
    "experts": tuple(EXPERT),
    "dtype": ("bfloat16", "bfloat16", "float32"),
    "packing": (False, False, True),
    "rows": (1, 2),
    "head": ("", "float32"),
}
"""What a row chooses; a choice that is written twice is twice as frequent."""
SEED = 51
ROWS = 320


def row_of(c: Mapping[str, Any]) -> TableRow | None:
    """The run of these choices; None where it is illegal or a choice would be ignored."""
    spec = spec_of(c["family"])
    layout = parse(f"dense {c['layout']}")
    mtp = "-mtp" in c["family"]
    adapters = c["train"] in ("lora", "lora with dropout", "qlora")
    experts = bool(spec.experts)
    aware = "precision_aware_optimizer" in OPTIMIZER[c["optimizer"]]
    refused = (
        (not experts and (layout.ep > 1 or layout.etp > 1 or c["experts"] != "grouped")),
        (experts and layout.tp > 1 and not layout.sp),
        (mtp and (adapters or c["train"] != "full")),
        (aware and not (c["te"] and layout.do and c["dtype"] == "bfloat16")),
        (c["dtype"] == "float32" and c["head"] == "float32"),
        (c["dtype"] == "float32" and c["train"] == "qlora"),
        (c["train"] == "qlora" and (c["te"] or layout.tp > 2 or c["experts"] == "one by one")),
        (c["train"] == "qlora" and spec.linear_layer_count),  # refused by the run's checks
        (c["packing"] and c["rows"] == 1),
        (layout.pp * layout.vpp > 2 and c["recompute"] in ("full by 2", "block")),
    )
    if any(refused):
        return None
    options = {
        **RECOMPUTE[c["recompute"]],
        **TRAIN[c["train"]],
        **OPTIMIZER[c["optimizer"]],
        **EXPERT[c["experts"]],
        "torch_dtype": c["dtype"],
        "per_device_train_batch_size": c["rows"],
        **({"packing": True} if c["packing"] else {}),
        **({"fp32_lm_head": True} if c["head"] else {}),
    }
    row = TableRow(c["family"], c["layout"], c["te"], options)
    try:
        cfg = row.config()
        legal_layout(ModelShape.of(spec), LayoutRequest.of(cfg.parallel, row.world, cfg.data.max_length, cfg.train))
    except (ConfigError, LayoutError):
        return None
    return row


def pairs_of(c: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """Every two choices of a row."""
    return {(a, c[a], b, c[b]) for a, b in combinations(AXES, 2)}


def rows(number: int = ROWS, seed: int = SEED) -> list[TableRow]:
    """The rows of the table: of some drawn ones always that which adds most pairs of choices."""
    draw = random.Random(seed)
    covered: set[tuple[str, Any, str, Any]] = set()
    found: list[TableRow] = []
    while len(found) < number:
        candidates = [{axis: draw.choice(values) for axis, values in AXES.items()} for _ in range(40)]
        candidates.sort(key=lambda c: -len(pairs_of(c) - covered))
        for c in candidates:
            if (row := row_of(c)) is not None and row not in found:
                covered |= pairs_of(c)
                found.append(row)
                break
    return [row for row in found if not _uneven(row)]


def _uneven(row: TableRow) -> bool:
    """Whether tokens of the layers that are not computed again are unknown: the count is a mean of all layers."""
    return row.options.get("recompute_method") == "block" and parse(row.text).ep > 1

"""Counts the bytes of the runs of tests/memory/table.py and writes the tables of docs/memory.md.

    python scripts/memory_table.py            # count what tests/memory/counts.jsonl lacks, rewrite the blocks
    python scripts/memory_table.py --anew     # count all runs again (half an hour on two cores)
    python scripts/memory_table.py --check    # only say whether the blocks are up to date (exit code 1: not)

MEGATRON_LM_MEMORY and MEGATRON_BRIDGE_MEMORY name the files of two other estimates, theoretical_memory_usage.py of
megatron-core's wheel and theoretical_memory_utils.py of Megatron-Bridge: with both, their block is written too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.models.weights.table import padded_vocabulary_size  # noqa: E402
from scripts.page_blocks import replaced  # noqa: E402
from tests.memory.table import (  # noqa: E402
    COUNTS,
    HELD_OUT,
    HELD_OUT_SEED,
    Counted,
    Errors,
    TableRow,
    count_row,
    errors_of,
    make_folder,
    read_counts,
    rows,
    setup_of,
    spec_of,
    write_counts,
)
from tests.parity.cases import parse  # noqa: E402
from tests.parity.pool import shared  # noqa: E402
from tests.te.sources import RELEASES  # noqa: E402

SCRIPT = "memory_table.py"
PAGE = ROOT / "docs/memory.md"
Counts = Mapping[TableRow, Sequence[Counted]]


def count_missing(counts: dict[TableRow, list[Counted]]) -> None:
    """Count the rows that are not there, and write each as it is done."""
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            if row not in counts:
                model = make_folder(row.family, Path(folder) / row.family)
                pool = shared(RELEASES[0] if row.te else "")
                counts[row] = pool.run(f"{count_row.__module__}:count_row", (row, model), row.world)
                write_counts(counts)
                print(row.family, row.layout, dict(row.options))


def percent(values: Iterable[float]) -> str:
    """Median and largest of errors, as a cell."""
    sizes = sorted(abs(value) for value in values)
    return f"{statistics.median(sizes):.2%}, {sizes[-1]:.2%}" if sizes else ""


def errors_text(errors: Mapping[TableRow, Errors]) -> str:
    """The table by family and by setting."""
    lines = [
        "| rows with | rows | weights, gradients, states | kept activations | peak of a step | within 2% | within 5% |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = {name: [error for row, error in errors.items() if belongs(row)] for name, belongs in GROUPS.items()}
    groups[f"rows of seed {HELD_OUT_SEED}"] = [errors_of(row, ranks) for row, ranks in read_counts(HELD_OUT).items()]
    for name, own in groups.items():
        exact = all((e.weights, e.gradients, e.states) == (0, 0, 0) for e in own)
        steps = [e.step for e in own if e.step is not None]
        near = [f"{sum(abs(s) <= limit for s in steps) / len(steps):.0%}" if steps else "" for limit in (0.02, 0.05)]
        kept = percent(e.kept for e in own)
        held = "exact" if exact else "not exact"
        lines.append(f"| {name} | {len(own)} | {held} | {kept} | {percent(steps)} | {near[0]} | {near[1]} |")
    return "\n".join(lines)


def has(**options: Any) -> Callable[[TableRow], bool]:
    """Rows with these options."""
    return lambda row: all(row.options.get(name) == value for name, value in options.items())


def on(*axes: str) -> Callable[[TableRow], bool]:
    """Rows with more than one rank on one of these axes."""
    return lambda row: any(getattr(parse(row.text), axis) > 1 for axis in axes)


GROUPS: dict[str, Callable[[TableRow], bool]] = {
    "all": lambda row: True,
    "torch's layers": lambda row: not row.te,
    "Transformer Engine's modules on the test device": lambda row: row.te,
    "dense attention and MLP": lambda row: not spec_of(row.family).experts and not special(row),
    "experts": lambda row: bool(spec_of(row.family).experts),
    "latent attention": lambda row: bool(spec_of(row.family).transformer.get("multi_latent_attention")),
    "gated delta nets": lambda row: spec_of(row.family).linear_layer_count > 0,
    "layers for multi-token prediction": lambda row: spec_of(row.family).mtp_layers > 0,
    "sinks (gpt_oss)": lambda row: row.family == "gpt_oss",
    "soft caps (gemma2)": lambda row: row.family == "gemma2",
    "a second rotary embedding (gemma3_text)": lambda row: row.family == "gemma3_text",
    "sliding windows": lambda row: bool(spec_of(row.family).transformer.get("window_size")),
    "TP": on("tp"),
    "PP": on("pp"),
    "interleaved PP": on("vpp"),
    "CP": on("cp"),
    "EP": on("ep"),
    "ETP": on("etp"),
    "distributed optimizer": lambda row: parse(row.text).do,
    "precision-aware optimizer": has(precision_aware_optimizer=True),
    "LoRA": has(train_type="lora"),
    "QLoRA": has(train_type="qlora"),
    "packed rows": has(packing=True),
    "float32": has(torch_dtype="float32"),
    "no recomputation": lambda row: "recompute_granularity" not in row.options,
    "selective recomputation": has(recompute_granularity="selective"),
    "full recomputation": has(recompute_granularity="full"),
}


def special(row: TableRow) -> bool:
    """Return whether a family has a mixer that is not plain attention."""
    spec = spec_of(row.family)
    return bool(spec.transformer.get("multi_latent_attention") or spec.linear_layer_count)


# Other estimates


def comparable(row: TableRow) -> bool:
    """Return whether the other estimates can express a row: full fine-tuning with Adam in bfloat16, sequence
    parallelism wherever there is tensor parallelism, no context parallelism, nothing recomputed but attention."""
    case = parse(row.text)
    o = row.options
    plain = o["torch_dtype"] == "bfloat16" and not {"train_type", "optimizer", "precision_aware_optimizer"} & set(o)
    recompute = o.get("recompute_granularity") is None or o.get("recompute_modules") == ("core_attn",)
    known = not spec_of(row.family).linear_layer_count and "packing" not in o
    return plain and recompute and known and case.cp == 1 and (case.tp == 1 or case.sp)


def arguments(row: TableRow) -> types.SimpleNamespace:
    """A row in the names of both estimates."""
    setup, cfg = setup_of(row)
    spec = setup.spec
    t = spec.transformer
    layout = setup.layout
    latent = bool(t.get("multi_latent_attention"))
    shared_expert = spec.shared_ffn or None
    return types.SimpleNamespace(
        **{name: t.get(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim")},
        v_head_dim=t.get("v_head_dim"),
        kv_channels=spec.head_dim,
        num_attention_heads=spec.heads,
        hidden_size=spec.hidden_size,
        group_query_attention=not latent,
        num_query_groups=spec.kv_heads,
        num_experts=spec.experts or None,
        num_moe_experts=spec.experts or None,
        swiglu=spec.gated,
        gated_linear_unit=spec.gated,
        moe_shared_expert_intermediate_size=shared_expert,
        moe_layer_freq=list(t["moe_layer_freq"]) if spec.experts else 1,
        num_layers=spec.num_layers,
        moe_ffn_hidden_size=spec.expert_ffn or None,
        mtp_num_layers=spec.mtp_layers or None,
        normalization="RMSNorm",
        multi_latent_attention=latent,
        padded_vocab_size=padded_vocabulary_size(spec, layout.tp),
        vocab_size=padded_vocabulary_size(spec, layout.tp),
        should_pad_vocab=False,
        untie_embeddings_and_output_weights=not spec.tied,
        share_embeddings_and_output_weights=spec.tied,
        ffn_hidden_size=spec.ffn,
        moe_latent_size=None,
        add_bias_linear=spec.linear_bias,
        moe_router_topk=spec.topk or 1,
        moe_shared_expert_gate=t.get("moe_shared_expert_gate", False),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        world_size=layout.world_size,
        data_parallel_size=layout.dp,
        use_distributed_optimizer=setup.options.distributed_optimizer,
        seq_length=setup.options.max_length,
        micro_batch_size=setup.rows,
        sequence_parallel=layout.tp > 1,
        recompute_granularity="selective",
        activation_func=None,
        passes=setup.options.passes,
    )


def module_at(path: str, name: str) -> Any:
    """A file as a module, in a package of which nothing else is there."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # for its dataclasses
    found.loader.exec_module(module)
    return module


def stand_ins() -> None:
    """Make modules for what the two files import and do not use here."""
    import torch.nn.functional as F

    names = {
        "other_estimates": {},
        "other_estimates.utils": {"is_hybrid_model": lambda args: False, "print_rank_0": print},
        "megatron.bridge": {},
        "megatron.bridge.training": {},
        "megatron.bridge.training.config": {"ConfigContainer": object},
        "megatron.bridge.utils": {},
        "megatron.bridge.utils.vocab_utils": {"calculate_padded_vocab_size": lambda size, *_, **__: size},
    }
    for name, values in names.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
    assert F.silu is not None


def others_text(counts: Counts, errors: Mapping[TableRow, Errors]) -> str | None:
    """The table of the other estimates; None where their files are not given."""
    paths = [os.environ.get(name) for name in ("MEGATRON_LM_MEMORY", "MEGATRON_BRIDGE_MEMORY")]
    if not all(paths):
        return None
    stand_ins()
    lm = module_at(str(paths[0]), "other_estimates.megatron_lm")
    bridge = module_at(str(paths[1]), "other_estimates.bridge")
    found: dict[str, dict[str, list[float]]] = {}
    chosen = [row for row in counts if comparable(row)]
    for row in chosen:
        held = max(r.held.weights + r.held.gradients + r.held.optimizer for r in counts[row])
        kept = max(r.forward for r in counts[row])
        a = arguments(row)
        estimates = {
            "Megatron-LM": (lm.compute_weight_and_optimizer_memory(a), lm.compute_activation_memory(a, a.passes)),
        }
        a = arguments(row)
        if spec_of(row.family).transformer["activation_func"] == "silu":
            import torch.nn.functional as F

            a.activation_func = F.silu
        config = types.SimpleNamespace(
            model=a,
            train=types.SimpleNamespace(micro_batch_size=a.micro_batch_size),
            data_parallel_size=a.data_parallel_size,
            optimizer=types.SimpleNamespace(use_distributed_optimizer=a.use_distributed_optimizer),
            ddp=types.SimpleNamespace(use_distributed_optimizer=a.use_distributed_optimizer),
        )
        estimates["Megatron-Bridge"] = (
            bridge.compute_weight_and_optimizer_memory(config),
            bridge.compute_activation_memory(config, a.passes),
        )
        for name, (states, activations) in estimates.items():
            own = found.setdefault(name, {"states": [], "activations": []})
            own["states"].append(states / held - 1)
            own["activations"].append(activations / kept - 1)
    ours = {"states": [0.0 for _ in chosen], "activations": [errors[row].kept for row in chosen]}
    lines = [f"{len(chosen)} rows:", "", "| estimate | weights, gradients, optimizer: median, worst | activations |"]
    lines += ["|---|---|---|"]
    for name, parts in {"megaswift": ours, **found}.items():
        lines.append(f"| {name} | {percent(parts['states'])} | {percent(parts['activations'])} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Counts, and writes or checks; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="count and write nothing; exit code 1 when out of date")
    parser.add_argument("--anew", action="store_true", help="count all rows again")
    parser.add_argument("--json", type=Path, help="write the errors of all rows to this file")
    arguments_given = parser.parse_args(argv)
    counts = {} if arguments_given.anew or not COUNTS.exists() else read_counts()
    if not arguments_given.check:
        count_missing(counts)
    errors = {row: errors_of(row, ranks) for row, ranks in counts.items()}
    text = PAGE.read_text(encoding="utf-8")
    fresh = replaced(text, "errors", errors_text(errors), SCRIPT)
    if (others := others_text(counts, errors)) is not None:
        fresh = replaced(fresh, "other estimates", others, SCRIPT)
    if arguments_given.json:
        listed = [
            {"family": row.family, "layout": row.layout, "te": row.te, "options": dict(row.options), **vars(error)}
            for row, error in errors.items()
        ]
        arguments_given.json.write_text(json.dumps(listed, indent=1), encoding="utf-8")
    if arguments_given.check:
        if fresh != text:
            print("docs/memory.md is out of date; run python scripts/memory_table.py")
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

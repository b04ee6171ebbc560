"""A step of Megatron-Core's own GPTModel with its own layers, schedule and optimizer, recorded by
scripts/record_megatron_lm.py (on the ranks)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sources import ROOT

HEADS, GROUPS, WIDTH = 8, 4, 16
LR = 1e-3


@dataclass(frozen=True)
class PlainTask:
    """What the ranks record."""

    model: Path
    trace: Path
    tp: int
    pp: int
    ep: int = 1
    dtype: str = "float32"
    fault: float = 0.0
    """The part by which the product of queries, keys and values of layer 1 is too large on rank 1."""


def write_model(folder: Path, variant: str = "dense", dtype: str = "float32") -> Path:
    """A model whose vocabulary needs no padding: Megatron-LM's own softmax counts padded rows."""
    import torch
    import transformers

    from tests.parity.models import config, randomize

    if not (folder / "config.json").exists():
        made = config(variant)
        made.vocab_size = 256
        model = transformers.AutoModelForCausalLM.from_config(made)
        randomize(model, 7)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def recorder_module() -> Any:
    """The script, imported as a user would."""
    spec = importlib.util.spec_from_file_location("record_megatron_lm", ROOT / "scripts" / "record_megatron_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches() -> Iterator[dict[str, Any]]:
    """Two micro-batches of full rows; the second has fewer labels."""
    import torch

    generator = torch.Generator().manual_seed(5)
    for number in range(2):
        tokens = torch.randint(3, 256, (2, 33), generator=generator)
        weights = (torch.rand(2, 32, generator=generator) < (0.9, 0.4)[number]).float()
        yield {
            "input_ids": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_weights": weights,
            "valid": torch.ones(2, 32, dtype=torch.bool),
        }


def record(rank: int, world: int, task: PlainTask) -> None:
    """One step of a GPTModel that Megatron-Core builds and runs itself."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megaswift.bisection.placement import plan_entry
    from megaswift.bridge.plan import WeightPlan
    from megaswift.bridge.weight_source import open_weights
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.families import family_of
    from megaswift.models.family import read_config_json
    from megaswift.models.weights.table import padded_vocabulary_size
    from megaswift.parallel.layout import Layout

    dtype = getattr(torch, task.dtype)
    half = dtype == torch.bfloat16
    layout = Layout(world, tp=task.tp, pp=task.pp, ep=task.ep)
    context = ParallelContext(layout)  # Megatron-Core's groups, and its calls of CUDA on a CPU
    read = read_config_json(task.model)
    spec = family_of(read).spec(read)
    padded = padded_vocabulary_size(spec, task.tp)
    experts: dict[str, Any] = {}
    if spec.experts:
        experts = {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": read["moe_intermediate_size"],
            "moe_router_topk": read["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": task.ep,
            "expert_tensor_parallel_size": 1,
        }
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=task.tp,
        pipeline_model_parallel_size=task.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=half,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **experts,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=spec.experts or None, qk_layernorm=True, normalization="RMSNorm"),
        padded,
        64,
        pre_process=context.coordinates.pp == 0,
        post_process=context.coordinates.pp == task.pp - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    recorder = recorder_module().Recorder(
        [model],
        task.trace,
        rank,
        {"world_size": world, "tp": task.tp, "pp": task.pp, "vpp": 1, "cp": 1, "ep": task.ep, "etp": 1},
    )
    source = open_weights(task.model)
    plan = WeightPlan(family_of(read), spec)
    first_expert = context.coordinates.ep * (spec.experts or 0) // task.ep
    for name, parameter in recorder.named("named_parameters"):
        whole_name = re.sub(r"local_experts\.(\d+)", lambda match: str(first_expert + int(match[1])), name)
        entry = plan_entry(plan, whole_name)
        assert entry is not None, name
        part = (1, 0) if "experts" in name else (task.tp, context.coordinates.tp)
        parameter.data.copy_(entry.read(source, *part, padded))
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-5,
        clip_grad=0.5,
        bf16=half,
    )
    if hasattr(MegatronOptimizer, "has_grad_norm_group"):  # 0.19 asks for it by a CUDA tensor; no parameter has a group
        MegatronOptimizer.has_grad_norm_group = lambda *_: False
    optimizer = get_megatron_optimizer(options, [ddp], use_gloo_process_groups=False)
    if task.fault:
        for chunk_layer in model.decoder.layers:
            if chunk_layer.layer_number == 2 and rank == 1:
                chunk_layer.self_attention.linear_qkv.weight.data.mul_(1 + task.fault)

    rows = list(batches())
    mine = rows[context.coordinates.dp :: layout.dp]
    for number, fields in enumerate(mine):
        for name, value in fields.items():
            recorder.add("input", name, number, value)
    mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    shown = iter(range(len(mine)))

    def forward_step(data: Any, chunk: Any) -> Any:
        fields = next(data)
        positions = torch.arange(32)[None].expand(2, -1)
        out = chunk(fields["input_ids"], positions, mask, labels=fields["labels"])

        def loss(losses: Any) -> Any:
            total = (losses.float() * fields["loss_weights"]).sum()
            count = sum(float(f["loss_weights"].sum()) for f in rows)
            recorder.add("loss", "loss", next(shown), (total / count).reshape(1))
            return total / count * len(mine), {}  # Megatron-Core divides by the number of micro-batches

        return out, loss

    def finalize(*args: Any, **how: Any) -> None:
        finalize_model_grads(*args, **how)
        ddp.scale_gradients(layout.dp)  # averaged over replicas, of a loss whose shares add up

    config.finalize_model_grads_func = finalize
    config.grad_scale_func = None
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=[ddp],
        num_microbatches=len(mine),
        seq_length=32,
        micro_batch_size=2,
        forward_only=False,
    )
    recorder.parameters("gradient", lambda p: p.main_grad)
    optimizer.step()
    recorder.parameters("weight", lambda p: getattr(p, "main_param", p))
    recorder.write(task.dtype, LR)
    torch.distributed.barrier()
    context.close()

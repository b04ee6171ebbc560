"""Checkpoints as Megatron-Core writes them, on a CPU: `GPTModel.sharded_state_dict` and `dist_checkpointing.save` over
gloo.

Nothing of this project is used, so that the same file runs in an environment with another Megatron-Core:

    python -m tests.bridge.foreign.megatron_writer JOB.json [MODULE:FUNCTION]

The weights come from a Hugging Face folder, by a mapping of this file's own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Job:
    """One checkpoint to write."""

    folder: str
    """Hugging Face's."""
    target: str
    """The folder of the iteration."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    metadata: tuple[tuple[str, Any], ...] = ()
    """That of `sharded_state_dict`: none gives stacked keys."""
    padding: int = 0
    """Rows that the vocabulary is longer."""
    optimizer: bool = False
    """Whether a state of an optimizer and of random generators lies beside the weights."""
    legacy: bool = False
    """A pickle for each rank, as Megatron-LM's writer does."""
    prefix: str = ""
    te_norms: bool = False
    """Norms before experts under the name that they have with Transformer Engine."""
    megatron_lm: bool = False
    """Written by Megatron-LM's own `save_checkpoint`, which the wheel has since 0.19."""
    te: bool = False
    """Layers of Transformer Engine, which must be there: fused norms, grouped experts, `_extra_state`."""
    etp: int = 1

    @property
    def world(self) -> int:
        """Processes."""
        return self.pp * max(self.tp, self.ep * self.etp)


def run(rank: int, world: int, job: Job) -> None:
    """A rank's part. Collective."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    start(rank, world, job)
    chunks = models(job)
    if job.megatron_lm:
        save_by_megatron_lm(job, chunks)
    elif job.legacy:
        save_legacy(job, chunks)
    else:
        state: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            name = "model" if len(chunks) == 1 else f"model{number}"
            metadata = {**dict(job.metadata), "dp_cp_group": parallel_state.get_data_parallel_group(True)}
            state[name] = chunk.sharded_state_dict(prefix=job.prefix, metadata=metadata)
        if job.optimizer:
            state |= other_states(rank, world)
        Path(job.target).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, job.target, sharded_strategy())
    dist.barrier()
    dist.destroy_process_group()


def start(rank: int, world: int, job: Job) -> None:
    """Join the ranks of a job's layout. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    _stand_in_for_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
    )


def sharded_strategy() -> Any:
    """Megatron's own, in one thread: with two it starts processes."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    try:
        return TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    except TypeError:  # since 0.18
        strategy = TorchDistSaveShardedStrategy()
        strategy.thread_count = 1
        return strategy


def other_states(rank: int, world: int) -> dict[str, Any]:
    """What a run saves besides weights."""
    from argparse import Namespace

    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    moments = torch.full((4,), float(rank))
    return {
        "optimizer": {
            "moments": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", moments, (0, rank, world)
            )
        },
        "rng_state": ShardedObject("rng_state", [{"seed": rank}], (world,), (rank,)),
        "args": Namespace(num_layers=4),
        "iteration": 7,
    }


def _stand_in_for_cuda() -> None:
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.Tensor.cuda = lambda self, *_: self  # type: ignore[assignment, method-assign]


def models(job: Job) -> list[Any]:
    """This rank's chunks with the weights of the folder."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = json.loads((Path(job.folder) / "config.json").read_text())
    tensors = folder_tensors(Path(job.folder))
    experts = expert_count(hf)
    more: dict[str, Any] = {}
    if experts:
        more |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        }
    if "linear_num_key_heads" in hf:
        more |= delta_nets(hf)
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **more,
    )
    chunks = []
    for stage in range(job.vpp):
        if job.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        pipeline = parallel_state.get_pipeline_model_parallel_rank()
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, job, stage if job.vpp > 1 else None),
            vocab_size=hf["vocab_size"] + job.padding,
            max_sequence_length=64,
            pre_process=pipeline == 0 and stage == 0,
            post_process=pipeline == job.pp - 1 and stage == job.vpp - 1,
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            vp_stage=stage if job.vpp > 1 else None,
        )
        fill(model, hf, tensors, job)
        chunks.append(model.to(next(iter(tensors.values())).dtype))
    return chunks


def delta_nets(hf: dict[str, Any]) -> dict[str, Any]:
    """Options of a model whose layers are gated delta nets, or attention with output gates."""
    from megatron.core.ssm import gated_delta_net

    # only its forward pass needs flash-linear-attention
    for module in (gated_delta_net, getattr(gated_delta_net, "gdn", None), getattr(gated_delta_net, "common", None)):
        if hasattr(module, "HAVE_FLA"):
            module.HAVE_FLA = True
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return {
        **{f"linear_{name}": hf[f"linear_{name}"] for name in names},
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in hf["layer_types"]],
        "transformer_impl": "transformer_engine",
    }


def layer_spec(config: Any, job: Job, stage: int | None) -> Any:
    """The modules of the layers."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if config.experimental_attention_variant:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(config, stage)
    if job.te:
        return specs.get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, True, True)
    spec = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    if job.te_norms:
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return spec


def expert_count(hf: dict[str, Any]) -> int:
    """Experts of a layer; 0 in a dense model."""
    return hf.get("num_experts") or hf.get("num_local_experts") or 0


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@torch.no_grad()
def fill(model: Any, hf: dict[str, Any], tensors: dict[str, Tensor], job: Job) -> None:
    """Give every parameter of a chunk its part of the folder's tensors."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    first_expert = parallel_state.get_expert_model_parallel_rank() * expert_count(hf) // job.ep
    by_number = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        local = next((prefix for prefix in by_number if name.startswith(prefix)), "")
        layer = f"model.layers.{by_number[local]}." if local else ""
        value = of_model(name, tensors, job) if not local else None
        if value is None:
            value = of_layer(name.removeprefix(local), layer, hf, tensors, (rank, job.tp, first_expert, job.etp))
        elif value.shape[0] != parameter.shape[0]:
            value = value.chunk(job.tp)[rank]
        assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
        parameter.data = value.clone().contiguous()


def of_model(name: str, tensors: dict[str, Tensor], job: Job) -> Tensor | None:
    """Parameters outside of the layers, whole."""
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        embedding = tensors["model.embed_tokens.weight"]
        rows = embedding if name.startswith("embedding") else tensors.get("lm_head.weight", embedding)
        padding = torch.full((job.padding, rows.shape[1]), 9.0, dtype=rows.dtype)
        return torch.cat([rows, padding])
    return None


def of_layer(
    name: str, layer: str, hf: dict[str, Any], tensors: dict[str, Tensor], where: tuple[int, int, int, int]
) -> Tensor:
    """A parameter of a layer: this rank's part."""
    rank, tp, first_expert, etp = where
    whole = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
        "self_attention.out_norm.weight": "linear_attn.norm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if name in whole:
        return tensors[layer + whole[name]]
    if name == "self_attention.linear_qkv.weight":
        groups, heads, d = hf["num_key_value_heads"], hf["num_attention_heads"], hf["head_dim"]
        q, k, v = (tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
        h = q.shape[1]
        parts = [q.view(groups, -1, h), k.view(groups, d, h), v.view(groups, d, h)]
        if q.shape[0] == 2 * heads * d:  # each head's query, then its gate
            pairs = q.view(groups, heads // groups, 2, d, -1).transpose(1, 2)
            parts[0] = pairs.reshape(groups, 2 * heads // groups * d, -1)
        return torch.cat(parts, 1).flatten(0, 1).chunk(tp)[rank]
    if name == "self_attention.linear_proj.weight":
        return tensors[layer + "self_attn.o_proj.weight"].chunk(tp, 1)[rank]
    if name.startswith("self_attention."):
        return of_delta_net(name.removeprefix("self_attention."), layer + "linear_attn.", hf, tensors, (rank, tp))
    mlp = layer + "mlp."
    if (
        match := re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)", name)
    ) is not None:
        mlp += f"experts.{first_expert + int(match[1] or match[3])}."
        name = match[2]
        rank, tp = rank % etp, etp
    if name.endswith("linear_fc1.weight"):
        return torch.cat([tensors[f"{mlp}{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")])
    if name.endswith("linear_fc2.weight"):
        return tensors[mlp + "down_proj.weight"].chunk(tp, 1)[rank]
    raise KeyError(name)


def of_delta_net(
    name: str, prefix: str, hf: dict[str, Any], tensors: dict[str, Tensor], where: tuple[int, int]
) -> Tensor:
    """A parameter of a gated delta net: this rank's rows of each component."""
    rank, tp = where
    if name == "out_proj.weight":
        return tensors[prefix + name].chunk(tp, 1)[rank]
    if name in ("A_log", "dt_bias"):
        return tensors[prefix + name].chunk(tp)[rank]
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    values = hf["linear_num_value_heads"] * hf["linear_value_head_dim"]
    if name == "conv1d.weight":
        parts = [*tensors[prefix + name].split([keys, keys, values])]
    else:
        assert name == "in_proj.weight", name
        parts = [*tensors[f"{prefix}in_proj_qkv.weight"].split([keys, keys, values])]
        parts += [tensors[f"{prefix}in_proj_{each}.weight"] for each in "zba"]
    return torch.cat([part.chunk(tp)[rank] for part in parts])


def save_legacy(job: Job, chunks: list[Any]) -> None:
    """The file of this rank, as Megatron-LM's `save_checkpoint` writes it with --ckpt-format torch."""
    from argparse import Namespace

    import numpy as np
    from megatron.core import parallel_state

    rank = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if job.pp > 1:
        rank += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if job.ep > 1:
        rank += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    args = Namespace(
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        num_layers=sum(len(chunk.decoder.layers) for chunk in chunks) * job.pp,
        params_dtype=torch.float32,
        padded_vocab_size=np.int64(128),
        swiglu=True,
    )
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    for number, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{number}"] = chunk.state_dict_for_save_checkpoint()
    if job.optimizer:
        state["optimizer"] = {"optimizer": {"state": {}, "param_groups": [{"lr": 1e-3, "step": np.float64(3)}]}}
        state["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
    if 0 in (parallel_state.get_data_parallel_rank(), parallel_state.get_expert_data_parallel_rank()):
        folder = Path(job.target) / rank
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "model_optim_rng.pt")


def save_by_megatron_lm(job: Job, chunks: list[Any]) -> None:
    """Let Megatron-LM's own writer save, with its own options."""
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args

    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    sys.argv = ["pretrain_gpt.py"]
    args = parse_args(ignore_unknown_args=True)
    args.save = str(Path(job.target).parent)
    args.ckpt_format = "torch" if job.legacy else "torch_dist"
    args.use_dist_ckpt = not job.legacy
    args.ckpt_fully_parallel_save = False
    args.ckpt_assume_constant_structure = False
    args.async_save = False
    args.no_save_optim = True
    args.tensor_model_parallel_size = job.tp
    args.pipeline_model_parallel_size = job.pp
    args.expert_model_parallel_size = job.ep
    args.expert_tensor_parallel_size = job.etp
    global_vars.set_args(args)
    checkpointing.save_checkpoint(7, chunks, None, None, 0)


def main(path: str, function: str = "") -> None:
    """Run a job in processes of its own: write its checkpoint, or what `function` does."""
    import torch.multiprocessing as processes

    facts = json.loads(Path(path).read_text())
    job = Job(**{**facts, "metadata": tuple(map(tuple, facts["metadata"]))})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(job.world)}
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name) if function else run
    processes.start_processes(work, (job.world, job), nprocs=job.world, start_method="spawn")


def written(job: Job, folder: Path, python: str = sys.executable, function: str = "") -> Path:
    """Run a job in an environment, and return the folder of the iteration."""
    import subprocess

    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)))
    command = [python, "-m", "tests.bridge.foreign.megatron_writer", str(file), *filter(None, [function])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(job.target)


if __name__ == "__main__":
    main(*sys.argv[1:])

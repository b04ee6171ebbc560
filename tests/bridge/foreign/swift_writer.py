"""Checkpoints by ms-swift's own writer, of mcore-bridge's own models, on the test device of Transformer Engine.

Both packages lie in the folder that MEGASWIFT_SWIFT names. The only changes: devices named "cuda" are "cpu", and gated
delta nets are made without flash-linear-attention, which their forward pass needs.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ALPHA = 12


@dataclass(frozen=True)
class SwiftJob:
    """One checkpoint to write."""

    packages: str = ""
    """The folder with both packages."""
    folder: str = ""
    """Hugging Face's."""
    target: str = ""
    """The folder above that of the iteration."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    padded: int = 0
    """Rows of the vocabulary."""
    mtp: int = 0
    """Layers for multi-token prediction."""
    rank: int = 0
    """Of LoRA on all linear layers; 0: the whole model is saved."""

    @property
    def world(self) -> int:
        """Processes."""
        return self.pp * max(self.tp, self.ep * self.etp)


class _OnCpu(importlib.machinery.SourceFileLoader):
    """Compiles a module whose devices are "cpu"."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value == "cuda":
                node.value = "cpu"
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds mcore_bridge with that loader."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] != "mcore_bridge":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _OnCpu(spec.loader.name, spec.loader.path)
        return spec


def run(rank: int, world: int, job: SwiftJob) -> None:
    """A rank's part. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.ssm import gated_delta_net

    from tests.bridge.foreign.megatron_writer import _stand_in_for_cuda

    _stand_in_for_cuda()
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    gated_delta_net.HAVE_FLA = True
    sys.path.insert(0, job.packages)
    sys.meta_path.insert(0, _Finder())
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
    )
    from swift.megatron.utils.megatron_lm_utils import save_mcore_checkpoint

    chunks, bridge = _models(job)
    args = SimpleNamespace(
        output_dir=job.target,
        async_save=False,
        data_parallel_random_init=False,
        dist_ckpt_optim_fully_reshardable=False,
        dist_ckpt_save_pre_mcore_014=False,
        lora_rank=job.rank,
        no_save_optim=True,
        no_save_rng=False,
        use_megatron_fsdp=False,
    )
    if job.rank:
        chunks = [_with_adapters(chunk, job.rank) for chunk in chunks]
        bridge.save_weights(chunks, f"{job.target}/exported", peft_format=True)
    save_mcore_checkpoint(args, chunks, iteration=7, peft_format=job.rank > 0)
    if rank == 0:
        options = {"lora_alpha": ALPHA, "tensor_model_parallel_size": job.tp, **{"lora_rank": job.rank or 8}}
        Path(job.target, "args.json").write_text(json.dumps({**asdict(job), **options}))
    dist.barrier()
    dist.destroy_process_group()


def _models(job: SwiftJob) -> tuple[list[Any], Any]:
    """This rank's chunks with the weights of the folder, loaded by mcore-bridge, and its bridge."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    fields = hf_to_mcore_config(AutoConfig.from_pretrained(job.folder))
    if job.padded:
        fields["padded_vocab_size"] = job.padded
    if job.mtp:
        fields["mtp_num_layers"] = job.mtp
    fields |= {"bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "use_cpu_initialization": True}
    config = ModelConfig(
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
        sequence_parallel=job.tp > 1,
        **fields,
    )
    chunks = get_mcore_model(config)
    config.bridge.load_weights(chunks, job.folder)
    return chunks, config.bridge


@torch.no_grad()
def _with_adapters(chunk: Any, rank: int) -> Any:
    """LoRA on all linear layers, with random values in both matrices."""
    from peft import LoraConfig, get_peft_model
    from swift.megatron.utils.utils import find_all_linears

    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=ALPHA, target_modules=find_all_linears(chunk))
    model = get_peft_model(chunk, config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape))
    return model

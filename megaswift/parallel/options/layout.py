"""Section `parallel`: sizes of all kinds of parallelism, and communication options. `megaswift.parallel` checks them
against model and node."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import at_least, option
from megaswift.options.tasks import DATASETS, EVERY_TASK, FITTED, SUPERVISED


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout"""

    tensor_parallel_size: int = option(
        1,
        "Tensor-parallel ranks: split each weight matrix",
        aliases=("tp", "tensor_model_parallel_size"),
        minimum=1,
        unit="ranks",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), 1),
        common=EVERY_TASK,
    )
    pipeline_parallel_size: int = option(
        1,
        "Pipeline stages: split the layers",
        aliases=("pp", "pipeline_model_parallel_size"),
        minimum=1,
        unit="ranks",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), 1),
        common=DATASETS,
    )
    virtual_pipeline_parallel_size: int | None = option(
        None,
        "Model chunks per pipeline stage (interleaved schedule)",
        aliases=("vpp", "virtual_pipeline_model_parallel_size"),
        minimum=1,
        unit="chunks",
        only_with={"engine": ("megatron", "auto"), "pipeline_parallel_size": at_least(2)},
        neutral=(None, 1),
    )
    context_parallel_size: int = option(
        1,
        "Context-parallel ranks: split each sequence",
        aliases=("cp",),
        minimum=1,
        unit="ranks",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), 1),
        common=("pt",),
    )
    expert_parallel_size: int = option(
        1,
        "Expert-parallel ranks: distribute the experts",
        aliases=("ep", "expert_model_parallel_size"),
        minimum=1,
        unit="ranks",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), 1),
    )
    expert_tensor_parallel_size: int = option(
        1,
        "Tensor-parallel ranks within each expert",
        aliases=("etp",),
        minimum=1,
        unit="ranks",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), 1),
    )
    layout: str = option(
        "given",
        "auto: chosen by the search of megaswift plan (docs/plan.md)",
        choices=("given", "auto"),
        tasks=FITTED,
        only_with={"engine": ("megatron", "auto")},
        neutral=("given",),
    )
    planned_gpu: str | None = option(
        None,
        "GPU that layout auto is chosen for, such as h100; default: this machine's",
        metavar="NAME",
        tasks=FITTED,
        only_with={"layout": "auto"},
        neutral=(None,),
    )
    data_parallel_size: int | None = option(
        None,
        "Data-parallel ranks; checked only, since world size, tp, pp and cp determine it",
        aliases=("dp",),
        minimum=1,
        unit="ranks",
    )
    sequence_parallel: bool | None = option(
        None,
        "Split norms and dropout over the tensor-parallel ranks; default: if tp > 1",
        aliases=("sp",),
        only_with={"engine": ("megatron", "auto"), "tensor_parallel_size": at_least(2, notice=True)},
    )
    first_stage_layers: int | None = option(
        None,
        "Layers of the first pipeline stage",
        minimum=0,
        unit="layers",
        aliases=("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
        only_with={"engine": ("megatron", "auto"), "pipeline_parallel_size": at_least(2)},
        neutral=(None,),
    )
    last_stage_layers: int | None = option(
        None,
        "Layers of the last pipeline stage",
        minimum=0,
        unit="layers",
        aliases=("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
        only_with={"engine": ("megatron", "auto"), "pipeline_parallel_size": at_least(2)},
        neutral=(None,),
    )
    pipeline_layout: str | None = option(
        None,
        "Custom pipeline layout in Megatron-Core's syntax: 'Et*3|(t|)*4tL'",
        aliases=("pipeline_model_parallel_layout",),
        metavar="LAYOUT",
        only_with={"engine": ("megatron", "auto"), "pipeline_parallel_size": at_least(2)},
    )
    cp_comm_type: str | None = option(
        None,
        "KV exchange in context parallelism; default: p2p (all_gather on torch layers)",
        choices=("p2p", "a2a", "all_gather", "a2a+p2p"),
        spellings={"allgather": "all_gather"},
        metavar="TYPE",
        only_with={"engine": ("megatron", "auto"), "context_parallel_size": at_least(2)},
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (),
        "Sizes of the a2a and the p2p groups of cp_comm_type a2a+p2p; product: cp",
        minimum=2,
        unit="ranks",
        only_with={"engine": ("megatron", "auto"), "cp_comm_type": "a2a+p2p"},
    )
    distributed_optimizer: bool = option(
        True,
        "Shard the optimizer state over the data-parallel ranks",
        aliases=("use_distributed_optimizer",),
        only_with={"sharded_optimizer": True},
    )
    overlap_grad_reduce: bool | None = option(
        None,
        "Overlap gradient reduction with the backward pass; default: on GPUs",
        only_with={"engine": ("megatron", "auto")},
    )
    overlap_param_gather: bool | None = option(
        None,
        "Overlap parameter gather and forward (needs overlap_grad_reduce); default: GPUs",
        only_with={"engine": ("megatron", "auto")},
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False,
        "Overlap expert all-to-all with another micro-batch's pass (not run on a GPU)",
        only_with={"engine": ("megatron", "auto"), "train_type": "full"},
    )
    overlap_p2p_comm: bool | None = option(
        None,
        "Overlap pipeline communication with compute; default: if vpp > 1",
        only_with={"engine": ("megatron", "auto"), "pipeline_parallel_size": at_least(2)},
    )
    tp_comm_overlap: bool = option(
        False,
        "Overlap tensor-parallel communication with products; pads rows to max_length",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tensor_parallel_size": at_least(2, notice=True)},
    )
    tp_comm_overlap_cfg: str | None = option(
        None,
        "YAML file with Transformer Engine's settings for each product",
        metavar="FILE",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(None,),
    )
    tp_comm_bootstrap_backend: str = option(
        "nccl",
        "Backend that sets up tp_comm_overlap",
        choices=("nccl", "mpi", "gloo"),
        metavar="BACKEND",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=("nccl",),
    )
    tp_comm_overlap_ag: bool = option(
        True,
        "tp_comm_overlap for all-gathers",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(),
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "tp_comm_overlap for forward reduce-scatters",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(),
    )
    tp_comm_overlap_rs_dgrad: bool = option(
        False,
        "Overlap reduce-scatters of input gradients with their own product",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(False,),
    )
    tp_comm_bulk_dgrad: bool | None = option(
        None,
        "Gather inputs during input-gradient products; default: if no weight is frozen",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(None, False),
    )
    tp_comm_bulk_wgrad: bool | None = option(
        None,
        "Scatter gradients during weight-gradient products; default: as for dgrad",
        tasks=SUPERVISED,
        only_with={"engine": ("megatron", "auto"), "tp_comm_overlap": True},
        neutral=(None, False),
    )
    ddp_timeout: int = option(600, "Timeout of a collective; the run ends when it expires", minimum=1, unit="seconds")

    @property
    def cp_exchange(self) -> str:
        """`cp_comm_type`, or what Transformer Engine's layers take where it is not set."""
        return self.cp_comm_type or "p2p"

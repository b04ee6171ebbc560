"""Where the host waits: for each scenario of steps.py the waits of its last step, under the function that waits.

A new one costs every user of a GPU time in every step: take it away, or say here why it stays. Kinds: `read` of the
device by the host, `copy` from pageable memory, `sync` (an explicit synchronization), `gloo` (a collective in host
memory: waits for the other ranks' hosts).
"""

from __future__ import annotations

from typing import Any

from tests.placement.device import AFTER_UPDATE

Waits = dict[str, int]
LAYERS, MICROBATCHES = 4, 2
STEP = {"sync megaswift.device_copy:HostCopy.wait": 1}
"""Losses, metrics, routers' losses and gradient norms of the step, in one read. On several ranks the counts of the next
step, which its losses are divided by, and whether it is taken, have arrived then."""
COUNTED_IN_STEP = {name: 2 * n for name, n in STEP.items()}
"""Counts that are launched in the step itself have to be waited for before its passes."""
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
DISPATCH = {f"sync {_DISPATCHER}._maybe_dtoh_and_synchronize": LAYERS * MICROBATCHES}
"""Megatron-Core's: tokens of each expert, which set the shapes of the exchange between ranks (NCCL takes them from the
host), or of Transformer Engine 2.12's grouped product. Neither on a rank that has all experts whole and multiplies them
with torch's grouped product, which takes the numbers on the device in bfloat16 (compute capability 9.0 or newer)."""
PADDED_EXPERTS = " --moe_expert_capacity_factor 1.25 --moe_pad_expert_input_to_capacity true"
"""The host knows all shapes."""
_ALLGATHER = "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess"
ALLGATHER = {f"read {_ALLGATHER}": 2 * LAYERS * MICROBATCHES}
"""The same numbers, and the probabilities by a mask: prefer `alltoall`, the default."""
LAUNCHED = {name + AFTER_UPDATE: n for name, n in STEP.items()}
"""Of a step on the native engine: the device decides on the update, which is launched before the host waits."""
FSDP_OFFLOADED = STEP | {
    "copy megaswift.engine.squared_norm:sum_of_squares.<locals>.<listcomp>": 1,
    "read megaswift.engine.torch.strategies.ddp:DdpStrategy.scaled_backward": 25,
    "sync megaswift.engine.torch.strategies.ddp:DdpStrategy.scaled_backward": 25,
}
"""torch's, of each of 25 gradients: its way to host memory waits in all micro-batches but the first, and the host waits
at the end of the backward pass. The norm is summed in host memory."""
ROLLOUT_LOOP = COUNTED_IN_STEP | {"gloo megaswift.distributed:_reduce": 1}
"""Before a generation, which may take minutes, the ranks agree that there is no signal; it is not taken ahead."""
SAMPLER = {
    "read megaswift.rollout.decoding:_completions": 3,
    "read megaswift.rollout.decoding:_completions.<locals>.<genexpr>": 2,
    "read megaswift.rollout.decoding:decode_batch": 8,
    "read megaswift.rollout.token_sampling:RowGenerators.keep": 1,
}
COLLECT = "read megaswift.engine.megatron.gather:_Exchange._read"
SCORES = "read megaswift.data.prompts.collate:gather_completion_values"
"""Of a generation: each decoded token, and the reference's log-probabilities (a critic's values too). The weights stay
on the device on their way to the sampler, over ranks too."""
OBJECTS = "gloo megaswift.distributed:all_gather_objects"
RANKS_OF_ROLLOUT = {SCORES: 2, OBJECTS: 7}


_MODELS = "transformers.models."


def _places(model: str, name: str) -> Waits:
    """transformers finds the places of images in a micro-batch and counts them."""
    where = f"read {_MODELS}{model}.modeling_{model}:{name}.get_placeholder_mask"
    return {where: MICROBATCHES, "read transformers.utils.import_utils:torch_compilable_check": MICROBATCHES}


def _tiles(model: str) -> Waits:
    """Of images in tiles, whose numbers follow from the images' sizes."""
    at = f"{_MODELS}{model}.modeling_{model}:"
    functions = ("get_anyres_image_grid_shape", "image_size_to_num_patches", "unpad_image")
    return {f"read {at}{name}": MICROBATCHES for name in functions} | {
        f"copy {at}LlavaNextModel.pack_image_features": MICROBATCHES
    }


def _tower(model: str, layers: str, name: str) -> Waits:
    """Of a tower of two layers that attend within each image: three splits a layer, none with flash attention. The
    sizes of images lie on the device with the model's other inputs."""
    at = f"{_MODELS}{model}.modeling_{model}:"
    reads = {
        f"{at}{name}.get_image_features": MICROBATCHES,
        f"{at}{layers}.forward.<locals>.<listcomp>": 3 * 2 * MICROBATCHES,
        "transformers.vision_utils:get_vision_cu_seqlens": MICROBATCHES,
        "transformers.vision_utils:get_vision_position_ids": 2 * MICROBATCHES,
    }
    copies = {"copy transformers.vision_utils:get_vision_position_ids": MICROBATCHES}
    return _places(model, name) | {f"read {where}": n for where, n in reads.items()} | copies


_WINDOWS = f"copy {_MODELS}qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel."
WINDOWS = {
    "read transformers.vision_utils:get_vision_window_index": 2 * MICROBATCHES,
    "copy transformers.vision_utils:get_vision_window_index": MICROBATCHES,
    f"{_WINDOWS}permute_input_for_window_attn": 3 * MICROBATCHES,
    f"{_WINDOWS}forward": MICROBATCHES,
    "copy megaswift.engine.torch.strategies.ddp:DdpStrategy.scaled_backward": 2 * MICROBATCHES,
}
"""Indices of windows, made in host memory; the backward pass copies those of two products again."""


def _checkpoint(
    read: int, exported: int, counters: int = 0, ranks: int = 1, written: int | None = None, groups: int = 0
) -> dict[str, Waits]:
    """Waits of a checkpoint, an export and a load: one a tensor. `counters`: step counts of torch's Adam, a read and a
    copy each; `groups`: of Transformer Engine's, a read each. `written`: tensors of this rank's file, where they are
    not those that it reads."""
    files, states = "megaswift.bridge.checkpoint.chunk_files:", "megaswift.engine.megatron.checkpoint.optimizer_states:"
    several = ranks > 1
    save = {f"read {files}write_rank_chunks": read if written is None else written}
    load = {f"copy {files}read_planned_chunks": read}
    export = {COLLECT: exported} if exported else {}
    if several:
        save |= {OBJECTS: 2, "gloo megaswift.distributed:_reduce": 1, "gloo megaswift.distributed:gather_on_rank0": 1}
        load |= {OBJECTS: 3}
        export |= {OBJECTS: 3, "gloo megaswift.distributed:broadcast_object": 2}
    if counters or groups:
        save |= {f"read {states}get_step_count.<locals>.<listcomp>": counters or groups}
    if counters:
        load |= {f"copy {states}_counter": counters}
    return {"save": save, "export": export, "load": load}


_WHOLE = "read megaswift.engine.torch.checkpoint:stream_weights.<locals>.<dictcomp>"
_FSDP_BROADCAST = "copy megaswift.engine.torch.shared_reads:_broadcast"
_FSDP_SAVED = {
    "save": {OBJECTS: 1, _WHOLE: 47, "read megaswift.bridge.hf.writer:_write_tensor": 94},
    "export": {OBJECTS: 1, _WHOLE: 47},
    "load": {OBJECTS: 4, _FSDP_BROADCAST: 71},
}
"""One a tensor: 47 weights and their two moments. The first rank writes; each reads half of them and broadcasts it."""
_FSDP_READ = {"save": {OBJECTS: 1}, "export": {OBJECTS: 1}, "load": {OBJECTS: 4, _FSDP_BROADCAST: 70}}
FSDP_ROLLOUT = STEP | SAMPLER | ROLLOUT_LOOP | RANKS_OF_ROLLOUT

WAITS: dict[tuple[str, int], dict[str, Any]] = {
    ("", 1): {
        "step:moe": LAUNCHED,
        "step:moe --train_type lora": LAUNCHED,
        "save:moe": _checkpoint(237, 63, counters=63),
        "run:dpo": STEP,
        "run:kto": STEP,
        "run:grpo": STEP | SAMPLER | {SCORES: 2},
        "run:sft --engine ddp": STEP,
        "run:qwen2_vl": STEP | _tower("qwen2_vl", "VisionAttention", "Qwen2VLModel"),
    },
    ("", 2): {
        "step:dense pp2": [LAUNCHED, LAUNCHED],
        "step:moe dp2 ep2": LAUNCHED | DISPATCH,
        f"step:moe dp2 ep2{PADDED_EXPERTS}": LAUNCHED,
        "step:dense dp2 do --torch_dtype float16": LAUNCHED,
        "save:dense dp2 --engine fsdp2": [_FSDP_SAVED, _FSDP_READ],
    },
    ("2.12.0", 1): {
        "step:moe te packed": LAUNCHED | DISPATCH,
        f"step:moe te packed{PADDED_EXPERTS}": LAUNCHED,
        "step:moe te packed --moe_grouped_gemm_impl torch": LAUNCHED,
        "step:moe te packed --train_type lora --torch_dtype bfloat16": LAUNCHED,
        "save:dense te": _checkpoint(117, 35, groups=2),
    },
    ("2.12.0", 2): {
        "step:dense te tp2 sp": LAUNCHED,
        "step:dense te cp2 packed": LAUNCHED,
        "step:dense te dp2 --torch_dtype float16": LAUNCHED,
    },
}
"""(Release of Transformer Engine or none, ranks) -> scenario -> its waits, or a list of each rank's."""
A2A = {
    "read transformer_engine.pytorch.attention.dot_product_attention.context_parallel:"
    f"reorder_seq_chunks_{when}_attn_thd.<locals>.<listcomp>": 896
    for when in ("after_a2a_before", "before_a2a_after")
}
"""Transformer Engine 2.12 reads every bound of packed rows in every layer: prefer `p2p` for them."""
SLOW: dict[tuple[str, int], dict[str, Any]] = {
    ("", 1): {
        "step:dense packed": LAUNCHED,
        "step:gemma2": LAUNCHED,
        "step:moe allgather": LAUNCHED,
        "step:moe --moe_grouped_gemm false": LAUNCHED | DISPATCH,
        "step:dense --optimizer sgd": LAUNCHED,
        "step:dense --engine ddp --optimizer muon": STEP,  # before the update
        "run:sft": STEP,
        "run:sft --train_type lora": STEP,
        "run:kto --loss_type bco": STEP,
        "run:grpo --importance_sampling_correction true": STEP | SAMPLER | {SCORES: 4},
        "run:ppo": {name: 2 * n for name, n in STEP.items()} | SAMPLER | {SCORES: 6},
        "run:grpo --train_type lora --rollout_lora false": STEP | SAMPLER | {SCORES: 2},
        "run:qwen2_5_vl": STEP | _tower("qwen2_5_vl", "Qwen2_5_VLVisionAttention", "Qwen2_5_VLModel") | WINDOWS,
        "run:gemma3": STEP | _places("gemma3", "Gemma3Model"),
        "run:internvl": STEP | _places("internvl", "InternVLModel"),
        "run:llava_next": STEP | _places("llava_next", "LlavaNextModel") | _tiles("llava_next"),
    },
    ("", 2): {
        "step:dense cp2 packed": LAUNCHED,
        "step:dense dp2 do overlap": LAUNCHED,
        "step:moe tp2 sp ep2 etp1": LAUNCHED | DISPATCH,
        "step:moe dp2 ep2 allgather": LAUNCHED | ALLGATHER,
        "run:grpo --engine fsdp2": FSDP_ROLLOUT,
        "run:dpo --engine fsdp2": STEP,
        "run:sft --engine fsdp2 --fsdp shard_grad_op": STEP,
        "run:sft --engine fsdp2 --fsdp offload": FSDP_OFFLOADED,
        "run:sft --engine fsdp2 --train_type lora": STEP,
        "save:dense tp2 sp": [_checkpoint(117, 35, 35, 2), _checkpoint(117, 18, 35, 2, 66)],
        "run:sft --pipeline_parallel_size 2": [STEP, STEP],
        "run:kto --engine fsdp2 --loss_type bco": STEP,
        "run:kto": STEP,
        "run:grpo --tensor_parallel_size 2": [
            STEP | ROLLOUT_LOOP | RANKS_OF_ROLLOUT | SAMPLER,
            STEP | ROLLOUT_LOOP | RANKS_OF_ROLLOUT,
        ],
        "run:grpo": STEP | ROLLOUT_LOOP | RANKS_OF_ROLLOUT | SAMPLER,
    },
    ("", 4): {
        "step:dense pp2 vpp2 tp2 packed": [
            LAUNCHED,
            LAUNCHED,
            LAUNCHED,
            LAUNCHED,
        ],
    },
    ("2.12.0", 1): {
        "step:dense te": LAUNCHED,
        "step:dense te do --precision_aware_optimizer true": LAUNCHED,
        "step:gpt_oss te": LAUNCHED | DISPATCH,
        "run:sft --train_type lora": STEP,
    },
    ("2.12.0", 2): {
        "step:dense te dp2 --optimizer sgd": LAUNCHED,
        "step:dense te pp2 packed": [LAUNCHED, LAUNCHED],
        "step:moe te tp2 sp ep2 etp1 packed": LAUNCHED | DISPATCH,
        "step:moe te cp2 packed comm=a2a": LAUNCHED | DISPATCH | A2A,
        "save:dense te dp2 do": [_checkpoint(79, 35, 0, 2, groups=2), _checkpoint(77, 0, 0, 2, 38, groups=2)],
    },
}
FAULTS = {
    "none": COUNTED_IN_STEP,
    "bincount": {"read tests.placement.steps:faults.<locals>.Counting.__call__": MICROBATCHES},
    "synchronize": {"sync tests.placement.steps:faults.<locals>.synchronize": MICROBATCHES},
    "mask": "aten.mul.Tensor of device (33, 1, 64), host (33, 1, 1) in tests.placement.steps:_mask",
    "sums": "all_reduce of tensors on the wrong device for its group",
}
"""What is seen of the faults that the scenario `faults` plants."""
SHARDED_FAULTS = {
    "none": STEP | COUNTED_IN_STEP,
    "gradient": "aten.mul_.Tensor of device (65, 64), host (65, 64) in tests.placement.steps:"
    "sharded_faults.<locals>.gradient",
    "gathered": "aten.mul.Tensor of device (130, 64), host (130, 64) in tests.placement.steps:"
    "sharded_faults.<locals>.gathered",
    "sums": {"gloo tests.placement.steps:_sum_over.<locals>.sums": MICROBATCHES},
    "mask": "aten.mul.Tensor of device (3, 32, 64), host (3, 1, 1) in tests.placement.steps:_mask",
}
"""Of `sharded_faults`. The torch engine's one group takes tensors of host memory too, and waits."""

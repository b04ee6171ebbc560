"""All checks that are possible before a process group exists, reported together.

Reads the model's config.json, the layout, the output directory and the trackers; changes nothing on disk. torch is
imported only to look for a device, and only for an option that needs one.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megaswift import log
from megaswift.config import SwiftConfig
from megaswift.data.options.data import DataConfig
from megaswift.data.vision.processor import image_support_problems
from megaswift.engine.determinism import determinism_environment_problems
from megaswift.engine.options.cuda_graphs import cuda_graph_model_problems
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.engine_checks import (
    NATIVE,
    VISION_ONLY,
    capabilities_of,
    filled_deepspeed_config,
    requested_engine,
)
from megaswift.engine.options.extra_kwargs import extra_kwargs_problems
from megaswift.engine.options.te import missing_transformer_engine_problems, set_to_non_default
from megaswift.engine.options.zero_file import missing_deepspeed_problems
from megaswift.engine.tf32 import tf32_problems
from megaswift.errors import ConfigError, LayoutError, Problem, UserError
from megaswift.families import ModelSpec, family_of
from megaswift.folders.side_files import side_file_problems
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.losses.options.kto_pairs import kto_batch_problems
from megaswift.models import qlora
from megaswift.models.family import read_config_json
from megaswift.models.megatron_options import megatron_architecture_problems
from megaswift.models.model_type import model_type_option_mismatch_problems
from megaswift.models.options.capacity import expert_capacity_problems
from megaswift.models.options.linear import linear_layer_problems
from megaswift.models.options.model import ModelConfig
from megaswift.models.targets import (
    Projection,
    dora_problems,
    expert_leaves,
    modules_to_save_tensor_names,
    partial_expert_problems,
    select_projections,
)
from megaswift.models.vision import (
    has_vision_tower,
    reads_images,
    vision_packing_problems,
    vision_task_problems,
)
from megaswift.options.tasks import RL
from megaswift.options.values import option_value_text
from megaswift.parallel.checks import layout_problems
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.model_shape import ModelShape
from megaswift.run import output
from megaswift.run.checks.adapter_sync import adapter_sync_problems
from megaswift.run.checks.adapters import (
    adapter_task_type_problems,
    missing_adapter_file_problems,
    quantized_or_peft_run_problems,
)
from megaswift.run.checks.data import data_problems
from megaswift.run.checks.devices import device_dependent_option_problems
from megaswift.run.checks.distillation import teacher_problems
from megaswift.run.checks.fit import fit_problems
from megaswift.run.checks.model_spec import model_spec_for_task, transformers_class_problems
from megaswift.run.checks.placement import placement_problems
from megaswift.run.checks.prefix_sharing import prefix_sharing_problems
from megaswift.run.checks.rl import (
    reward_environment_and_model_problems,
    rl_run_problems,
    vision_rollout_problems,
)
from megaswift.run.checks.torch_engine import native_compiler_problems, torch_engine_machine_problems
from megaswift.trainers.hub_clients import hub_client_problems
from megaswift.trainers.options.profiling_checks import profile_rank_problems
from megaswift.trainers.options.tracker import PACKAGES, TRACKERS

EXPERT_OPTIONS = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_grouped_gemm",
    "moe_grouped_gemm_impl",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
)

Check = tuple[Callable[[], Sequence[Problem]], type[UserError]]
"""A check, and the error that it raises when it alone has found problems."""


def preflight(cfg: SwiftConfig, world_size: int) -> None:
    """Raises one UserError with all problems of this run on `world_size` processes."""
    log.quiet_libraries()  # some checks import Megatron-Core
    errors = collect_check_errors(
        [
            (
                lambda: missing_transformer_engine_problems(cfg) if capabilities_of(cfg).transformer_engine else [],
                ConfigError,
            ),
            (lambda: flex_dispatcher_problems(cfg.model), ConfigError),
            (lambda: device_dependent_option_problems(cfg, os.environ), ConfigError),
            (lambda: determinism_environment_problems(cfg.train.deterministic, os.environ), ConfigError),
            (lambda: model_problems(cfg, world_size), UserError),
            (lambda: profile_rank_problems(cfg.profiling, world_size), ConfigError),
            (lambda: missing_harness_problems(cfg), ConfigError),
            (lambda: rl_run_problems(cfg, world_size) if cfg.task in RL else [], ConfigError),
            (lambda: [*placement_problems(cfg, world_size)], ConfigError),
            (lambda: teacher_problems(cfg, world_size), ConfigError),
            (
                lambda: kto_batch_problems(
                    cfg, LayoutRequest.of(cfg.parallel, world_size, cfg.data.max_length, cfg.train).known_dp
                ),
                ConfigError,
            ),
            *data_output_and_tracker_checks(cfg),
        ]
    )
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError([p for error in errors for p in error.problems])


def layout_data_output_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """Report problems of layout, data and output directory for a configuration whose options contradict each other: the
    part of `preflight` that asks little of these. Nothing of the model where none is named."""

    def layout() -> list[Problem]:
        if cfg.model.model is None:
            return []
        shape = ModelShape.of(model_spec_for_task(cfg, locate_model(cfg.model, weights=False)))
        return layout_problems(shape, LayoutRequest.of(cfg.parallel, world_size, cfg.data.max_length, cfg.train))

    named: Check = (lambda: reward_environment_and_model_problems(cfg) if cfg.task in RL else [], ConfigError)
    return [
        p
        for error in collect_check_errors([(layout, LayoutError), named, *data_output_and_tracker_checks(cfg)])
        for p in error.problems
    ]


def data_output_and_tracker_checks(cfg: SwiftConfig) -> list[Check]:
    """Returns the checks of data sets, the output directory and trackers."""
    return [
        (lambda: data_problems(cfg), ConfigError),
        (lambda: output.output_folder_problems(cfg), ConfigError),
        (lambda: tracker_problems(cfg.trackers.report_to), ConfigError),
        (lambda: preemption_command_problems(cfg.fault_tolerance.preemption_command), ConfigError),
        (lambda: hub_client_problems(cfg.hub.push_to_hub, cfg.model.use_hf), ConfigError),
    ]


def preemption_command_problems(command: str | None) -> list[Problem]:
    """Report a command that cannot be run on this machine."""
    if not command:
        return []
    what = f"--preemption_command {command}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [Problem(what, f"is no command line: {error}", "close its quotes")]
    if words and shutil.which(words[0]):
        return []
    fix = "give a program and its arguments; use sh -c '...' for a pipe"
    return [Problem(what, f"{words[0] if words else 'the program'} is not on PATH", fix)]


def collect_check_errors(checks: Iterable[Check]) -> list[UserError]:
    """Run the checks and collect what each raises or returns."""
    errors: list[UserError] = []
    for check, kind in checks:
        try:
            problems = check()
        except UserError as error:
            errors.append(error)
        else:
            if problems:
                errors.append(kind(problems))
    return errors


def model_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """Report problems of the model's files and its layout."""
    folder = locate_model(cfg.model, weights=False)
    local = Path(str(cfg.model.model)).is_dir()
    problems = (
        [*missing_model_file_problems(folder, cfg.model.random_init), *side_file_problems(folder)] if local else []
    )
    problems += model_type_option_mismatch_problems(cfg.model.model_type, read_config_json(folder))
    spec = model_spec_for_task(cfg, folder)
    dtype = spec.dtype if cfg.model.torch_dtype == "auto" else cfg.model.torch_dtype
    transformer_engine = requested_engine(cfg) == NATIVE and cfg.model.transformer_impl != "torch"
    problems += tf32_problems(cfg.train.tf32, dtype, transformer_engine)
    problems += megatron_architecture_problems(cfg.model.megatron_architecture, spec)
    problems += extra_kwargs_problems(cfg.model.megatron_extra_kwargs, spec.transformer)
    problems += cuda_graph_model_problems(cfg, spec.transformer)
    problems += expert_capacity_problems(cfg, spec.experts, spec.topk)
    problems += token_limit_problems(cfg, spec)
    problems += adapter_sync_problems(cfg, spec, folder) if cfg.task in RL else []
    problems += prefix_sharing_problems(cfg, spec, cfg.parallel.context_parallel_size)
    if not capabilities_of(cfg).model_parallel:
        return problems + vision_problems(cfg, spec) + torch_engine_problems(cfg, spec, folder, world_size)
    idle: list[Problem] = []
    if any(spec.features.linear_layers):
        idle += linear_layer_problems(cfg)
    if not spec.experts:
        idle += expert_option_problems(cfg)
    elif all(spec.moe_layers):
        idle += recompute_mlp_without_dense_layer_problems(cfg.model)
    adapters = adapter_target_and_folder_problems(cfg, spec) if cfg.model.train_type != "full" else []
    idle += rope_length_problems(cfg.data, spec)
    request = LayoutRequest.of(cfg.parallel, world_size, cfg.data.max_length, cfg.train)
    unfit = layout_problems(ModelShape.of(spec), request) + native_compiler_problems(cfg.model)
    if cfg.model.train_type == "qlora" and not unfit:
        unfit = qlora.four_bit_block_size_problems(family_of(spec.hf_config), spec, request.tp, request.etp)
    return problems + idle + adapters + unfit or fit_problems(cfg, spec, request.layout)


def flex_dispatcher_problems(model: ModelConfig) -> list[Problem]:
    """Report that the library of the flexible dispatcher is missing here."""
    if model.moe_token_dispatcher_type != "flex":
        return []
    found = importlib.util.find_spec("deep_ep")
    if found is None:
        rule = "needs the package deep_ep (DeepEP), which is not installed"
        return [Problem("--moe_token_dispatcher_type flex", rule, "--moe_token_dispatcher_type alltoall")]
    files = {file.name for folder in found.submodule_search_locations or () for file in Path(folder).iterdir()}
    if model.moe_flex_dispatcher_backend == "hybridep" and "hybrid_ep_buffer.py" not in files:
        rule = "needs DeepEP's branch hybrid-ep; the installed package deep_ep has no HybridEPBuffer"
        return [Problem("--moe_flex_dispatcher_backend hybridep", rule, "--moe_flex_dispatcher_backend deepep")]
    return []


def token_limit_problems(cfg: SwiftConfig, spec: ModelSpec) -> list[Problem]:
    """Report models whose loss, or whose rows, do not allow micro-batches by tokens."""
    if cfg.data.max_tokens_per_batch is None:
        return []
    what = f"--max_tokens_per_batch {cfg.data.max_tokens_per_batch}"
    problems = []
    if reads_images(cfg, spec.hf_config):
        rule = "counts tokens of text; a row with images has more"
        problems.append(Problem(what, rule, "--per_device_train_batch_size N"))
    default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
    coefficient = default if cfg.model.moe_aux_loss_coeff is None else cfg.model.moe_aux_loss_coeff
    if spec.experts and (coefficient or cfg.model.moe_z_loss_coeff):
        rule = "would change the loss: the routers' auxiliary losses are means over a micro-batch"
        problems.append(Problem(what, rule, "--moe_aux_loss_coeff 0 --moe_z_loss_coeff 0"))
    return problems


def torch_engine_problems(cfg: SwiftConfig, spec: ModelSpec, folder: Path, world_size: int) -> list[Problem]:
    """Report what the torch engine lacks besides a model that transformers loads."""
    problems = layout_problems(
        ModelShape.of(spec), LayoutRequest.of(cfg.parallel, world_size, cfg.data.max_length, cfg.train)
    ) + torch_engine_machine_problems(cfg)
    problems += transformers_class_problems(cfg.model, spec)
    if "moe_router_score_function" not in spec.transformer:
        rule = f"applies only to MoE models, and model_type {spec.family} is not a supported one"
        problems += [
            Problem(f"--{name} {option_value_text(getattr(cfg.model, name))}", rule, "leave it out")
            for name in EXPERT_OPTIONS[:2]
            if set_to_non_default(cfg, name) and getattr(cfg.model, name)
        ]
    if (kind := requested_engine(cfg)) in ZERO:
        # auto depends on the device: what the file says of it is then checked on the ranks
        dtype = cfg.model.torch_dtype
        problems += missing_deepspeed_problems(kind)
        problems += [
            p
            for p in filled_deepspeed_config(cfg, world_size, dtype, spec.hidden_size).problems
            if dtype != "auto" or "bf16" not in p.what
        ]
    problems += quantized_or_peft_run_problems(cfg, folder)
    return problems


def adapter_target_and_folder_problems(cfg: SwiftConfig, spec: ModelSpec) -> list[Problem]:
    """Report targets that match nothing, and an adapter folder that is none; the bridge reads its content later."""
    lora = cfg.lora
    problems = []
    if lora.adapters is not None:
        return missing_adapter_file_problems(lora.adapters) + adapter_task_type_problems(cfg)
    family = family_of(spec.hf_config)
    targets: list[Projection] = []
    try:
        targets = select_projections(family, spec, lora.target_modules, lora.target_parameters)
        problems += partial_expert_problems(family, spec, targets) if capabilities_of(cfg).expert_adapters else []
    except UserError as error:
        problems += error.problems
    try:
        whole = modules_to_save_tensor_names(family, spec, lora.modules_to_save)
        problems += qlora.four_bit_trainable_problems(family, whole) if cfg.model.train_type == "qlora" else []
    except UserError as error:
        problems += error.problems
    if lora.use_dora:
        problems += dora_problems(targets, "--use_dora true", expert_leaves(family))
    if lora.use_dora and cfg.model.train_type == "qlora":
        problems.append(qlora.NO_DORA)
    return problems


def rope_length_problems(data: DataConfig, spec: ModelSpec) -> list[Problem]:
    """Report sequences for which the model would have other rotary frequencies than it is built with."""
    longest = spec.features.longest
    if longest is None or data.max_length <= longest:
        return []
    kind = (spec.rope.scaling or {}).get("rope_type")
    return [
        Problem(
            f"--max_length {data.max_length}",
            f"exceeds {longest}, above which this model's {kind} RoPE changes its frequencies for the whole batch",
            f"--max_length {longest}",
        )
    ]


def expert_option_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report options for experts with a dense model: they would be ignored."""
    rule = "applies only to MoE models; this model is dense"
    given = [
        Problem(f"--{name} {option_value_text(getattr(cfg.model, name))}", rule, "leave it out")
        for name in EXPERT_OPTIONS
        if set_to_non_default(cfg, name)
    ]
    parts = [part for part in cfg.model.recompute_modules if part in ("moe", "moe_act")]
    given += [Problem(f"--recompute_modules {part}", rule, "--recompute_modules mlp") for part in parts]
    if "layernorm" in cfg.model.recompute_modules:  # Megatron-Core would recompute none, without a word
        fused = (
            "Transformer Engine fuses the norms of a dense model with the projections that follow, so there is "
            "none to recompute"
        )
        given.append(Problem("--recompute_modules layernorm", fused, "--recompute_modules mlp"))
    return given


def recompute_mlp_without_dense_layer_problems(model: ModelConfig) -> list[Problem]:
    """Report recomputation of dense MLPs for a model that has none."""
    idle = "mlp" in model.recompute_modules
    return (
        [
            Problem(
                "--recompute_modules mlp",
                "applies to dense layers, but every layer of this model has experts",
                "--recompute_modules moe",
            )
        ]
        if idle
        else []
    )


def tracker_problems(report_to: Sequence[str]) -> list[Problem]:
    """Report trackers that are requested and not installed."""
    return [
        Problem(
            f"--report_to {name}",
            f"the package {PACKAGES.get(name, name)} is not installed",
            f"run pip install {PACKAGES.get(name, name)}, or leave it out of --report_to",
        )
        for name in report_to
        if name in TRACKERS and importlib.util.find_spec(PACKAGES.get(name, name)) is None
    ]


def vision_problems(cfg: SwiftConfig, spec: ModelSpec) -> list[Problem]:
    """Report options that do not fit a vision-language model, and packages that reading images needs."""
    model = f"--model {cfg.model.model}"
    if not has_vision_tower(spec.hf_config):
        return [
            Problem(
                f"--{name} {str(cfg.value(name)).lower()}",
                "applies only to vision-language models; this model accepts only text",
                "leave it out",
            )
            for name in VISION_ONLY
            if cfg.value(name) is not None
        ]
    if problems := vision_task_problems(spec.hf_config, str(cfg.model.model), cfg.task):
        return problems
    if cfg.data.packing and (cfg.task == "sft" or "packing" in cfg.given):  # other tasks pack by default
        problems += vision_packing_problems(spec.hf_config, cfg.task)
    if cfg.data.streaming and cfg.task != "sft":
        problems.append(
            Problem(
                "--streaming true",
                f"{cfg.task} does not stream rows with images; only sft does",
                "use --streaming false: images are read on demand, and only tokens are cached",
            )
        )
    problems += (
        vision_rollout_problems(cfg.rollout, cfg.rewards, cfg.placement.sampler_engines) if cfg.task in RL else []
    )
    return problems + image_support_problems(locate_model(cfg.model, weights=False), model)


def missing_harness_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report that lm-evaluation-harness is missing, which runs --eval_tasks."""
    if not cfg.evaluation.eval_tasks or importlib.util.find_spec("lm_eval") is not None:
        return []
    what = f"--eval_tasks {' '.join(cfg.evaluation.eval_tasks)}"
    return [Problem(what, "requires the package lm_eval", "run pip install 'megaswift[eval]'")]

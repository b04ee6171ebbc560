"""How the translated run is started: the variables before `megaswift TASK FILE`, and what a launcher's settings are.

Owns the launch of a command and the environment that goes on to the new one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaswift.base.redaction import is_secret
from megaswift.compat.files.accelerate_file import DEEPSPEED_SETTLED, SETTLED
from megaswift.compat.files.accelerate_launch import options_from_accelerate_environment, settings_without_effect
from megaswift.compat.names.translated import RENAMED
from megaswift.compat.scripts.accelerate_settings import BUNDLED, accelerate_environment, read_settings_file
from megaswift.compat.scripts.launcher_words import LAUNCH_FIELDS
from megaswift.compat.scripts.migrated_run import NOT_SET, MigratedRun
from megaswift.compat.scripts.shell_variables import ExpandedWord
from megaswift.compat.scripts.toolkits import ForeignCommand, file_of_script
from megaswift.compat.variables import OPTIONS
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError
from megaswift.options.sources import ConfigSource, GivenOptionValue
from megaswift.options.values import TRUE

LAUNCH_ORDER = ("nnodes", "node_rank", "master_addr", "master_port", "nproc_per_node")
KEPT = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|MKL|PYTORCH|TORCH|HF|TRANSFORMERS|MODELSCOPE|WANDB|SWANLAB|MLFLOW|TRACKIO|TOKENIZERS|NVTE|UB|VLLM|SGLANG|"
    r"TRITON|RAY|LD|ASCEND|HCCL|TASK_QUEUE|DISABLE_VERSION_CHECK|KUBERNETES)_\w+|PYTHONPATH|\w+_proxy|\w+_PROXY"
)
"""Variables that other programs read, whichever toolkit trains."""
PIXELS_HINT = "set sizes of images and videos in the model's preprocessor_config.json"
PIXELS = re.compile(r"(MAX|MIN|VIDEO|IMAGE)_\w*(PIXELS|TOKEN_NUM|FRAMES)\w*|FPS\w*|NFRAMES|SIZE_FACTOR")
WITHOUT_MEANING = frozenset({
    "standalone", "module", "m", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "max_restarts",
    "monitor_interval", "log_dir", "tee", "redirects", "role", "start_method", "no_python", "multi_gpu",
    "same_network", "debug", "quiet", "num_cpu_threads_per_process", "compute_environment", "downcast_bf16",
    "main_training_function", "use_cpu", "enable_cpu_affinity", "dynamo_backend", "no_local_rank", "machine_rank",
    "use_env", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "distributed_type", "config_file", "gpu_ids",
    "force_multi", "launcher", "deepspeed_config", "fsdp_config", "local_ranks_filter",
    "deepspeed_multinode_launcher", "zero3_init_flag", "use_deepspeed", "use_fsdp", "zero3_save_16bit_model",
    "fsdp_state_dict_type", "fsdp_version", "fsdp_use_orig_params", "fsdp_sync_module_states",
    "fsdp_cpu_ram_efficient_loading", "fsdp_auto_wrap_policy", "commands", "command_file", "tpu_name", "tpu_zone",
})  # fmt: skip
"""Settings of launchers that a run does not need: how processes find each other, and how a library saves."""
TAKEN = frozenset({
    "module", "m", "no_python", "multi_gpu", "machine_rank", "distributed_type", "config_file", "use_deepspeed",
    "use_fsdp", "deepspeed_config", "fsdp_config", "rdzv_endpoint", "max_restarts",
})  # fmt: skip
"""Those of them that say how to read the others, or that are used."""
HOSTS = ("hostfile", "deepspeed_hostfile")
SEVERAL = "names several machines"
ON_EACH = "start the command on each: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT"
SILENT = ("", "none", "no", "false", "[]", "{}")
OF_ACCELERATE = ("use_megatron_lm", "use_parallelism_config", "dynamo_backend")
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")


def launch_of_command(run: MigratedRun, command: ForeignCommand, folder: Path) -> list[ConfigSource]:
    """Sets the launch and the environment of a run; returns the options that the launcher's settings are."""
    sources = [_environment(run, command.environment)]
    launch = dict(command.launch)
    settings: dict[str, Any] = {}
    if command.launcher == "accelerate" or "accelerate_config" in command.launcher_options:
        settings = _accelerate_settings(run, command, folder)
        for name in list(settings):
            ours = NAMES.get(RENAMED.get(name, name), "")
            if ours in LAUNCH_FIELDS:
                launch.setdefault(ours, ExpandedWord(str(settings.pop(name))))
        sources.append(_accelerate_source(run, settings))
    else:
        settings = {name: word.text for name, word in command.launcher_options.items()}
    _processes(run, command, launch, settings)
    _rendezvous(run, launch, command.launcher_options.get("rdzv_endpoint"))
    for name, word in launch.items():
        _take_word(run, run.launch, name, word)
    _restarts(run, str(settings.pop("max_restarts", "0")))
    if run.launch.get("nnodes", "1") == "1":
        for name in ("node_rank", "nnodes", "master_addr", "master_port"):
            value = run.launch.pop(name, None)
            if value is not None:
                run.left_out.append(f"{name} {value}: the run is on one machine")
    for name, value in settings.items():
        if name in WITHOUT_MEANING:
            typed = name in command.launcher_options
            if typed or (name not in TAKEN and str(value).lower() not in SILENT):
                shown = "" if str(value).lower() == "true" else f" {value}"
                why = DEEPSPEED_SETTLED.get(name) or SETTLED.get(name) or "a run does not need this of its launcher"
                run.left_out.append(f"--{name}{shown}: {'it is read above' if name in TAKEN else why}")
        else:
            run.ask(f"--{name} {value}", f"is an option of {command.launcher or 'the launcher'} without a counterpart")
    return sources


def _take_word(run: MigratedRun, values: dict[str, str], name: str, word: ExpandedWord) -> None:
    """A value of the launch or the environment; variables in it stay, and what else only a run knows is asked."""
    key = name.upper() if name in LAUNCH_FIELDS else name
    unknown = [u for u in word.unresolved if not VARIABLE.fullmatch(u) or u not in word.text]
    own = word.text in (f"${name}", f"${{{name}}}")
    if not unknown and not own:
        values[name] = word.text
        run.variables[key] = word.unresolved
        return
    run.ask(f"{key}: {word.text}", NOT_SET.format(", ".join(unknown or word.unresolved)), f"set {key}")
    if name in LAUNCH_FIELDS:
        values[name] = "ADDRESS" if name == "master_addr" else "N"


def _rendezvous(run: MigratedRun, launch: dict[str, ExpandedWord], endpoint: ExpandedWord | None) -> None:
    """torchrun's `--rdzv_endpoint HOST:PORT`."""
    if endpoint is None or launch.get("nnodes", ExpandedWord("1")).text == "1":
        return
    host, colon, port = endpoint.text.rpartition(":")
    if not colon:
        host = endpoint.text
        port = ""
    parts = {"master_addr": host.strip("[]") if host.startswith("[") else host, "master_port": port}
    whole = not colon and endpoint.unresolved
    if whole or any(u not in host and u not in port for u in endpoint.unresolved):
        run.ask(f"--rdzv_endpoint {endpoint.text}", "is HOST:PORT of the first machine", "set MASTER_ADDR, MASTER_PORT")
        parts = {"master_addr": "ADDRESS"}
    for name, text in parts.items():
        if text:
            launch[name] = ExpandedWord(text, tuple(u for u in endpoint.unresolved if u in text))
    if "node_rank" not in launch:
        launch["node_rank"] = ExpandedWord("N")
        run.ask("NODE_RANK", "torchrun numbers the machines itself", "set it on each machine: 0, 1, ...")


def _restarts(run: MigratedRun, count: str) -> None:
    """torchrun's `--max_restarts N`, for runs on one machine."""
    if count in ("0", "None", ""):
        return
    if run.launch.get("nnodes", "1") != "1":
        run.ask(f"--max_restarts {count}", "applies to runs on one machine", "leave it out")
    elif re.fullmatch(r"[1-9]\d{0,5}", count) and run.launch.setdefault("nproc_per_node", "1") != "N":
        run.launch["max_restarts"] = count
    else:
        run.ask(f"--max_restarts {count}", "needs numbers", "give --max_restarts 3 --nproc_per_node 8")


def _processes(
    run: MigratedRun, command: ForeignCommand, launch: dict[str, ExpandedWord], settings: dict[str, Any]
) -> None:
    """`nproc_per_node` where the launcher says it in another way."""
    total = str(settings.pop("num_processes", ""))
    nodes = launch.get("nnodes", ExpandedWord("1")).text
    if re.fullmatch(r"\d{1,6}", total):
        each = int(total) // int(nodes) if re.fullmatch(r"[1-9]\d{0,5}", nodes) else int(total)
        launch["nproc_per_node"] = ExpandedWord(str(max(1, each)))
    elif total:
        launch["nproc_per_node"] = ExpandedWord(total, (total,))
    include = str(settings.pop("include", ""))
    if re.fullmatch(r"localhost:[\d,]+", include):
        ids = include.partition(":")[2]
        launch["nproc_per_node"] = ExpandedWord(str(len(ids.split(","))))
        run.environment["CUDA_VISIBLE_DEVICES"] = ids
    elif include:
        run.ask(f"--include {include}", SEVERAL, ON_EACH)
    for name in HOSTS:
        if file := str(settings.pop(name, "") or ""):
            run.hostfile = file
            run.ask(f"--{name} {file}", SEVERAL, "type the command on each of them: it finds its rank in the file")
    if ids := str(settings.pop("gpu_ids", "") or ""):
        run.environment.setdefault("CUDA_VISIBLE_DEVICES", ids) if ids != "all" else None
    each_text = launch.get("nproc_per_node", ExpandedWord("")).text
    unknown = command.launcher in ("accelerate", "deepspeed") and not each_text and not run.hostfile
    if unknown or (each_text and not re.fullmatch(r"[1-9]\d{0,5}", each_text)):
        visible = run.environment.get("CUDA_VISIBLE_DEVICES", "")
        if unknown and re.fullmatch(r"\d+(,\d+)*", visible):
            launch["nproc_per_node"] = ExpandedWord(str(visible.count(",") + 1))
            return
        launch["nproc_per_node"] = ExpandedWord("N")
        why = f"the script says {each_text}" if each_text else f"{command.launcher} takes all GPUs of the machine"
        run.ask("NPROC_PER_NODE", why, "set it to the number of GPUs to use on each machine")


def _environment(run: MigratedRun, environment: Mapping[str, ExpandedWord]) -> ConfigSource:
    """The options that variables amount to here."""
    givens = []
    for name, word in environment.items():
        if name.lower() in LAUNCH_FIELDS:
            continue
        if is_secret(name.lower()):
            run.left_out.append(f"{name}, a secret, is not copied; set it where you run the command")
        elif KEPT.fullmatch(name):
            _take_word(run, run.environment, name, word)
        elif name in OPTIONS and not word.unresolved:
            givens.append(GivenOptionValue(OPTIONS[name], word.text, f"{name}={word.text}"))
        elif PIXELS.fullmatch(name):
            run.ask(f"{name}={word.text}", "is a setting of ms-swift", PIXELS_HINT)
        else:
            run.left_out.append(f"{name}={word.text}: not a variable that megaswift reads")
    return ConfigSource(tuple(givens))


def _accelerate_settings(run: MigratedRun, command: ForeignCommand, folder: Path) -> dict[str, Any]:
    """Returns the settings of its file, with the flags over them."""
    flags = {name: word.text for name, word in command.launcher_options.items()}
    settings: dict[str, Any] = {}
    name = flags.pop("config_file", "") or flags.pop("accelerate_config", "")
    place = file_of_script(folder, name) if name else None
    bundled = BUNDLED.get(Path(name).stem.removeprefix("deepspeed_"))
    if place is not None:
        try:
            settings = read_settings_file(place)
        except ConfigError as error:
            for problem in error.problems:
                run.ask_problem(problem)
    elif bundled is not None:
        settings = dict(bundled)
    elif name:
        run.ask(f"--config_file {name}", "no such file", "run migrate where the file is found")
    return settings | flags


def _accelerate_source(run: MigratedRun, settings: dict[str, Any]) -> ConfigSource:
    """The options of its settings; what is used is taken out of them."""
    environ = accelerate_environment(settings)
    source = options_from_accelerate_environment(environ)
    run.left_out += settings_without_effect(environ)
    for problem in source.problems:
        run.ask_problem(problem)
    used = (
        *("mixed_precision", "zero_stage", "offload_", "deepspeed_config_file", "fsdp_", "gradient_"),
        *("deepspeed_moe", "megatron_lm_", "parallelism_config"),
    )
    for name in [n for n in settings if n.startswith(used) or n in OF_ACCELERATE]:
        settings.pop(name)
    if str(settings.pop("cpu", "")).lower() in TRUE:
        run.left_out.append("--cpu: without a GPU a run is on the CPU")
    return ConfigSource(source.givens)


def launch_words(run: MigratedRun) -> list[str]:
    """The variables before a command."""
    names = {name.upper(): run.launch[name] for name in LAUNCH_ORDER if name in run.launch}
    values = {**run.environment, **names}
    return [f"{name}={_shell_word(value, run.variables.get(name, ()))}" for name, value in values.items()]


def command_line(run: MigratedRun, file: str) -> str:
    """Return the command line to type."""
    hosts = ["--hostfile", _shell_word(run.hostfile, VARIABLE.findall(run.hostfile))] if run.hostfile else []
    return " ".join([*launch_words(run), "megaswift", run.task or "TASK", _shell_word(file), *hosts])


def _shell_word(value: str, variables: Sequence[str] = ()) -> str:
    """Variables that only the run knows stay variables; nothing else of a value reaches the shell."""
    if not variables:
        return shlex.quote(value)
    longest = sorted(variables, key=len, reverse=True)
    pieces = [piece for piece in re.split(f"({'|'.join(map(re.escape, longest))})", value) if piece]
    return "".join(f'"{piece}"' if piece in variables else shlex.quote(piece) for piece in pieces)

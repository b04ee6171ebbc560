"""Settings of `accelerate launch`, flags and configuration file, as the environment variables that it sets for a run.

What those variables mean for a run is `compat/files/accelerate_launch.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.compat.files.accelerate_file import DEEPSPEED
from megaswift.compat.files.accelerate_launch import FSDP, ZERO
from megaswift.compat.files.accelerate_parallel import MEGATRON, PARALLELISM, PREFIXES, variables_of_section
from megaswift.errors import ConfigError, Problem, first_line
from megaswift.options.files import LARGEST_FILE

BUNDLED: dict[str, dict[str, Any]] = {
    **{f"zero{n}": {"distributed_type": "DEEPSPEED", "zero_stage": n} for n in (1, 2, 3)},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_version": 2},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "single_gpu": {"distributed_type": "NO"},
}
"""What distinguishes the files that TRL brings along."""
VARIABLES = {
    **DEEPSPEED,
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}
"""accelerate's name: the variable; any other `fsdp_*` is the variable of the same name in capitals."""
SECTIONS_OF_FILE = ("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config", "fp8_config")


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a configuration file of accelerate, those of its sections with the others."""
    import yaml

    class WithoutAliases(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ConfigError(Problem(str(path), "has aliases, which settings of accelerate do not need"))
            return super().compose_node(parent, index)

    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ConfigError(Problem(str(path), f"is larger than {LARGEST_FILE >> 20} MiB"))
        read = WithoutAliases(content.decode("utf-8")).get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {first_line(error)}")) from None
    found: dict[str, Any] = {}
    for name, value in (read if isinstance(read, dict) else {}).items():
        inside = name in SECTIONS_OF_FILE and isinstance(value, dict)
        found |= value if inside else {str(name): value}
        if inside:
            found[name] = True
    return found


def accelerate_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variables that accelerate would set."""
    kind = str(settings.get("distributed_type", "")).upper()
    environ = {
        VARIABLES[n]: "no" if v is False else str(v) for n, v in settings.items() if n in VARIABLES and v is not None
    }
    environ |= {
        name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.items()
        if name.startswith("fsdp_") and name not in (*VARIABLES, *SECTIONS_OF_FILE) and value is not None
    }
    for variable, name, flag in (
        (ZERO, "DEEPSPEED", "use_deepspeed"),
        (FSDP, "FSDP", "use_fsdp"),
        (MEGATRON, "MEGATRON_LM", "use_megatron_lm"),
    ):
        if kind == name or str(settings.get(flag, "")).lower() == "true":
            environ[variable] = "true"
    for name, prefix in PREFIXES.items():
        section = {key: value for key, value in settings.items() if key.startswith(prefix.lower()) and key != name}
        environ |= variables_of_section(name, section)
        if name == "parallelism_config" and section:
            environ[PARALLELISM] = "true"
    return environ

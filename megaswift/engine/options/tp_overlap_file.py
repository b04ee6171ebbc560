"""The YAML file of --tp_comm_overlap_cfg: Transformer Engine's settings for each overlapped matrix product.

Owns reading and checking; names and values are Transformer Engine's (`initialize_ub`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from megaswift.errors import ConfigError, Problem
from megaswift.options.yaml_limits import read_yaml

OPTION = "tp_comm_overlap_cfg"
PRODUCTS = (
    *("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad", "proj_wgrad"),
    *("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad", "fc2_wgrad"),
)
SETTINGS: dict[str, type | tuple[str, ...]] = {
    "method": ("ring_exchange", "pipeline", "bulk", "external"),
    "is_reduce_scatter": bool,
    "num_sm": int,
    "cga_size": int,
    "set_sm_margin": bool,
    "num_splits": int,
    "aggregate": bool,
    "atomic_gemm": bool,
    "use_ce": bool,
    "fp8_buf": bool,
    "comm_priority": int,
    "gemm_priority": int,
    "pipeline_rs_overlap_first_gemm": bool,
}


def _problems(path: str, content: Any) -> Iterator[Problem]:
    what = f"--{OPTION} {path}"
    if not isinstance(content, dict):
        yield Problem(what, "is not a mapping of matrix products to their settings", "qkv_fprop: {num_sm: 1}")
        return
    for product, settings in content.items():
        if product not in PRODUCTS or not isinstance(settings, dict):
            yield Problem(f"{what}: {product}", "is not a matrix product with settings", ", ".join(PRODUCTS))
            continue
        for name, value in settings.items():
            kind = SETTINGS.get(name)
            if kind is None:
                yield Problem(f"{what}: {product}.{name}", "is not a setting", ", ".join(SETTINGS))
            elif isinstance(kind, tuple):
                if value not in kind:
                    yield Problem(f"{what}: {product}.{name} {value}", "is not a method", ", ".join(kind))
            elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                yield Problem(f"{what}: {product}.{name} {value}", f"is not of type {kind.__name__}", "")


def read_tp_comm_overlap_cfg(path: str | None) -> dict[str, dict[str, Any]]:
    """Settings by matrix product; empty without a file, and what is left out is Transformer Engine's default.

    Raises:
        ConfigError: the file cannot be read, or has names or values that are not known.
    """
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = read_yaml(file.read())
    except OSError as error:
        raise ConfigError(
            Problem(f"--{OPTION} {path}", error.strerror or str(error), "an existing YAML file")
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(Problem(f"--{OPTION} {path}", f"is not YAML: {error}", "a YAML file")) from None
    content = {} if content is None else content
    if problems := list(_problems(path, content)):
        raise ConfigError(problems)
    return content

"""`--rope_scaling`: config.json with other rotary frequencies, as ms-swift's option of this name and transformers have
them. What the types compute is transformers' and `engine.megatron.layers.rope`'s."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megaswift.errors import ConfigError, Problem, did_you_mean_hint

BY_FACTOR = ("linear", "dynamic", "yarn")
"""Types that a name alone describes: the factor follows from --max_length."""
KINDS = (*BY_FACTOR, "llama3", "longrope", "default")
FROM_ORIGINAL = ("yarn", "llama3")
"""Types whose length is `factor` x `original_max_position_embeddings`."""
KEPT = ("rope_theta", "partial_rotary_factor")
EXAMPLE = '--rope_scaling \'{"rope_type": "yarn", "factor": 4.0}\''


def config_with_rope_scaling(raw: Mapping[str, Any], option: str, max_length: int | None) -> dict[str, Any]:
    """config.json with the scaling of `option`, a name or a JSON object. ConfigError where it cannot be.

    Without a factor it is the smallest whole number with which `max_length` fits; None: the factor must be given.
    """
    kind, given = _parse(option)
    key = "rope_scaling" if raw.get("rope_scaling") or "rope_parameters" not in raw else "rope_parameters"
    before: Any = raw.get(key) or {}
    if not isinstance(before, Mapping) or any(isinstance(value, Mapping) for value in before.values()):
        raise _error(option, "the model's layers have different rotary embeddings, which one scaling cannot replace")
    original = (
        given.get("original_max_position_embeddings")
        or before.get("original_max_position_embeddings")
        or raw.get("max_position_embeddings")
    )
    if kind in BY_FACTOR and "factor" not in given:
        if not isinstance(original, int) or original < 1:
            raise _error(option, "needs a factor: config.json has no max_position_embeddings", EXAMPLE)
        if max_length is None:
            raise _error(option, "has no factor, and no --max_length from which it would follow", EXAMPLE)
        factor = math.ceil(max_length / original)
        if factor < 2:
            rule = f"has no factor, and --max_length {max_length} is within the model's {original} positions"
            raise _error(option, rule, f"--max_length {2 * original}, or a factor: {EXAMPLE}")
        given["factor"] = float(factor)
    config = dict(raw)
    if kind in FROM_ORIGINAL and original is not None:
        given.setdefault("original_max_position_embeddings", original)
        longest = given["original_max_position_embeddings"] * given.get("factor", 1)
        config["max_position_embeddings"] = max(int(longest), int(raw.get("max_position_embeddings") or 0))
    config[key] = {name: before[name] for name in KEPT if name in before} | {"rope_type": kind, **given}
    return config


def _parse(option: str) -> tuple[str, dict[str, Any]]:
    """The type and its parameters."""
    given: Any = {"rope_type": option}
    if option.lstrip().startswith("{"):
        try:
            given = json.loads(option)
        except (ValueError, RecursionError):
            raise _error(option, "is not JSON", EXAMPLE) from None
    kind = given.get("rope_type", given.get("type"))
    if kind not in KINDS:
        fix = did_you_mean_hint(str(kind), KINDS) or EXAMPLE
        raise _error(option, f"must have a rope_type of {', '.join(KINDS)}", fix)
    parameters = {name: value for name, value in given.items() if name not in ("type", "rope_type")}
    for name in ("factor", "original_max_position_embeddings"):
        value = parameters.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise _error(option, f"{name} must be a number above 0", EXAMPLE)
    if kind not in (*BY_FACTOR, "default") and not parameters:
        raise _error(option, f"{kind} needs its parameters", "give a JSON object, as in the config.json of such models")
    return kind, parameters


def _error(option: str, rule: str, fix: str = "") -> ConfigError:
    return ConfigError(Problem(f"--rope_scaling {option}", rule, fix))

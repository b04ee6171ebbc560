"""Parses raw values (text of a flag, or YAML and Python values) into option values, or reports the error.

Text means the same everywhere, so YAML's `1e-5` (which YAML 1.1 reads as text) works as on the command line.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from megaswift.base.command_words import unusable_text_rule
from megaswift.base.named_object import NamedObject
from megaswift.errors import did_you_mean_hint
from megaswift.options.option import REGISTERED, Option

LARGEST = 2**53
"""The largest whole number, unless an option says otherwise: every format and library keeps it exactly."""
LARGEST_FRACTION = 1e16
"""The largest other number: float32, in which models compute, holds the product of two of them."""
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
UNSET = ("none", "null", "")


class InvalidValue(ValueError):
    """A value that will not do; `rule` says why and `fix` names one that would."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self.fix = fix


def resets_number_to_default(option: Option, raw: Any) -> bool:
    """Return whether `raw` takes a number back that has a default: `none` on the command line, over a file's value."""
    return not option.optional and option.kind in ("int", "float") and _says_none(option, raw)


def _says_none(option: Option, raw: Any) -> bool:
    """None, in words, or as another toolkit writes it for this option."""
    if (
        isinstance(raw, int | float | str)
        and not isinstance(raw, bool)
        and str(raw).strip() in option.details.get("unset", ())
    ):
        return True
    return raw is None or (isinstance(raw, str) and raw.strip().lower() in UNSET and option.kind != "bool")


def parse_option_value(option: Option, raw: Any) -> Any:
    """The typed value of `raw` for `option`; Invalid when it has none."""
    unset = _says_none(option, raw)
    if unset and option.optional:
        return None
    if option.kind in ("list", "numbers", "integers"):
        return () if unset else _list(option, raw)
    if option.kind == "map":
        return {} if unset else _map(option, raw)
    if raw is None:
        raise InvalidValue("has no value", example_flag_text(option))
    if isinstance(raw, list | tuple):
        if len(raw) != 1:
            raise InvalidValue("takes one value", example_flag_text(option))
        raw = raw[0]
    value = _SCALARS[option.kind](option, raw)
    return None if option.optional and option.switches and value == "none" else value


def example_flag_text(option: Option) -> str:
    """A flag with a value that would do."""
    if option.kind == "bool":
        return f"--{option.name} true or --{option.name} false"
    if "example" in option.details:
        return f"--{option.name} {option.details['example']}"
    if option.choices:
        value: Any = option.choices[0]
    elif option.default not in (None, (), {}):
        value = option.default
    else:
        above = option.details.get("above", 0)
        value = {
            "int": max(1, int(option.details.get("minimum", 1))),
            "float": 0.1 if above < 0.1 else 2 * above,
            "map": "NAME=VALUE",
        }.get(option.kind, "TEXT")
    return f"--{option.name} {option_value_text(value)}"


def option_value_text(value: Any, levels: int = 8) -> str:
    """A value as one would type it; of nested ones the first `levels`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple | dict) and not levels:
        return "..."
    if isinstance(value, list | tuple):
        return " ".join(option_value_text(v, levels - 1) for v in value)
    if isinstance(value, dict):
        return " ".join(f"{k}={option_value_text(v, levels - 1)}" for k, v in value.items())
    return "none" if value is None else str(value)


def _text(option: Option, raw: Any) -> str:
    if isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    if isinstance(raw, bool) and option.switches:
        raw = option_value_text(raw)
    if callable(raw):
        rule = "is a Python object, but this option takes text"
        raise InvalidValue(rule, f'register it under a name (megaswift.plugins), and give {option.name}="NAME"')
    if not isinstance(raw, str) and (isinstance(raw, bool) or not isinstance(raw, int)):
        raise InvalidValue("must be text", example_flag_text(option))
    text = raw if isinstance(raw, NamedObject) else str(raw)
    _refuse_unusable_text(option, text)
    if option.choices:
        return _choice(option, text)
    if not text:
        raise InvalidValue("is empty", example_flag_text(option))
    return text


def _refuse_unusable_text(option: Option, text: str) -> None:
    if rule := unusable_text_rule(text):
        raise InvalidValue(rule, "use text in UTF-8, and a path that is valid on this file system")


def _choice(option: Option, text: str) -> Any:
    value = option.details.get("spellings", {}).get(text.strip().lower(), text.strip().lower())
    if value not in option.choices:
        close = did_you_mean_hint(value, [*option.choices, *option.details.get("spellings", {})])
        which = f"{text.strip()} " if option.kind == "list" else ""
        more = " (--external_plugins FILE registers others)" if option.name in REGISTERED else ""
        rule = f"{which}must be one of {' | '.join(option.choices)}{more}"
        raise InvalidValue(rule, close or example_flag_text(option))
    return value


def _bool(option: Option, raw: Any) -> bool:
    text = str(raw).strip().lower()
    if text not in TRUE + FALSE:
        raise InvalidValue("must be true or false", example_flag_text(option))
    return text in TRUE


def _number(option: Option, raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise InvalidValue("must be a number", example_flag_text(option))
    try:
        value = float(raw)
    except ValueError:
        raise InvalidValue("must be a number", example_flag_text(option)) from None
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise InvalidValue("must be a finite number", example_flag_text(option))
    return value


def _int(option: Option, raw: Any) -> float:
    number = _number(option, raw)
    if option.details.get("fraction") and 0 < number < 1:
        return number
    if number != int(number):
        if option.name.endswith("_steps") and 0 < number < 1:
            raise InvalidValue("must be a number of steps, not a share of the run", f"--{option.name} N")
        raise InvalidValue("must be an integer", f"--{option.name} {math.ceil(number)}")
    try:
        value = int(raw)  # keeps digits that a float would lose
    except ValueError:
        value = int(number)
    value = int(_in_range(option, value))
    if value > option.details.get("maximum", LARGEST):
        raise InvalidValue(f"must be <= {LARGEST}", example_flag_text(option))
    return value


def _float(option: Option, raw: Any) -> float:
    value = float(_in_range(option, _number(option, raw)))
    if abs(value) > LARGEST_FRACTION:
        raise InvalidValue(f"must be <= {LARGEST_FRACTION:g} in size", example_flag_text(option))
    return value


def option_range_text(option: Option) -> str:
    """The allowed range in words: `>= 1`, `> 0 and < 1`; empty when any number will do."""
    signs = (("minimum", ">="), ("above", ">"), ("maximum", "<="), ("below", "<"))
    return " and ".join(f"{sign} {_exact(option.details[key])}" for key, sign in signs if key in option.details)  # type: ignore[literal-required]


def _exact(limit: float) -> str:
    """A bound with all its digits."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _in_range(option: Option, value: float) -> float:
    d = option.details
    fits = (
        value >= d.get("minimum", -math.inf)
        and value > d.get("above", -math.inf)
        and value <= d.get("maximum", math.inf)
        and value < d.get("below", math.inf)
    )
    if not fits:
        ends = [d[k] for k in ("minimum", "maximum") if k in d]  # type: ignore[literal-required]
        close = min(ends, key=lambda e: abs(e - value)) if ends and "above" not in d and "below" not in d else None
        raise InvalidValue(
            f"must be {option_range_text(option)}",
            example_flag_text(option) if close is None else f"--{option.name} {_exact(close)}",
        )
    return value


def _list(option: Option, raw: Any) -> tuple[Any, ...]:
    items = list(raw) if isinstance(raw, list | tuple) else [raw]
    if len(items) == 1 and str(items[0]).strip().lower() in UNSET[:2]:  # a flag's words come as a list
        return ()
    if option.choices or option.kind in ("numbers", "integers"):  # names never hold a comma or a blank, paths may
        items = [
            part for item in items for part in (item.replace(",", " ").split() if isinstance(item, str) else [item])
        ]
        items = [i for i in items if not (isinstance(i, str) and i.strip().lower() in UNSET)]
    if option.kind in ("numbers", "integers"):
        return tuple((_float if option.kind == "numbers" else _int)(option, i) for i in items)
    return tuple(
        _text(option, i.strip() if isinstance(i, str) and not isinstance(i, NamedObject) else i) for i in items
    )


def _map(option: Option, raw: Any) -> dict[str, str]:
    items = list(raw) if isinstance(raw, list | tuple) else [raw]
    mapping: dict[str, str] = {}
    for item in items:
        if isinstance(item, str) and item.strip().startswith("{"):
            try:
                item = json.loads(item)
            except json.JSONDecodeError as error:
                raise InvalidValue(
                    f"is not JSON: {error.msg} at column {error.colno}", example_flag_text(option)
                ) from None
            except (RecursionError, ValueError):
                raise InvalidValue(
                    "is not valid JSON: nested too deeply, or a number is too long", example_flag_text(option)
                ) from None
        elif isinstance(item, str) and "=" in item:
            item = dict([item.split("=", 1)])
        if isinstance(item, dict):
            item = {k: json.dumps(v) if isinstance(v, bool | int | float | list) else v for k, v in item.items()}
        if not isinstance(item, dict) or not all(isinstance(v, str) for v in item.values()):
            form = option.details.get("metavar", "").removesuffix("...")
            pairs = f"{form} pairs or " if "=" in form else ""
            raise InvalidValue(f"must be {pairs}a JSON object of strings", example_flag_text(option))
        for key, value in item.items():
            _refuse_unusable_text(option, str(key))
            _refuse_unusable_text(option, value)
        mapping.update({str(k): v for k, v in item.items()})
    return mapping


_SCALARS = {"text": _text, "int": _int, "float": _float, "bool": _bool}

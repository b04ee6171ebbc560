"""FSDP options as transformers, accelerate and ms-swift write them, in megaswift's terms, before names are looked up.

Owns sharding strategies under their other names, files given to `--fsdp`, and switches that are words of `--fsdp` here.
Keys of a file are `engine/options/fsdp_file.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaswift.engine.options.engine import FSDP_STRATEGY_OF_SPELLING, NO_SHARD
from megaswift.engine.options.fsdp_file import ddp_options_of_no_shard
from megaswift.options.sources import GivenOptionValue
from megaswift.options.values import FALSE, TRUE

SHARDING = ("fsdp_sharding_strategy", "sharding_strategy")
# The value of `reshard_after_forward`, until it is known whether a strategy gives it too.
RESHARDED = "reshard true"
KEPT = "reshard false"
RESHARDS = ("fsdp_reshard_after_forward", "reshard_after_forward")
OFFLOADS = ("fsdp_offload_params", "offload_params")
FILES = (".json", ".yaml", ".yml")


def translated_fsdp_options(givens: Sequence[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """The options of one source; those that say how FSDP shards become one `fsdp`.

    A section `fsdp` is what a file of `fsdp_config` contains.
    """
    givens = [_section_as_file(given) for given in givens]
    said = [given for given in givens if given.name in ("fsdp", *SHARDING, *RESHARDS, *OFFLOADS)]
    words = list(dict.fromkeys(word for given in said for word in _words(given)))
    if any(word in words for word in ("full_shard", "hybrid_shard")):
        words = [word for word in words if word != RESHARDED]
    if any(word in words for word in ("shard_grad_op", "hybrid_shard_zero2")):
        words = [word for word in words if word != KEPT]
    words = [{RESHARDED: "full_shard", KEPT: "shard_grad_op"}.get(word, word) for word in words]
    files = [given.value for given in givens if given.name == "fsdp_config"] + [w for w in words if _names_file(w)]
    is_ddp = NO_SHARD in words or any(_ddp_options(file) is not None for file in files)
    for given in givens:
        if given.name == "fsdp_config":
            yield from _of_file(given)
        elif given not in said:
            if not (given.name == "use_fsdp" and is_ddp):
                yield given
        elif given is said[0]:
            yield from _as_one(given, words)


def _section_as_file(given: GivenOptionValue) -> GivenOptionValue:
    if given.name != "fsdp" or not isinstance(given.value, Mapping):
        return given
    return replace(given, name="fsdp_config", value=json.dumps(given.value))


def _as_one(given: GivenOptionValue, words: list[str]) -> Iterator[GivenOptionValue]:
    file = next(filter(_names_file, words), None)
    if file is not None:
        yield from _of_file(replace(given, name="fsdp_config", value=file))
        words = [word for word in words if word != file]
    if NO_SHARD in words:
        yield replace(given, name="engine", value="ddp")
        if others := [word for word in words if word not in (NO_SHARD, "fsdp2", "auto_wrap")]:
            yield replace(given, name="fsdp", value=others)
    elif words == ["fsdp2"]:
        yield replace(given, name="use_fsdp", value=True)
    elif words := [word for word in words if word != "fsdp2"]:
        yield replace(given, name="fsdp", value=words)


def _names_file(word: str) -> bool:
    return word.lower().endswith(FILES) or word.lstrip().startswith("{")


def _ddp_options(settings: Any) -> dict[str, Any] | None:
    """Returns the options of a file, its JSON or an object without sharding; None for any other."""
    text = json.dumps(settings) if isinstance(settings, dict) else settings
    return ddp_options_of_no_shard(text) if isinstance(text, str) else None


def _of_file(given: GivenOptionValue) -> Iterator[GivenOptionValue]:
    """`fsdp_config`, an object as JSON; a file without sharding is DDP."""
    options = _ddp_options(given.value)
    if options is None:
        yield replace(given, value=json.dumps(given.value) if isinstance(given.value, dict) else given.value)
    else:
        for name, value in options.items():
            key = {"fsdp": ": offload_params", "fsdp_transformer_layer_cls_to_wrap": f": {name}"}.get(name, "")
            label = f"{given.label}{key}"
            yield replace(given, name=name, value=value, label=label)


def _words(given: GivenOptionValue) -> list[str]:
    """What an option says in words of `--fsdp`."""
    values = given.value if isinstance(given.value, list | tuple) else [given.value]
    text = " ".join(str(value) for value in values)
    if given.name == "fsdp":
        inline = text.lstrip().startswith("{")
        named = [text] if inline else text.replace(",", " ").split()
        if text.lower() in TRUE:
            return ["full_shard"]
        return [] if text.lower() in FALSE else [_word(w) for w in named]
    if given.name in SHARDING:
        return [_word(text)]
    flag = _is_true(given.value)
    if given.name in RESHARDS:
        if not flag and text.strip().lower() not in FALSE:  # FSDP1's name of a strategy
            return [_word(text)]
        return [RESHARDED if flag else KEPT]
    return ["offload"] if flag else []


def _word(text: str) -> str:
    low = text.strip().lower()
    return text.strip() if low.endswith(FILES) or low.startswith("{") else FSDP_STRATEGY_OF_SPELLING.get(low, low)


def _is_true(value: Any) -> bool:
    return value is None or str(value).strip().lower() in TRUE

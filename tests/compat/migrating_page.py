"""The tables of docs/migrating.md as the code has them. `python -m tests.compat.migrating_page` writes them."""

from __future__ import annotations

import re

from megaswift.compat.defaults import (
    LLAMA_FACTORY,
    MEGATRON_LM,
    MEGATRON_SWIFT,
    PAGE,
    SWIFT,
    TRANSFORMERS,
    TRL,
    differing_default_table_rows,
)
from megaswift.compat.names.answers import NAMES_ELSEWHERE, VALUES_ELSEWHERE
from megaswift.compat.names.inference import VALUES_ELSEWHERE_OF_INFERENCE
from tests.sources import ROOT

TOOLKITS = (SWIFT, MEGATRON_SWIFT, TRL, TRANSFORMERS, MEGATRON_LM, LLAMA_FACTORY)
DEFAULTS = ("option", "there", "here", "where")
NOT_HERE = (
    "device_map",
    "max_prompt_length",
    "num_mini_batches",
    "total_episodes",
    "train_batch_size",
    "packing_length",
    "reward_model_plugin",
    "reward_adapters",
    "ref_adapters",
    "mcore_model",
    "vllm_server_group_port",
    "optimizer: lomo",
    "optimizer: apollo",
    "optimizer: schedule_free_adamw",
    "train_type: longlora",
    "train_type: llamapro",
    "train_type: lisa",
    "train_type: reft",
    "train_type: prompt_tuning",
    "task_type: decision",
    "infer_backend: lmdeploy",
    "quant_method: awq",
)
"""Names and values of other toolkits whose users have to decide something; the program answers all others too."""


def rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> dict[str, str]:
    """Each table by the name in its marks."""
    values = {**VALUES_ELSEWHERE, **VALUES_ELSEWHERE_OF_INFERENCE}
    answers = {**NAMES_ELSEWHERE, **{f"{option}: {value}": text for (option, value), text in values.items()}}
    found = {toolkit: rows(DEFAULTS, differing_default_table_rows(toolkit)) for toolkit in TOOLKITS}
    not_here = [(f"`{name}`", answers[name]) for name in NOT_HERE]
    return found | {"not here": rows(("name or value there", "here"), not_here)}


def written(text: str) -> str:
    """The page with its tables as the code has them."""
    for name, body in tables().items():
        mark = re.escape(f"<!-- {name} -->")
        text, count = re.subn(
            rf"({mark}\n).*?(\n<!-- end -->)", lambda m, t=body: m[1] + t + m[2], text, flags=re.DOTALL
        )
        assert count == 1, f"the page has no place for {name}"
    return text


if __name__ == "__main__":
    path = ROOT / PAGE
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")

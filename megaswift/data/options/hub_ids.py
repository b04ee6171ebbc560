"""Data sets by their ids on Hugging Face and ModelScope: which hub an entry of `--dataset` is from, and the id that a
usual data set has on the other one. No network.

Owns the prefixes `HF::` and `MS::`, the table of ids that differ between the hubs, and the variables that choose one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megaswift.options.sources import ConfigSource, GivenOptionValue
from megaswift.options.values import FALSE, TRUE

HUGGING_FACE = "HF"
MODELSCOPE = "MS"
_PREFIX = re.compile(r"(HF|MS)::(.+)", re.IGNORECASE | re.DOTALL)
_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)([:#].*)?")
_FILE = re.compile(r".*\.(jsonl|ndjson|json|csv|tsv|parquet|txt|text|md)", re.IGNORECASE)

SAME_DATASETS = (
    ("AI-ModelScope/alpaca-gpt4-data-zh", "llm-wizard/alpaca-gpt4-data-zh"),
    ("AI-ModelScope/alpaca-gpt4-data-en", "vicgalle/alpaca-gpt4"),
    ("AI-ModelScope/alpaca-cleaned", "yahma/alpaca-cleaned"),
    ("swift/self-cognition", "modelscope/self-cognition"),
    ("wyj123456/code_alpaca_en", "sahil2801/CodeAlpaca-20k"),
    ("AI-ModelScope/CodeAlpaca-20k", "HuggingFaceH4/CodeAlpaca_20K"),
    ("wyj123456/finance_en", "ssbuild/alpaca_finance_en"),
    ("AI-ModelScope/OpenO1-SFT", "O1-OPEN/OpenO1-SFT"),
    ("AI-ModelScope/texttosqlv2_25000_v2", "Clinton/texttosqlv2_25000_v2"),
    ("AI-ModelScope/school_math_0.25M", "BelleGroup/school_math_0.25M"),
    ("AI-ModelScope/generated_chat_0.4M", "BelleGroup/generated_chat_0.4M"),
    ("AI-ModelScope/train_0.5M_CN", "BelleGroup/train_0.5M_CN"),
    ("AI-ModelScope/train_1M_CN", "BelleGroup/train_1M_CN"),
    ("AI-ModelScope/train_2M_CN", "BelleGroup/train_2M_CN"),
    ("swift/train_3.5M_CN", "BelleGroup/train_3.5M_CN"),
    ("AI-ModelScope/OpenOrca-Chinese", "yys/OpenOrca-Chinese"),
    ("swift/SlimOrca", "Open-Orca/SlimOrca"),
    ("AI-ModelScope/Open-Platypus", "garage-bAInd/Open-Platypus"),
    ("AI-ModelScope/MathInstruct", "TIGER-Lab/MathInstruct"),
    ("AI-ModelScope/tulu-v2-sft-mixture", "allenai/tulu-v2-sft-mixture"),
    ("AI-ModelScope/WizardLM_evol_instruct_V2_196k", "WizardLM/WizardLM_evol_instruct_V2_196k"),
    ("AI-ModelScope/guanaco_belle_merge_v1.0", "Chinese-Vicuna/guanaco_belle_merge_v1.0"),
    ("AI-ModelScope/DISC-Law-SFT", "ShengbinYue/DISC-Law-SFT"),
    ("AI-ModelScope/lawyer_llama_data", "Skepsun/lawyer_llama_data"),
    ("AI-ModelScope/webnovel_cn", "zxbsmk/webnovel_cn"),
    ("AI-ModelScope/SFT-Nectar", "AstraMindAI/SFT-Nectar"),
    ("AI-ModelScope/Duet-v0.5", "G-reen/Duet-v0.5"),
    ("swift/ultrachat_200k", "HuggingFaceH4/ultrachat_200k"),
    ("swift/no_robots", "HuggingFaceH4/no_robots"),
    ("swift/OpenHermes-2.5", "teknium/OpenHermes-2.5"),
    ("swift/tagengo-gpt4", "lightblue/tagengo-gpt4"),
    ("swift/Infinity-Instruct", "BAAI/Infinity-Instruct"),
    ("swift/WebInstructSub", "TIGER-Lab/WebInstructSub"),
    ("swift/aya_collection", "CohereForAI/aya_collection"),
    ("swift/orca_dpo_pairs", "Intel/orca_dpo_pairs"),
    ("AI-ModelScope/zhihu_rlhf_3k", "liyucheng/zhihu_rlhf_3k"),
    ("swift/cosmopedia-100k", "HuggingFaceTB/cosmopedia-100k"),
    ("swift/chinese-c4", "shjwudp/chinese-c4"),
    ("swift/dolma", "allenai/dolma"),
    ("AI-ModelScope/wikipedia-cn-20230720-filtered", "pleisto/wikipedia-cn-20230720-filtered"),
    ("AI-ModelScope/SkyPile-150B", "Skywork/SkyPile-150B"),
    ("AI-ModelScope/pile", "EleutherAI/pile"),
    ("AI-ModelScope/the-stack", "bigcode/the-stack"),
    ("AI-ModelScope/starcoderdata", "bigcode/starcoderdata"),
    ("swift/RedPajama-Data-1T", "togethercomputer/RedPajama-Data-1T"),
    ("swift/RedPajama-Data-V2", "togethercomputer/RedPajama-Data-V2"),
    ("swift/github-code", "codeparrot/github-code"),
    ("swift/ChartQA", "HuggingFaceM4/ChartQA"),
    ("swift/VQAv2", "HuggingFaceM4/VQAv2"),
    ("swift/path-vqa", "flaviagiammarino/path-vqa"),
)
"""(id on ModelScope, id on Hugging Face) of the same data set. Ids that are equal on both hubs need no row."""
_TO_HUGGING_FACE = dict(SAME_DATASETS)
_TO_MODELSCOPE = {there: here for here, there in SAME_DATASETS}


def split_hub_prefix(entry: str) -> tuple[str | None, str]:
    """(`HF`, `MS` or None, the rest) of `MS::owner/name:subset#500`."""
    match = _PREFIX.fullmatch(entry)
    return (match[1].upper(), match[2]) if match else (None, entry)


def id_on_hub(name: str, hub: str) -> str:
    """The id of this data set on a hub: another one where the table has it, else the same."""
    return (_TO_HUGGING_FACE if hub == HUGGING_FACE else _TO_MODELSCOPE).get(name, name)


def names_hub_dataset(entry: str) -> bool:
    """Whether an entry of `--dataset` is an id of a hub: it has a prefix, or is `owner/name` without such a path."""
    hub, name = split_hub_prefix(entry)
    match = _ID.fullmatch(name)
    return hub is not None or bool(match and not _FILE.fullmatch(match[1]) and not _exists(name, match[1]))


def _exists(*paths: str) -> bool:
    return any(Path(path).exists() for path in paths)


def dataset_hubs(values: Mapping[str, Any], wrong: Collection[str]) -> dict[str, Any]:
    """Values of options, `dataset` and `val_dataset` with the hub that `use_hf` chooses."""
    use_hf = values.get("use_hf", True) is not False
    given = [name for name in ("dataset", "val_dataset") if values.get(name) and name not in wrong]
    return {**values, **{name: with_hub_of_ids(values[name], use_hf) for name in given}}


def with_hub_of_ids(entries: Iterable[str], use_hf: bool) -> tuple[str, ...]:
    """The entries, ids with the prefix of ModelScope where it is the hub of ids that have none."""
    return tuple(
        f"{MODELSCOPE}::{entry}"
        if not use_hf and split_hub_prefix(entry)[0] is None and names_hub_dataset(entry)
        else entry
        for entry in entries
    )


def hub_source_from_environment(environ: Mapping[str, str]) -> ConfigSource:
    """`use_hf` from USE_HF, as ms-swift reads it, or from LLaMA-Factory's USE_MODELSCOPE_HUB."""
    for name, means_hf in (("USE_HF", TRUE), ("USE_MODELSCOPE_HUB", FALSE)):
        text = environ.get(name, "").strip().lower()
        if text in (*TRUE, *FALSE):
            label = f"{name}={environ[name]} (environment)"
            return ConfigSource(
                (GivenOptionValue("use_hf", text in means_hf, label, f"{name} (environment)"),), ambient=True
            )
    return ConfigSource()

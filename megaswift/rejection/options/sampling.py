"""Options of `megaswift sample`. Names are those of transformers and of training; ms-swift's are spellings of them."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.inference.options.backends import BackendOptions
from megaswift.inference.options.commands import ChatTemplateOptions, ModelLoadingOptions, PlacementOptions
from megaswift.options.option import LARGEST_SEED, but_not, is_set, option
from megaswift.rewards.options import RewardConfig


@dataclass(frozen=True)
class SampleDataOptions:
    """Prompts and result"""

    dataset: tuple[str, ...] = option(
        (),
        "Files, folders or hub IDs of prompts, in training's formats; FILE#N: first N rows",
        aliases=("val_dataset",),
        metavar="FILE...",
        common=("sample",),
    )
    columns: dict[str, str] = option(
        {}, "Column renaming: answer=solution, or JSON", metavar="FROM=TO...", example="answer=solution"
    )
    result_path: str | None = option(
        None,
        "JSONL file to write; default: sample_output/MODEL/DATASET.jsonl",
        aliases=("output_file",),
        metavar="FILE",
        common=("sample",),
    )


@dataclass(frozen=True)
class SampledCompletionOptions:
    """Completions"""

    num_return_sequences: int = option(
        8,
        "Completions of each prompt",
        aliases=("num_generations", "num_samples"),
        minimum=1,
        unit="completions",
        common=("sample",),
    )
    max_new_tokens: int = option(
        512,
        "Maximum number of generated tokens",
        aliases=("max_tokens", "max_completion_length"),
        minimum=1,
        unit="tokens",
        common=("sample",),
    )
    temperature: float = option(1.0, "Sampling temperature", minimum=0, common=("sample",))
    top_p: float | None = option(
        None,
        "Nucleus sampling: cumulative probability of candidate tokens; default: 1",
        above=0,
        maximum=1,
        metavar="P",
        only_with={"temperature": but_not(0)},
        common=("sample",),
    )
    top_k: int | None = option(
        None,
        "Number of highest-probability candidate tokens; default: 0, all",
        minimum=0,
        metavar="K",
        only_with={"temperature": but_not(0)},
    )
    repetition_penalty: float | None = option(
        None,
        "Repetition penalty; above 1: repeated tokens become less likely",
        minimum=0.01,
        maximum=100,
        metavar="X",
    )
    stop: tuple[str, ...] = option(
        (),
        "Stop strings; not included in the output",
        aliases=("stop_strings", "stop_words"),
        metavar="TEXT...",
    )
    seed: int = option(42, "Sampling seed", minimum=0, maximum=LARGEST_SEED, common=("sample",))
    batch_size: int = option(
        16,
        "Completions that are generated together",
        aliases=("num_sampling_batch_size", "per_device_eval_batch_size", "max_batch_size"),
        minimum=1,
        unit="completions",
        common=("sample",),
    )


@dataclass(frozen=True)
class SelectionOptions:
    """Selection"""

    output_format: str = option(
        "messages",
        "messages: rows for sft, one per kept completion; preference: rows for dpo, the best and the worst of a prompt",
        choices=("messages", "preference"),
        common=("sample",),
    )
    num_best: int | None = option(
        None,
        "Completions kept of each prompt, those with the largest rewards; default: 1, all without rewards",
        aliases=("n_best_to_keep",),
        minimum=1,
        unit="completions",
        only_with={"output_format": "messages"},
        common=("sample",),
    )
    reward_threshold: float | None = option(
        None,
        "Smallest reward of a kept or chosen completion",
        aliases=("prm_threshold",),
        metavar="REWARD",
        only_with={"scored": True},
        common=("sample",),
    )
    pass_threshold: float = option(
        1.0,
        "Smallest reward with which a completion passes, for pass@k",
        only_with={"scored": True},
        common=("sample",),
    )
    easy_query_threshold: float | None = option(
        None,
        "Leave out prompts of which a larger share of completions passes",
        minimum=0,
        maximum=1,
        metavar="SHARE",
        only_with={"scored": True},
        common=("sample",),
    )
    min_margin: float = option(
        0.0,
        "Pairs: rewards of best and worst differ by more than this",
        minimum=0,
        only_with={"output_format": "preference"},
        common=("sample",),
    )
    keep_truncated: bool = option(False, "Also keep completions that were cut off at max_new_tokens")


@dataclass(frozen=True)
class SampleRewardOptions(RewardConfig):
    """Rewards"""

    reward_funcs: tuple[str, ...] = option(
        (),
        "Reward functions: accuracy, format, ... (docs/rewards.md), or FILE.py:function",
        aliases=("reward_functions",),
        metavar="NAME...",
        common=("sample",),
    )
    reward_model: tuple[str, ...] = option((), "Reward model folders", metavar="DIR...", common=("sample",))
    external_plugins: tuple[str, ...] = option(
        (), "Python files that register reward functions", metavar="FILE.py...", aliases=("custom_register_path",)
    )


@dataclass(frozen=True)
class SampleServerOptions:
    """A server in place of a model in this process"""

    base_url: str | None = option(
        None,
        "Address of a server with OpenAI's API that answers; --model is then the folder of a tokenizer",
        metavar="URL",
        common=("sample",),
    )
    served_model_name: str | None = option(
        None,
        "Name of the model on the server; default: the first that it lists",
        metavar="NAME",
        only_with={"base_url": is_set()},
    )
    api_key: str | None = option(
        None,
        "Token of the server; safer: the environment variable MEGASWIFT_API_KEY",
        metavar="TOKEN",
        only_with={"base_url": is_set()},
        secret=True,
    )


@dataclass(frozen=True)
class SampleConfig:
    """One `megaswift sample`, checked."""

    data: SampleDataOptions
    weights: ModelLoadingOptions
    completions: SampledCompletionOptions
    rewards: SampleRewardOptions
    selection: SelectionOptions
    conversation: ChatTemplateOptions
    remote: SampleServerOptions
    backend: BackendOptions
    placement: PlacementOptions

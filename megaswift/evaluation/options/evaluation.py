"""Options of `megaswift eval`. Names are those of lm-evaluation-harness; ms-swift's are spellings of them."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from megaswift.options.option import LARGEST_SEED, is_set, option

SERVER = "server"
"""The backend behind `--base_url`."""


@dataclass(frozen=True)
class EvaluationTaskOptions:
    """Tasks"""

    tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-evaluation-harness by name, task files (.yaml), or files of questions (.jsonl, .csv, .parquet)",
        aliases=("task", "eval_dataset", "dataset"),
        metavar="NAME|FILE...",
        common=("eval",),
    )
    include_path: tuple[str, ...] = option(
        (), "Folders with further task files of lm-evaluation-harness", metavar="DIR...", common=("eval",)
    )
    num_fewshot: int | None = option(
        None, "Examples before each question; default: the task's", minimum=0, unit="examples", common=("eval",)
    )
    limit: float | None = option(
        None,
        "First N questions of each task; below 1: fraction of them",
        aliases=("eval_limit",),
        above=0,
        metavar="N",
        common=("eval",),
    )
    batch_size: int = option(
        8,
        "Questions of a batch",
        aliases=("eval_batch_size", "per_device_eval_batch_size"),
        minimum=1,
        unit="questions",
        common=("eval",),
    )
    seed: int = option(
        1234, "Seed of examples, sampled answers and intervals", minimum=0, maximum=LARGEST_SEED, common=("eval",)
    )
    confirm_run_unsafe_code: bool = option(False, "Run tasks that execute code written by the model")


@dataclass(frozen=True)
class EvaluationPromptOptions:
    """Prompts and answers"""

    apply_chat_template: bool | None = option(
        None,
        "Put questions into the chat template; default: no for tasks of lm-evaluation-harness, for files of "
        "questions yes if the tokenizer has one",
        aliases=("use_chat_template",),
        common=("eval",),
    )
    chat_template: str | None = option(
        None,
        "Jinja file or text, or a name (qwen3), in place of the tokenizer's template",
        aliases=("template", "template_type"),
        metavar="FILE",
        free_text=True,
    )
    fewshot_as_multiturn: bool = option(True, "With the chat template: examples as turns of the conversation")
    system: str | None = option(
        None,
        "System message: text or a file",
        aliases=("system_instruction",),
        metavar="TEXT|FILE",
        free_text=True,
        common=("eval",),
    )
    enable_thinking: bool | None = option(
        None,
        "Variable enable_thinking of the chat template; default: the template's own",
        only_with={"infer_backend": "transformers"},
    )
    think_end_token: str | None = option(
        None,
        "Text that ends the model's reasoning; an answer is what follows it",
        metavar="TEXT",
        free_text=True,
        common=("eval",),
    )
    max_length: int | None = option(
        None,
        "Maximum number of tokens of question and answer; default: the model's context",
        aliases=("max_model_len",),
        minimum=1,
        unit="tokens",
    )
    max_new_tokens: int | None = option(
        None,
        "Maximum number of generated tokens; default: the task's, 256 for files of questions",
        aliases=("max_gen_toks", "max_tokens"),
        minimum=1,
        unit="tokens",
        common=("eval",),
    )
    temperature: float | None = option(
        None,
        "Sampling temperature; default: the task's, greedy decoding for files of questions",
        minimum=0,
        metavar="T",
        common=("eval",),
    )
    gen_kwargs: dict[str, str] = option(
        {},
        "Further arguments of generation, over the task's: top_p=0.9 until=END, or JSON",
        aliases=("eval_generation_config", "generation_kwargs"),
        metavar="NAME=VALUE...",
        example="top_p=0.9",
    )


@dataclass(frozen=True)
class EvaluationBackendOptions:
    """Where the model runs

    In this process, or behind a server with OpenAI's API, such as megaswift deploy."""

    infer_backend: str = option(
        "transformers",
        "transformers: in this process; server: behind --base_url",
        choices=("transformers", SERVER),
        spellings={"pt": "transformers"},
        common=("eval",),
    )
    base_url: str | None = option(
        None,
        "Address of a server: http://127.0.0.1:8000/v1; --model is then the folder of its tokenizer",
        aliases=("eval_url", "api_url"),
        metavar="URL",
        common=("eval",),
    )
    served_model_name: str | None = option(
        None,
        "Name of the model on the server; default: the first that it lists",
        aliases=("eval_model",),
        metavar="NAME",
        only_with={"base_url": is_set()},
        common=("eval",),
    )
    api_key: str | None = option(
        None,
        "Token of the server; safer: the environment variable MEGASWIFT_API_KEY",
        metavar="TOKEN",
        only_with={"base_url": is_set()},
        secret=True,
    )
    num_concurrent: int = option(
        4,
        "Requests that the server gets at a time",
        minimum=1,
        unit="requests",
        only_with={"base_url": is_set()},
        common=("eval",),
    )


@dataclass(frozen=True)
class EvaluationOutputOptions:
    """Results"""

    output_dir: str | None = option(
        None,
        "Folder of results.json, results.html and samples; default: eval_output/MODEL",
        aliases=("eval_output_dir", "output_path"),
        metavar="DIR",
        common=("eval",),
    )
    log_samples: bool = option(True, "Write the prompt, answer and score of each question to samples_TASK.jsonl")
    baseline: str | None = option(
        None,
        "Results of another model, a results.json or its folder; differences are tested question by question",
        aliases=("compare",),
        metavar="DIR",
        common=("eval",),
    )
    bootstrap_iters: int = option(
        1000, "Resamplings of the questions for intervals", minimum=100, maximum=100000, unit="resamplings"
    )


@dataclass(frozen=True)
class EvaluationCommandConfig:
    """One `megaswift eval`, checked."""

    task: EvaluationTaskOptions
    weights: ModelLoadingOptions
    prompt: EvaluationPromptOptions
    backend: EvaluationBackendOptions
    output: EvaluationOutputOptions
    placement: PlacementOptions

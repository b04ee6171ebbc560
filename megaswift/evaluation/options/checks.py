"""Rules between the options of `megaswift eval`, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megaswift.errors import Problem
from megaswift.evaluation.options.evaluation import (
    SERVER,
    EvaluationBackendOptions,
    EvaluationOutputOptions,
    EvaluationPromptOptions,
    EvaluationTaskOptions,
)
from megaswift.inference.options.checks import (
    TOKEN_VARIABLE,
    model_option_problems,
    placement_problems,
    unused_option_problems,
)
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.inference.options.parser import ParsedCommand
from megaswift.inference.options.run_files import complete_model_options, short_folder_name
from megaswift.inference.options.variants import ignored_option_problems

RESULTS = "results.json"
OF_WEIGHTS = (
    "torch_dtype",
    "adapters",
    "rope_scaling",
    "new_special_tokens",
    "quantization_bit",
    "max_length",
)
"""Options of a model in this process that have no condition of their own."""


def server_token(options: EvaluationBackendOptions) -> str | None:
    """Return the token that the server gets; the flag before the environment."""
    return options.api_key or os.environ.get(TOKEN_VARIABLE) or os.environ.get("OPENAI_API_KEY") or None


def complete_eval_options(parsed: ParsedCommand) -> ParsedCommand:
    """Fill in the base model of adapters, the backend of `--base_url`, and the folder of the results."""
    parsed = complete_model_options(parsed, "one process evaluates; --device_map auto uses all GPUs")
    backend: EvaluationBackendOptions = parsed.sections["backend"]
    if backend.base_url is not None and not parsed.given("infer_backend"):
        backend = replace(backend, infer_backend=SERVER)
    output: EvaluationOutputOptions = parsed.sections["output"]
    if output.output_dir is None:
        output = replace(output, output_dir=_new_folder(parsed.sections["weights"], backend))
    return replace(parsed, sections={**parsed.sections, "backend": backend, "output": output})


def _new_folder(weights: ModelLoadingOptions, backend: EvaluationBackendOptions) -> str:
    owner = next(iter(weights.adapter_folders), weights.model or backend.served_model_name or "server")
    name = short_folder_name(owner)
    number = 1
    while (path := Path("eval_output", f"{name}{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return str(path)


def eval_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """Yield what is wrong with the options of `megaswift eval`."""
    yield from ignored_option_problems(parsed)
    task: EvaluationTaskOptions = parsed.sections["task"]
    backend: EvaluationBackendOptions = parsed.sections["backend"]
    prompt: EvaluationPromptOptions = parsed.sections["prompt"]
    yield from placement_problems(parsed)
    if not task.tasks:
        yield Problem("--tasks", "is missing", "--tasks arc_easy, a task file (.yaml) or a file of questions (.jsonl)")
    if task.limit is not None and task.limit > 1 and task.limit != int(task.limit):
        yield Problem(f"--limit {task.limit:g}", "is no number of questions", "a whole number, or one below 1")
    if prompt.enable_thinking and prompt.think_end_token is None:
        rule = "needs the text that ends the reasoning, which is no part of an answer"
        yield Problem("--enable_thinking true", rule, "--think_end_token '</think>'")
    yield from _backend(parsed, backend)
    yield from _output(parsed.sections["output"], parsed)


def _backend(parsed: ParsedCommand, backend: EvaluationBackendOptions) -> Iterator[Problem]:
    if backend.infer_backend == SERVER and backend.base_url is None:
        yield Problem("--infer_backend server", "has no address", "--base_url http://127.0.0.1:8000/v1")
    if backend.infer_backend != SERVER and backend.base_url is not None:
        fix = "leave --infer_backend out"
        yield Problem("--base_url", "names a server, and --infer_backend transformers loads the model here", fix)
    if backend.infer_backend != SERVER:
        yield from model_option_problems(parsed.sections["weights"])
        return
    if backend.base_url is not None and not backend.base_url.startswith(("http://", "https://")):
        yield Problem(f"--base_url {backend.base_url}", "is no address", "--base_url http://127.0.0.1:8000/v1")
    fix = "give it to the server, or leave it out"
    yield from unused_option_problems(parsed, OF_WEIGHTS, "would be ignored: the server has loaded the model", fix)
    prompt: EvaluationPromptOptions = parsed.sections["prompt"]
    if parsed.sections["weights"].model is None and prompt.apply_chat_template is False:
        fix = "--model DIR, the folder of its tokenizer"
        yield Problem("--apply_chat_template false", "needs the model's tokenizer for prompts without a template", fix)


def _output(output: EvaluationOutputOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    folder = Path(str(output.output_dir))
    if folder.is_file():
        yield Problem(f"--output_dir {folder}", "is a file", "give a folder")
    elif (folder / RESULTS).exists():
        yield Problem(f"--output_dir {folder}", f"has a {RESULTS} already; nothing is overwritten", "use another name")

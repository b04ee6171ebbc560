"""Rules between the options of `megaswift sample`, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megaswift.errors import Problem, missing_path_hint
from megaswift.inference.options.backends import BackendOptions
from megaswift.inference.options.checks import (
    TOKEN_VARIABLE,
    model_option_problems,
    placement_problems,
    unused_option_problems,
)
from megaswift.inference.options.commands import COLD
from megaswift.inference.options.parser import ParsedCommand
from megaswift.inference.options.run_files import complete_model_options, short_folder_name
from megaswift.inference.options.variants import ignored_option_problems
from megaswift.options.files import DATA_SUFFIXES
from megaswift.rejection.options.sampling import (
    SampleDataOptions,
    SampledCompletionOptions,
    SampleRewardOptions,
    SampleServerOptions,
    SelectionOptions,
)

PREFERENCE = "preference"
PARTIAL = ".partial"
OF_MODEL = (
    "torch_dtype",
    "attn_impl",
    "adapters",
    "rope_scaling",
    "new_special_tokens",
    "quantization_bit",
    "device_map",
    "infer_backend",
)
"""Options of a model in this process."""


def partial_file(result: str) -> Path:
    """Return the journal of a run that is not complete."""
    path = Path(result)
    return path.with_name(path.name + PARTIAL)


def sample_server_token(options: SampleServerOptions) -> str | None:
    """Return the token that the server gets; the flag before the environment."""
    return options.api_key or os.environ.get(TOKEN_VARIABLE) or os.environ.get("OPENAI_API_KEY") or None


def complete_sample_options(parsed: ParsedCommand) -> ParsedCommand:
    """Fill in the base model of adapters and the file of the result."""
    parsed = complete_model_options(parsed, "one process samples; --device_map auto uses all GPUs")
    data: SampleDataOptions = parsed.sections["data"]
    if data.result_path is None and data.dataset:
        weights = parsed.sections["weights"]
        owner = next(iter(weights.adapter_folders), weights.model or "model")
        stem = Path(data.dataset[0].partition("#")[0]).stem
        data = replace(data, result_path=_free_path(Path("sample_output", short_folder_name(owner)), stem))
    return replace(parsed, sections={**parsed.sections, "data": data})


def _free_path(folder: Path, stem: str) -> str:
    """A file that does not exist yet; that of an interrupted run is the same again."""
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.jsonl").exists():
        number += 1
    return str(path)


def sample_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """Yield what is wrong with the options of `megaswift sample`."""
    yield from ignored_option_problems(parsed)
    yield from placement_problems(parsed)
    yield from model_option_problems(parsed.sections["weights"])
    yield from _data(parsed, parsed.sections["data"])
    yield from _completions(parsed.sections["completions"])
    yield from _rewards(parsed, parsed.sections["rewards"], parsed.sections["selection"])
    remote: SampleServerOptions = parsed.sections["remote"]
    if remote.base_url is not None:
        if not remote.base_url.startswith(("http://", "https://")):
            yield Problem(f"--base_url {remote.base_url}", "is no address", "--base_url http://127.0.0.1:8000/v1")
        fix = "give it to the server, or leave it out"
        yield from unused_option_problems(parsed, OF_MODEL, "would be ignored: the server has loaded the model", fix)
    backend: BackendOptions = parsed.sections["backend"]
    if backend.infer_backend == "vllm":
        names = ("vllm_data_parallel_size", "vllm_reasoning_parser")
        yield from unused_option_problems(parsed, names, "applies only to vLLM's server")


def _data(parsed: ParsedCommand, data: SampleDataOptions) -> Iterator[Problem]:
    if not data.dataset:
        yield Problem("--dataset", "is missing", "--dataset prompts.jsonl")
        return
    for name in data.dataset:
        path = Path(name.partition("#")[0]).expanduser()
        if not path.exists() and (path.suffix.lower() in (*DATA_SUFFIXES, ".json") or name[:1] in "./~"):
            yield Problem(f"--dataset {name}", "no such file", missing_path_hint(path))
    if data.result_path is None:
        return
    path = Path(data.result_path)
    label = f"--result_path {path}"
    if path.suffix != ".jsonl":
        yield Problem(label, "is no JSONL file", f"--result_path {path.with_suffix('.jsonl')}")
    elif path.is_dir():
        yield Problem(label, "is a folder", f"--result_path {path / 'samples.jsonl'}")
    elif path.exists() and not partial_file(str(path)).exists():
        yield Problem(label, "already exists", "use another name; nothing is overwritten")


def _completions(options: SampledCompletionOptions) -> Iterator[Problem]:
    if options.temperature == 0 and options.num_return_sequences > 1:
        fix = "--temperature 1, or --num_return_sequences 1"
        yield Problem("--temperature 0", "makes all completions of a prompt the same", fix)
    elif 0 < options.temperature < COLD:
        yield Problem(f"--temperature {options.temperature:g}", "is too close to 0: logits overflow", "--temperature 0")
    if any(not text for text in options.stop):
        yield Problem("--stop", "contains an empty string", '--stop "</s>"')


def _rewards(parsed: ParsedCommand, rewards: SampleRewardOptions, selection: SelectionOptions) -> Iterator[Problem]:
    count = len(rewards.reward_funcs) + len(rewards.reward_model)
    if rewards.reward_weights and len(rewards.reward_weights) != count:
        rule = f"are {len(rewards.reward_weights)} numbers for {count} rewards"
        yield Problem("--reward_weights", rule, "give a weight for each of reward_funcs and then of reward_model")
    if selection.output_format == PREFERENCE and not count:
        fix = "--reward_funcs accuracy, --reward_funcs FILE.py:function, or --reward_model DIR"
        yield Problem("--output_format preference", "needs rewards, which tell the best from the worst", fix)
    options: SampledCompletionOptions = parsed.sections["completions"]
    if selection.output_format == PREFERENCE and options.num_return_sequences < 2:
        rule = "leaves no second completion for a pair"
        yield Problem(f"--num_return_sequences {options.num_return_sequences}", rule, "--num_return_sequences 8")
    best = selection.num_best or 0
    if best > options.num_return_sequences:
        rule = f"is more than the {options.num_return_sequences} completions of a prompt"
        yield Problem(f"--num_best {best}", rule, f"--num_return_sequences {best}")

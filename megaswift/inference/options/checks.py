"""Rules for the options of `infer` and `deploy`; those of `export` are in `export.py`. No torch: errors of the
command line are reported immediately."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from megaswift.base.byte_size import byte_size_or_none
from megaswift.errors import Problem
from megaswift.inference.options.backends import (
    ENGINE_ARGUMENTS,
    OBJECTS,
    SET_BY_OPTIONS,
    BackendOptions,
)
from megaswift.inference.options.commands import (
    COLD,
    BitsandbytesOptions,
    GenerationOptions,
    ModelLoadingOptions,
    ModelPathOptions,
    PlacementOptions,
    PromptFileOptions,
    ServerOptions,
)
from megaswift.inference.options.launch import infer_launch_problems
from megaswift.inference.options.parser import ParsedCommand
from megaswift.inference.options.placement import parse_device_map, parse_max_memory
from megaswift.inference.options.run_files import ADAPTER_CONFIG, adapter_config
from megaswift.inference.options.variants import ignored_option_problems
from megaswift.options.files import DATA_SUFFIXES
from megaswift.options.option_json import json_object

TOKEN_VARIABLE = "MEGASWIFT_API_KEY"


def unused_option_problems(
    parsed: ParsedCommand, names: Iterable[str], why: str, fix: str = "leave it out"
) -> Iterator[Problem]:
    """A problem for each of these options that was given."""
    return (Problem(parsed.label(name), why, fix) for name in names if parsed.given(name))


def model_option_problems(
    options: ModelLoadingOptions | ModelPathOptions, other: str | None = None
) -> Iterator[Problem]:
    """`other`: a folder that stands for the model."""
    if options.model is None and other is None and not options.adapters:
        yield Problem(
            "--model",
            "is missing",
            "--model DIR: a Hugging Face folder, the output directory of a run, or a checkpoint",
        )
    for folder in options.adapter_folders:
        if not (Path(folder) / ADAPTER_CONFIG).is_file():
            rule = f"has no {ADAPTER_CONFIG}" if Path(folder).is_dir() else "no such folder"
            fix = "give a PEFT folder: OUT/adapter, OUT/checkpoints/step-N/adapter"
            yield Problem(f"--adapters {folder}", rule, fix)
        elif options.model is None and other is None:
            yield Problem("--model", f"is missing, and {folder} does not name its base model", "--model DIR")
    named = [name for name, _ in options.named_adapters]
    for name in sorted({name for name in named if name and named.count(name) > 1}):
        yield Problem(f"--adapters {name}=...", "is given twice", "--adapters FIRST=DIR SECOND=DIR")
    said = [(f, str(adapter_config(f).get("base_model_name_or_path") or "")) for f in options.adapter_folders]
    for (first, base), (folder, another) in pairwise(said):
        if base and another and base != another:
            rule = f"was trained on {another}, and {first} on {base}"
            yield Problem(f"--adapters {folder}", rule, "give adapters of one base model")


def quantization_bit_problems(options: BitsandbytesOptions) -> Iterator[Problem]:
    """Bits that bitsandbytes does not have."""
    bits = options.quantization_bit
    if bits not in (None, 4, 8):
        yield Problem(f"--quantization_bit {bits}", "must be 4 or 8", "--quantization_bit 4")


def placement_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """Devices, memory limits and bits that do not exist, or do not go together."""
    options: PlacementOptions = parsed.sections["placement"]
    weights: ModelLoadingOptions = parsed.sections["weights"]
    yield from quantization_bit_problems(options)
    if isinstance(placed := parse_device_map(options.device_map), Problem):
        yield placed
    if options.max_memory is not None and isinstance(limits := parse_max_memory(options.max_memory), Problem):
        yield limits
    if weights.adapters and weights.merge_adapters and options.quantization_bit is not None:
        yield Problem(
            "--merge_adapters",
            f"would round the adapters to {options.quantization_bit} bits",
            "leave it out: unmerged adapters keep their precision",
        )


def _generation(options: GenerationOptions) -> Iterator[Problem]:
    if options.temperature is not None and 0 < options.temperature < COLD:
        rule = f"is too close to 0: logits would overflow; the minimum is {COLD:g}, or 0 for greedy decoding"
        yield Problem(f"--temperature {options.temperature:g}", rule, "--temperature 0")
    if any(not text for text in options.stop):
        yield Problem("--stop", "contains an empty string", '--stop "</s>"')


def _beams(options: GenerationOptions, parsed: ParsedCommand, chat: bool) -> Iterator[Problem]:
    if (options.num_beams or 1) > 1:
        fix = "--num_beams 1"
        if chat:
            yield Problem(
                parsed.label("num_beams"),
                "cannot be used in interactive chat: beam search does not support streaming",
                fix,
            )
        yield from unused_option_problems(
            parsed, ("stop", "logprobs"), f"conflicts with {parsed.label('num_beams')}", fix
        )


def _file(options: PromptFileOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    if options.load_data_args and not options.dataset:
        yield Problem(
            "--load_data_args true",
            "finds no config.yaml of a run beside the model or the adapters",
            "--adapters OUT/adapter or --model OUT of a run, or --dataset FILE.jsonl",
        )
        return
    if not options.dataset:
        return
    for name in options.dataset:
        path = Path(name.partition("#")[0]).expanduser()
        if not path.exists() and (path.suffix.lower() in (*DATA_SUFFIXES, ".json") or name[:1] in "./~"):
            yield Problem(f"--dataset {name}", "no such file", "give a .jsonl, .json, .csv or .parquet file")
    if options.result_path is None or not parsed.given("result_path"):
        return
    path = Path(options.result_path)
    label = f"--result_path {options.result_path}"
    if not path.absolute().parent.is_dir():
        yield Problem(label, "the parent folder does not exist", f"mkdir -p {path.parent}")
    elif path.is_dir():
        yield Problem(label, "is a folder", f"--result_path {path / 'answers.jsonl'}")
    elif path.exists():
        same = any(Path(name).exists() and path.samefile(name) for name in options.dataset)
        yield Problem(
            label, "is the prompt file" if same else "already exists", "use another name; nothing is overwritten"
        )


def infer_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift infer`."""
    yield from ignored_option_problems(parsed)
    generation = parsed.sections["generation"]
    file = parsed.sections["file"]
    backend: BackendOptions = parsed.sections["backend"]
    yield from model_option_problems(parsed.sections["weights"])
    yield from placement_problems(parsed)
    yield from _generation(generation)
    yield from _beams(generation, parsed, not file.dataset)
    yield from _file(file, parsed)
    yield from _backend(backend, parsed)
    if backend.infer_backend == "vllm":
        names = ["vllm_data_parallel_size"]
        yield from unused_option_problems(
            parsed, names, "applies only to vLLM's server", "NPROC_PER_NODE=N divides the rows"
        )
        names = ["vllm_reasoning_parser"]
        yield from unused_option_problems(parsed, names, "applies only to vLLM's server: a result has the whole answer")
        if not file.dataset:
            fix = "megaswift deploy --infer_backend vllm, or --infer_backend transformers"
            yield Problem("--infer_backend vllm", "answers prompt files only", f"--dataset FILE.jsonl; to chat: {fix}")
    yield from infer_launch_problems(parsed, bool(file.dataset))


def _backend(backend: BackendOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    """Options of vLLM beside transformers."""
    kwargs = backend.engine_kwargs
    if kwargs is None:
        fix = '--vllm_engine_kwargs \'{"kv_cache_dtype": "fp8"}\''
        yield Problem(f"--vllm_engine_kwargs {backend.vllm_engine_kwargs}", "must be a JSON object", fix)
    owners = {**SET_BY_OPTIONS} | {arg: f"--{name}" for name, arg in ENGINE_ARGUMENTS.items() if parsed.given(name)}
    for name in owners.keys() & {text.replace("-", "_") for text in kwargs or {}}:
        yield Problem(f"--vllm_engine_kwargs {name}", f"is set by {owners[name]}", f"use {owners[name]} alone")
    for argument in sorted(OBJECTS):
        text = getattr(backend, f"vllm_{argument}")
        if text is not None and json_object(text) is None:
            yield Problem(
                f"--vllm_{argument} {text}", "must be a JSON object", f"--vllm_{argument} '{{\"NAME\": VALUE}}'"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def server_auth_token(options: ServerOptions) -> str | None:
    """The token that clients must send; the flag before the environment."""
    return options.api_key or os.environ.get(TOKEN_VARIABLE) or None


def deploy_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift deploy`."""
    yield from ignored_option_problems(parsed)
    # Model, placement and generation, as for inference; a few options apply to no server.
    server: ServerOptions = parsed.sections["server"]
    generation: GenerationOptions = parsed.sections["generation"]
    yield from model_option_problems(parsed.sections["weights"])
    yield from placement_problems(parsed)
    yield from _generation(generation)
    yield from unused_option_problems(
        parsed, ("num_beams", "seed"), "does not apply to a server: output is streamed, and the seed is set per request"
    )
    # Access and limits.
    if not is_loopback(server.host) and server_auth_token(server) is None:
        yield Problem(
            f"--host {server.host}",
            "an address reachable from other machines requires a token",
            f"{TOKEN_VARIABLE}=... megaswift deploy ..., or --host 127.0.0.1",
        )
    if server.max_body_size is not None and not byte_size_or_none(server.max_body_size):
        yield Problem(f"--max_body_size {server.max_body_size}", "is not a valid size", "--max_body_size 8MiB")
    # The backend, and adapters that requests select by name.
    backend: BackendOptions = parsed.sections["backend"]
    yield from _backend(backend, parsed)
    weights: ModelLoadingOptions = parsed.sections["weights"]
    names = [name for name, _ in weights.named_adapters]
    if any(names) and not all(names):
        yield Problem("--adapters", "mixes folders with and without a name", "--adapters FIRST=DIR SECOND=DIR")
    if any(names) and weights.merge_adapters:
        yield from unused_option_problems(
            parsed,
            ["merge_adapters"],
            "cannot merge adapters that requests select by name",
            "leave it out, or give one adapter without a name",
        )
    # vLLM has fewer ways to quantize.
    if backend.infer_backend == "vllm":
        if parsed.sections["placement"].quantization_bit == 8:
            yield Problem(
                "--quantization_bit 8", "is not supported by vLLM's in-flight quantization", "--quantization_bit 4"
            )
        if parsed.sections["placement"].quantization_bit is not None and backend.vllm_quantization is not None:
            rule = f"conflicts with {parsed.label('quantization_bit')}, which selects bitsandbytes"
            yield Problem(parsed.label("vllm_quantization"), rule, "give one of the two")

"""Rules for the options of `infer`, `deploy` and `export`. No torch: errors of the command line are reported
immediately."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from megaswift.config.byte_size import parse_byte_size
from megaswift.config.command_parser import ParsedCommand
from megaswift.config.device_placement import AUTOMATIC, DISK, parse_device_map, parse_max_memory
from megaswift.config.inference import (
    COLD,
    ExportOptions,
    GenerationOptions,
    ModelLoadingOptions,
    ModelPathOptions,
    PlacementOptions,
    PromptFileOptions,
    ServerOptions,
)
from megaswift.errors import Problem

ADAPTER_CONFIG = "adapter_config.json"
TOKEN_VARIABLE = "MEGASWIFT_API_KEY"
TRANSFORMERS_ONLY = (
    "attn_impl",
    "merge_adapters",
    "device_map",
    "max_memory",
    "offload_folder",
    "max_batch_size",
    "max_waiting",
    "max_body_size",
    "log_requests",
    "system",
    "stop",
)
"""Options of `deploy` that vLLM's own server has no word for."""


def _unused(parsed: ParsedCommand, names: Iterable[str], why: str, fix: str = "leave it out") -> Iterator[Problem]:
    return (Problem(parsed.label(name), why, fix) for name in names if parsed.given(name))


def _model(options: ModelLoadingOptions | ModelPathOptions) -> Iterator[Problem]:
    if options.model is None:
        yield Problem(
            "--model",
            "is missing",
            "--model DIR: a Hugging Face folder, the output directory of a run, or a checkpoint",
        )
    if options.adapters is not None and not (Path(options.adapters) / ADAPTER_CONFIG).is_file():
        rule = f"has no {ADAPTER_CONFIG}" if Path(options.adapters).is_dir() else "no such folder"
        yield Problem(
            f"--adapters {options.adapters}", rule, "give a PEFT folder: OUT/adapter, OUT/checkpoints/step-N/adapter"
        )


def _bits(bits: int | None) -> Iterator[Problem]:
    if bits not in (None, 4, 8):
        yield Problem(f"--quantization_bit {bits}", "must be 4 or 8", "--quantization_bit 4")


def _placement(parsed: ParsedCommand) -> Iterator[Problem]:
    options: PlacementOptions = parsed.sections["placement"]
    weights: ModelLoadingOptions = parsed.sections["weights"]
    yield from _bits(options.quantization_bit)
    placed = parse_device_map(options.device_map)
    if isinstance(placed, Problem):
        yield placed
    elif options.device_map not in AUTOMATIC:
        yield from _unused(
            parsed, ["max_memory"], f"would be ignored: {parsed.label('device_map')} already places all modules"
        )
        if DISK not in placed.values():  # type: ignore[union-attr]
            yield from _unused(
                parsed, ["offload_folder"], f"would be ignored: {parsed.label('device_map')} puts no module on disk"
            )
    if options.max_memory is not None and isinstance(limits := parse_max_memory(options.max_memory), Problem):
        yield limits
    if weights.adapters is None:
        yield from _unused(parsed, ["merge_adapters"] * weights.merge_adapters, "needs adapters", "--adapters DIR")
    elif weights.merge_adapters and options.quantization_bit is not None:
        yield Problem(
            "--merge_adapters",
            f"would round the adapters to {options.quantization_bit} bits",
            "leave it out: unmerged adapters keep their precision",
        )


def _generation(options: GenerationOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    if options.temperature == 0:
        yield from _unused(
            parsed,
            ("top_p", "top_k", "seed"),
            "would be ignored: --temperature 0 is greedy decoding",
            "--temperature 0.7",
        )
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
        yield from _unused(parsed, ("stop", "logprobs"), f"conflicts with {parsed.label('num_beams')}", fix)


def _file(options: PromptFileOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    if options.dataset is None:
        names = ("columns", "result_path", "per_device_eval_batch_size", "logprobs", "top_logprobs")
        yield from _unused(parsed, names, "applies only to a prompt file", "--dataset FILE.jsonl")
        return
    if not options.logprobs:
        yield from _unused(parsed, ["top_logprobs"], "needs --logprobs", "--logprobs true")
    if not Path(options.dataset).is_file():
        yield Problem(f"--dataset {options.dataset}", "no such file", "give a .jsonl, .json, .csv or .parquet file")
    if options.result_path is None:
        yield Problem("--result_path", "is missing", "--result_path answers.jsonl (the file to write)")
        return
    path, label = Path(options.result_path), f"--result_path {options.result_path}"
    if not path.absolute().parent.is_dir():
        yield Problem(label, "the parent folder does not exist", f"mkdir -p {path.parent}")
    elif path.is_dir():
        yield Problem(label, "is a folder", f"--result_path {path / 'answers.jsonl'}")
    elif path.exists():
        same = Path(options.dataset).exists() and path.samefile(options.dataset)
        yield Problem(
            label, "is the prompt file" if same else "already exists", "use another name; nothing is overwritten"
        )


def infer_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift infer`."""
    generation, file = parsed.sections["generation"], parsed.sections["file"]
    yield from _model(parsed.sections["weights"])
    yield from _placement(parsed)
    yield from _generation(generation, parsed)
    yield from _beams(generation, parsed, file.dataset is None)
    yield from _file(file, parsed)


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
    server: ServerOptions = parsed.sections["server"]
    generation: GenerationOptions = parsed.sections["generation"]
    yield from _model(parsed.sections["weights"])
    yield from _placement(parsed)
    yield from _generation(generation, parsed)
    yield from _unused(
        parsed, ("num_beams", "seed"), "does not apply to a server: output is streamed, and the seed is set per request"
    )
    if not is_loopback(server.host) and server_auth_token(server) is None:
        yield Problem(
            f"--host {server.host}",
            "an address reachable from other machines requires a token",
            f"{TOKEN_VARIABLE}=... megaswift deploy ..., or --host 127.0.0.1",
        )
    if server.max_body_size is not None and not parse_byte_size(server.max_body_size):
        yield Problem(f"--max_body_size {server.max_body_size}", "is not a valid size", "--max_body_size 8MiB")
    if server.infer_backend == "vllm":
        yield from _unused(parsed, TRANSFORMERS_ONLY, "would be ignored by vLLM")
        if parsed.sections["placement"].quantization_bit == 8:
            yield Problem(
                "--quantization_bit 8", "is not supported by vLLM's in-flight quantization", "--quantization_bit 4"
            )
    else:
        yield from _unused(
            parsed,
            ["tensor_parallel_size"],
            "applies only to --infer_backend vllm",
            "use --device_map auto, which splits the model over all GPUs",
        )


def _no_adapters(model: str | None) -> Problem:
    """--merge_lora without --adapters; the folder of a LoRA run is often given as the model."""
    for folder in (Path(model), Path(model) / "adapter") if model is not None else ():
        with suppress(OSError, ValueError, AttributeError):
            text = (folder / ADAPTER_CONFIG).read_text(encoding="utf-8")
            base = json.loads(text).get("base_model_name_or_path") or "BASE"
            rule = "contains LoRA adapters, not a model"
            return Problem(f"--model {model}", rule, f"--model {base} --adapters {folder} --merge_lora true")
    return Problem("--merge_lora true", "needs adapters", "--adapters DIR")


def export_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift export`."""
    source: ModelPathOptions = parsed.sections["source"]
    export: ExportOptions = parsed.sections["export"]
    yield from _model(source)
    yield from _bits(export.quantization_bit)
    if not export.merge_lora and export.quantization_bit is None:
        yield Problem(
            "megaswift export",
            "needs --merge_lora or --quantization_bit",
            "--merge_lora true --adapters DIR, or --quantization_bit 4",
        )
    if export.merge_lora and source.adapters is None:
        yield _no_adapters(source.model)
    if not export.merge_lora:
        yield from _unused(parsed, ["adapters"], "would be ignored", "--merge_lora true")
    if export.merge_lora and export.quantization_bit is None:
        yield from _unused(parsed, ["trust_remote_code"], "would be ignored: merging does not run model code")
    if parse_byte_size(export.max_shard_size) is None:
        yield Problem(f"--max_shard_size {export.max_shard_size}", "is not a valid size", "--max_shard_size 5GB")
    if export.output_dir is None:
        yield Problem("--output_dir", "is missing", "--output_dir DIR (the folder to write)")
    elif Path(export.output_dir).exists():
        yield Problem(f"--output_dir {export.output_dir}", "already exists", "use another name; nothing is overwritten")

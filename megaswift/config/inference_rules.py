"""Rules for the options of `infer`, `deploy` and `export`. No torch: errors of the command line are reported
immediately."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from megaswift.config.byte_size_text import byte_size_or_none
from megaswift.config.infer_deploy_export_parser import ParsedCommand
from megaswift.config.inference import (
    COLD,
    BitsandbytesOptions,
    ExportOptions,
    ExportUploadOptions,
    GenerationOptions,
    ModelLoadingOptions,
    ModelPathOptions,
    PlacementOptions,
    PromptFileOptions,
    ServerOptions,
)
from megaswift.config.inference_backend import (
    ENGINE_ARGUMENTS,
    OBJECTS,
    SET_BY_OPTIONS,
    BackendOptions,
    json_object,
)
from megaswift.config.inference_run_files import ADAPTER_CONFIG, adapter_config
from megaswift.config.option_sources import DATA_SUFFIXES
from megaswift.config.parse_device_map_options import AUTOMATIC, DISK, parse_device_map, parse_max_memory
from megaswift.errors import Problem

TOKEN_VARIABLE = "MEGASWIFT_API_KEY"
TRANSFORMERS_ONLY = (
    "attn_impl",
    "merge_adapters",
    "device_map",
    "max_memory",
    "offload_folder",
    "max_batch_size",
    "max_waiting",
    "enable_thinking",
    "new_special_tokens",
    "max_length",
    "max_body_size",
    "log_requests",
    "owned_by",
    "system",
    "stop",
)
"""Options of `deploy` that vLLM's own server has no word for."""
VLLM_LACKS = (
    "attn_impl",
    "merge_adapters",
    "device_map",
    "max_memory",
    "offload_folder",
    "quantization_bit",
    "num_beams",
    "per_device_eval_batch_size",
)
"""Options of `infer` that vLLM does not take."""


_SCALED = "set rope_scaling in the model's config.json, or --infer_backend transformers"


def _unused(parsed: ParsedCommand, names: Iterable[str], why: str, fix: str = "leave it out") -> Iterator[Problem]:
    return (Problem(parsed.label(name), why, fix) for name in names if parsed.given(name))


def _model(options: ModelLoadingOptions | ModelPathOptions, other: str | None = None) -> Iterator[Problem]:
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


def _bits(options: BitsandbytesOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    bits = options.quantization_bit
    if bits not in (None, 4, 8):
        yield Problem(f"--quantization_bit {bits}", "must be 4 or 8", "--quantization_bit 4")
    if bits is None:
        yield from _unused(parsed, ["quant_method"], "needs a number of bits", "--quantization_bit 4")
    if bits != 4:
        names = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        yield from _unused(parsed, names, "applies only to 4 bits", "--quantization_bit 4")


def _placement(parsed: ParsedCommand) -> Iterator[Problem]:
    options: PlacementOptions = parsed.sections["placement"]
    weights: ModelLoadingOptions = parsed.sections["weights"]
    yield from _bits(options, parsed)
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
    if not weights.adapters:
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
    if options.load_data_args and not options.dataset:
        yield Problem(
            "--load_data_args true",
            "finds no config.yaml of a run beside the model or the adapters",
            "--adapters OUT/adapter or --model OUT of a run, or --dataset FILE.jsonl",
        )
        return
    if not options.dataset:
        names = ("columns", "result_path", "logprobs", "top_logprobs")
        yield from _unused(parsed, names, "applies only to a prompt file", "--dataset FILE.jsonl")
        return
    if not options.logprobs:
        yield from _unused(parsed, ["top_logprobs"], "needs --logprobs", "--logprobs true")
    for name in options.dataset:
        path = Path(name.partition("#")[0]).expanduser()
        if not path.exists() and (path.suffix.lower() in (*DATA_SUFFIXES, ".json") or name[:1] in "./~"):
            yield Problem(f"--dataset {name}", "no such file", "give a .jsonl, .json, .csv or .parquet file")
    if options.result_path is None or not parsed.given("result_path"):
        return
    path, label = Path(options.result_path), f"--result_path {options.result_path}"
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
    generation, file = parsed.sections["generation"], parsed.sections["file"]
    backend: BackendOptions = parsed.sections["backend"]
    yield from _model(parsed.sections["weights"])
    yield from _placement(parsed)
    yield from _generation(generation, parsed)
    yield from _beams(generation, parsed, not file.dataset)
    yield from _file(file, parsed)
    yield from _backend(backend, parsed)
    if backend.infer_backend == "vllm":
        yield from _unused(parsed, VLLM_LACKS, "would be ignored by vLLM")
        yield from _unused(parsed, ["rope_scaling"], "is applied by transformers only", _SCALED)
        names = ["vllm_data_parallel_size"]
        yield from _unused(parsed, names, "applies only to vLLM's server", "NPROC_PER_NODE=N divides the rows")
        names = ["vllm_reasoning_parser"]
        yield from _unused(parsed, names, "applies only to vLLM's server: a result has the whole answer")
        if not file.dataset:
            fix = "megaswift deploy --infer_backend vllm, or --infer_backend transformers"
            yield Problem("--infer_backend vllm", "answers prompt files only", f"--dataset FILE.jsonl; to chat: {fix}")
    processes = parsed.sections["launch"].nproc_per_node or 1
    if processes > 1 and not file.dataset:
        yield Problem(
            f"{parsed.label('nproc_per_node')}" if parsed.given("nproc_per_node") else f"NPROC_PER_NODE={processes}",
            "divides the rows of a prompt file; a conversation in the terminal has one process",
            "--dataset FILE.jsonl, or leave it out",
        )


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
    if backend.infer_backend != "vllm":
        fix = "use --device_map auto, which splits the model over all GPUs"
        yield from _unused(parsed, ["tensor_parallel_size"], "applies only to --infer_backend vllm", fix)
        names = [name for name in parsed.typed if name.startswith("vllm_")]
        yield from _unused(parsed, names, "applies only to --infer_backend vllm", "--infer_backend vllm")


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
    if server.max_body_size is not None and not byte_size_or_none(server.max_body_size):
        yield Problem(f"--max_body_size {server.max_body_size}", "is not a valid size", "--max_body_size 8MiB")
    backend: BackendOptions = parsed.sections["backend"]
    yield from _backend(backend, parsed)
    weights: ModelLoadingOptions = parsed.sections["weights"]
    names = [name for name, _ in weights.named_adapters]
    if any(names) and not all(names):
        yield Problem("--adapters", "mixes folders with and without a name", "--adapters FIRST=DIR SECOND=DIR")
    if any(names):
        yield from _unused(
            parsed,
            ["merge_adapters"] * weights.merge_adapters,
            "cannot merge adapters that requests select by name",
            "leave it out, or give one adapter without a name",
        )
    if backend.infer_backend == "vllm":
        yield from _unused(parsed, TRANSFORMERS_ONLY, "would be ignored by vLLM")
        yield from _unused(parsed, ["rope_scaling"], "is applied by transformers only", _SCALED)
        if parsed.sections["placement"].quantization_bit == 8:
            yield Problem(
                "--quantization_bit 8", "is not supported by vLLM's in-flight quantization", "--quantization_bit 4"
            )
        if parsed.sections["placement"].quantization_bit is not None and backend.vllm_quantization is not None:
            rule = f"conflicts with {parsed.label('quantization_bit')}, which selects bitsandbytes"
            yield Problem(parsed.label("vllm_quantization"), rule, "give one of the two")


def _no_adapters(model: str | None) -> Problem:
    """--merge_lora without --adapters; the folder of a LoRA run is often given as the model."""
    for folder in (Path(model), Path(model) / "adapter") if model is not None else ():
        if said := adapter_config(folder):
            base = said.get("base_model_name_or_path") or "BASE"
            rule = "contains LoRA adapters, not a model"
            return Problem(f"--model {model}", rule, f"--model {base} --adapters {folder} --merge_lora true")
    return Problem("--merge_lora true", "needs adapters", "--adapters DIR")


def export_option_problems(parsed: ParsedCommand) -> Iterator[Problem]:
    """`megaswift export`."""
    source: ModelPathOptions = parsed.sections["source"]
    export: ExportOptions = parsed.sections["export"]
    converts = export.to_hf or export.to_mcore
    yield from _model(source, export.mcore_model)
    yield from _bits(export, parsed)
    upload: ExportUploadOptions = parsed.sections["upload"]
    writes = export.merge_lora or converts or export.quantization_bit is not None
    if not writes and not upload.push_to_hub:
        yield Problem(
            "megaswift export",
            "needs --merge_lora, --quantization_bit, --to_mcore, --to_hf or --push_to_hub",
            "--merge_lora true --adapters DIR, --quantization_bit 4, or --to_hf true --mcore_model DIR",
        )
    if upload.push_to_hub:
        yield from _upload(export, source, writes)
    if export.merge_lora and not source.adapters:
        yield _no_adapters(source.model)
    if export.merge_lora and len(source.adapters) > 1:
        yield Problem("--adapters", "merges one adapter folder at a time", "export once per folder")
    if not export.merge_lora and source.adapters and export.quantization_bit is not None and not converts:
        yield from _unused(parsed, ["adapters"], "would be ignored", "--merge_lora true")
    if export.merge_lora and export.quantization_bit is None:
        yield from _unused(parsed, ["trust_remote_code"], "would be ignored: merging does not run model code")
    yield from _conversion(export, source, parsed)
    if byte_size_or_none(export.max_shard_size) is None:
        yield Problem(f"--max_shard_size {export.max_shard_size}", "is not a valid size", "--max_shard_size 5GB")
    if upload.push_to_hub and not writes:
        names = ("output_dir", "max_shard_size")
        yield from _unused(parsed, names, "applies to a folder that is written, and nothing is")
    elif export.output_dir is None and writes:
        yield Problem("--output_dir", "is missing", "--output_dir DIR (the folder to write)")
    elif export.output_dir is not None and Path(export.output_dir).exists():
        yield Problem(f"--output_dir {export.output_dir}", "already exists", "use another name; nothing is overwritten")


LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
"""Options of `export` and their axis of a layout."""


def _upload(export: ExportOptions, source: ModelPathOptions, writes: bool) -> Iterator[Problem]:
    """--push_to_hub."""
    if export.to_mcore:
        rule = "uploads Hugging Face folders, and --to_mcore writes a Megatron checkpoint"
        yield Problem("--push_to_hub true", rule, "leave out --to_mcore")
    if writes:
        return
    if len(source.adapters) > 1:
        yield Problem("--adapters", "one folder is uploaded at a time", "export once per folder")
    if not source.adapters and source.model is not None and not Path(source.model).expanduser().is_dir():
        rule = "is not a folder on this machine; --push_to_hub uploads a folder"
        yield Problem(f"--model {source.model}", rule, "--model DIR or --adapters DIR")


def _conversion(export: ExportOptions, source: ModelPathOptions, parsed: ParsedCommand) -> Iterator[Problem]:
    """--to_hf and --to_mcore."""
    if export.to_hf and export.to_mcore:
        yield Problem("--to_hf true", "conflicts with --to_mcore true", "convert in two commands")
    if not (export.to_hf or export.to_mcore):
        names = ("test_convert_precision", "torch_dtype", "mcore_model", *LAYOUT)
        yield from _unused(parsed, names, "applies only to a conversion", "--to_mcore true or --to_hf true")
        return
    if export.quantization_bit is not None:
        yield Problem(parsed.label("quantization_bit"), "cannot be combined with a conversion", "use two commands")
    if export.to_mcore:
        yield from _unused(parsed, ["mcore_model"], "is already a Megatron checkpoint", "--model DIR, or --to_hf true")
    if source.adapters and not export.merge_lora:
        folder = source.adapter_folders[0]
        rule = "has PEFT's format, which training and inference read on any layout: there is nothing to convert"
        yield Problem(f"--adapters {folder}", rule, "use the folder as it is, or --merge_lora true")
    elif export.to_hf and export.mcore_model is None and not export.merge_lora:
        yield Problem("--to_hf true", "needs a Megatron checkpoint", "--mcore_model DIR")
    if export.to_hf and export.mcore_model is not None and export.merge_lora:
        yield Problem("--mcore_model", "cannot be combined with --merge_lora", "--model DIR --merge_lora true")
    if export.to_hf and export.merge_lora:
        yield from _unused(parsed, ["test_convert_precision"], "applies to a conversion; merging changes the weights")

"""Where `--model` lies on this machine: a folder or checkpoint as it is, a hub id as its downloaded snapshot. No torch.

Owns finding and fetching; what the model's files mean is read by the families and the bridge.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megaswift.base.plain_files import read_plain_file
from megaswift.base.versions import run_folder
from megaswift.errors import CheckpointError, Problem, WeightsError, first_line, missing_path_hint
from megaswift.folders.adapter import CONFIG as ADAPTERS
from megaswift.folders.adapter import adapter_given_as_model_problem
from megaswift.folders.checkpoint import find_checkpoint, find_intact_checkpoint
from megaswift.folders.foreign import find_foreign_folder, foreign_without_config_problem
from megaswift.folders.foreign_view import foreign_model_view
from megaswift.folders.saved_steps import MARKER
from megaswift.inference.options.commands import ModelPathOptions
from megaswift.inference.options.parser import ParsedCommand
from megaswift.node_download import download_once_per_node

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "chat_template.json",
    "*.jinja",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
ADAPTER_FILES = (ADAPTERS, "adapter_model.safetensors")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
SILENT = ("hf", "model", "checkpoints")
"""Folders whose names do not tell one model from another."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class ModelNameOptions(Protocol):
    """Options that name a model: those of training and those of inference."""

    @property
    def model(self) -> str | None:
        """A folder or a hub id."""

    @property
    def use_hf(self) -> bool:
        """Whose ids: Hugging Face's, or ModelScope's."""

    @property
    def model_revision(self) -> str | None:
        """Branch, tag or commit of an id."""

    @property
    def hf_config(self) -> str | None:
        """The Hugging Face folder with the configuration of another program's checkpoint."""


def locate_model(model: ModelNameOptions, weights: bool = True, verify: bool | None = None) -> Path:
    """The folder of the model. `weights` False: configuration and tokenizer are enough.

    `verify`, by default as `weights`: the files of a step are compared with their SHA-256, and of an output directory
    the newest intact step is taken.
    """
    name = str(model.model)
    path = Path(name).expanduser()
    if path.is_dir() and (foreign := find_foreign_folder(path)) is not None:
        if foreign.legacy:
            given = model.hf_config or "DIR, DIR being the Hugging Face folder of the model that was trained"
            fix = f"megaswift convert megatron-to-hf {name} DST --hf_config {given}, then --model DST"
            rule = "is a checkpoint in Megatron-LM's legacy format: pickles, which only convert reads"
            raise CheckpointError(Problem(f"--model {name}", rule, fix))
        if model.hf_config is None:
            raise CheckpointError(foreign_without_config_problem(f"--model {name}"))
        return foreign_model_view(foreign.tensors, Path(model.hf_config).expanduser())
    if model.hf_config is not None:
        rule = f"is for checkpoints of other programs, and --model {name} is none"
        raise CheckpointError(Problem(f"--hf_config {model.hf_config}", rule, "leave it out"))
    if path.is_dir():
        return _folder(path, name, weights if verify is None else verify)
    if path.exists():
        raise WeightsError(Problem(f"--model {name}", "is a file", f"give its folder, {path.parent}"))
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise WeightsError(Problem(f"--model {name}", "no such folder", missing_path_hint(path)))
    return _fetch(model, name, (*CONFIG_FILES, *(WEIGHT_FILES if weights else ())))


def short_name(model: str) -> str:
    """What people call it: the last part of its path or hub id that says something."""
    return next(part for part in reversed(Path(model).absolute().parts) if part not in SILENT)


def _folder(path: Path, name: str, verify: bool) -> Path:
    if (path / "config.json").is_file():
        return path
    path = run_folder(path, (MARKER, "hf", "checkpoints", "adapter"))
    if (path / "hf" / "config.json").is_file() and any((path / name).exists() for name in ("metrics.jsonl", MARKER)):
        return path / "hf"
    checkpoint = (find_intact_checkpoint if verify else find_checkpoint)(path)
    if checkpoint is not None and (checkpoint.model / "config.json").is_file():
        return checkpoint.model
    if checkpoint is not None:
        raise WeightsError(
            Problem(
                f"--model {name}",
                f"is a checkpoint without {checkpoint.model / 'config.json'}",
                "use a checkpoint of this version, or the run's export (the folder hf)",
            )
        )
    for adapter in (path, path / "adapter"):
        if (adapter / ADAPTERS).is_file():
            raise WeightsError(adapter_given_as_model_problem(f"--model {name}", adapter))
    raise WeightsError(Problem(f"--model {name}", "has no config.json", "give a folder with a Hugging Face model"))


def with_fetched_adapters(parsed: ParsedCommand, section: str) -> ParsedCommand:
    """The options with adapters of a hub as downloaded folders; paths stay as they are."""
    options: ModelPathOptions = parsed.sections[section]
    found = []
    for name, folder in options.named_adapters:
        if folder.count("/") == 1 and folder[:1] not in "./~" and not Path(folder).exists():
            folder = str(_fetch(replace(options, model_revision=None), folder, ADAPTER_FILES, "--adapters"))
        found.append(f"{name}={folder}" if name else folder)
    return replace(parsed, sections={**parsed.sections, section: replace(options, adapters=tuple(found))})


def _fetch(model: ModelNameOptions, name: str, patterns: tuple[str, ...], flag: str = "--model") -> Path:
    """A snapshot from the hub, fetched by one rank of each node."""
    package = "huggingface_hub" if model.use_hf else "modelscope"
    if importlib.util.find_spec(package) is None:
        raise WeightsError(
            Problem(f"{flag} {name}", f"no such folder, and {package} is not installed", f"run pip install {package}")
        )

    def snapshot() -> Path:
        if model.use_hf:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, revision=model.model_revision, allow_patterns=list(patterns)))
        from modelscope import snapshot_download as from_modelscope

        return Path(from_modelscope(name, revision=model.model_revision, allow_patterns=list(patterns)))

    def download() -> Path:
        try:
            return snapshot()
        except (OSError, ValueError, RuntimeError) as error:
            # what the hubs' clients raise: not found, no access, no network
            hub = "Hugging Face" if model.use_hf else "ModelScope"
            raise WeightsError(
                Problem(
                    f"{flag} {name}",
                    f"no such local folder, and {hub} could not provide it ({first_line(error)})",
                    "give the path of a local folder, or use a machine with access to the hub",
                )
            ) from None

    return download_once_per_node((package, name, str(model.model_revision), *patterns), download, WeightsError)


def missing_model_file_problems(folder: Path, random_init: bool) -> list[Problem]:
    """What a run needs and `folder` lacks; only names are looked at, so this is quick on any disk."""
    problems = []
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        problems.append(
            Problem(
                str(folder), "has no tokenizer (tokenizer.json)", "copy the model's tokenizer files next to config.json"
            )
        )
    if random_init:
        return problems
    if (checkpoint := find_checkpoint(folder)) is not None:
        adapter = checkpoint.model.parent / "adapter"
        return (
            [*problems, adapter_given_as_model_problem(f"--model {adapter.parent}", adapter)]
            if adapter.is_dir()
            else problems
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(read_plain_file(index).decode("utf-8"))["weight_map"].values())
            absent = sorted(name for name in shards if not (folder / name).is_file())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return [
                *problems,
                Problem(str(index), f"is not an index of shards ({type(error).__name__})", "download the model again"),
            ]
        if absent:
            rule = f"lacks {len(absent)} of {len(shards)} shards: {', '.join(absent[:3])}"
            problems.append(Problem(str(folder), rule, "download the model again"))
    elif not any(folder.glob("*.safetensors")):
        old = " (*.bin files are pickles and are not read)" if any(folder.glob("*.bin")) else ""
        fix = "use a folder with safetensors, or --random_init true to train from scratch"
        problems.append(Problem(str(folder), f"has no *.safetensors{old}", fix))
    return problems

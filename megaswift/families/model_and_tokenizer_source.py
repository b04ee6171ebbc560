"""Where `--model` lies on this machine: a folder or checkpoint as it is, a hub id as its downloaded snapshot; its
tokenizer. No torch.

Owns finding and fetching; what the model's files mean is read by the families and the bridge.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megaswift.config import SwiftConfig
from megaswift.config.infer_deploy_export_parser import ParsedCommand
from megaswift.config.inference import ModelPathOptions
from megaswift.config.versions import run_folder
from megaswift.data.load_tokenizer import load_tokenizer
from megaswift.data.named_chat_templates import named_templates, template_tokens
from megaswift.data.open_media_files import VideoSampling
from megaswift.data.read_template_and_system import read_template
from megaswift.data.vision_processor import Processor, processor_folder_and_files_digest
from megaswift.download_once_per_node import download_once_per_node
from megaswift.errors import ConfigError, Problem, WeightsError, first_line, missing_path_hint
from megaswift.families.adapter_folder import CONFIG as ADAPTERS
from megaswift.families.adapter_folder import adapter_given_as_model_problem
from megaswift.families.checkpoint_folder import find_checkpoint, find_intact_checkpoint
from megaswift.families.family import read_config_json
from megaswift.families.saved_step_integrity import MARKER
from megaswift.families.vision_language_detection import has_vision_tower, vision_task_problems
from megaswift.log import warn
from megaswift.plain_files import read_plain_file

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


def locate_model(model: ModelNameOptions, weights: bool = True, verify: bool | None = None) -> Path:
    """The folder of the model. `weights` False: configuration and tokenizer are enough.

    `verify`, by default as `weights`: the files of a step are compared with their SHA-256, and of an output directory
    the newest intact step is taken.
    """
    name = str(model.model)
    path = Path(name).expanduser()
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


def tokenizer_with_run_template(cfg: SwiftConfig, folder: Path) -> Any:
    """The tokenizer in `folder` as training takes it."""
    return read_tokenizer(folder, cfg.model.trust_remote_code, cfg.data.chat_template)


def read_tokenizer(folder: Path, trust: bool, chat_template: str | None) -> Any:
    """The tokenizer in `folder`, with the chat template of the options; code that comes with it runs only with
    --trust_remote_code."""
    tokenizer = load_tokenizer(folder, trust, "use the model's own tokenizer files")
    if chat_template is not None:
        _use_template(tokenizer, chat_template)
    return tokenizer


def training_processor(cfg: SwiftConfig, folder: Path) -> Processor:
    """The processor in `folder` as training takes it."""
    data = cfg.data
    frames = VideoSampling(data.video_fps, data.video_min_frames, data.video_max_frames, data.video_max_pixels)
    return read_processor(folder, cfg.model.trust_remote_code, data.chat_template, data.max_pixels, frames)


def read_processor(
    folder: Path,
    trust: bool,
    chat_template: str | None,
    max_pixels: int | None = None,
    videos: VideoSampling = VideoSampling(),  # noqa: B008
) -> Processor:
    """The processor in `folder`; its tokenizer has the chat template of the options."""
    spec = processor_folder_and_files_digest(folder, trust)
    processor = Processor(replace(spec, max_pixels=max_pixels, videos=videos))
    if chat_template is not None:
        _use_template(processor.tokenizer, chat_template)
    return processor


def _use_template(tokenizer: Any, chat_template: str) -> None:
    """The tokenizer takes the chat template of the options; a warning where its vocabulary lacks tokens of it."""
    tokenizer.chat_template = read_template(chat_template, tokenizer.chat_template)
    if chat_template in named_templates():
        split = [t for t in template_tokens(tokenizer.chat_template) if len(tokenizer.tokenize(t)) > 1]
        if split:
            warn(
                f"--chat_template {chat_template}: {', '.join(split)} {'is' if len(split) == 1 else 'are'} not in the "
                f"vocabulary and become several tokens; --new_special_tokens {' '.join(split)} adds them"
            )


def tokenizer_or_processor_for(cfg: SwiftConfig) -> Any:
    """What training on `--model` reads text with: its tokenizer, or a vision-language model's processor. ConfigError
    where the task does not train such a model."""
    folder = Path(str(cfg.model.model))
    if not (folder / "config.json").is_file() and any((folder / name).is_file() for name in TOKENIZER_FILES):
        return tokenizer_for(cfg)
    folder = locate_model(cfg.model, weights=False)
    hf_config = read_config_json(folder)
    if problems := vision_task_problems(hf_config, str(cfg.model.model), cfg.task):
        raise ConfigError(problems)
    if not has_vision_tower(hf_config):
        return tokenizer_for(cfg)
    return training_processor(cfg, folder)


def tokenizer_for(cfg: SwiftConfig) -> Any:
    """The tokenizer that training on `--model` takes, whatever `--model` is; here a folder that holds nothing else is
    enough."""
    folder = Path(str(cfg.model.model))
    alone = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if not alone:
        folder = locate_model(cfg.model, weights=False)
    problems = missing_model_file_problems(folder, random_init=True)
    if problems:
        raise WeightsError(problems)
    return tokenizer_with_run_template(cfg, folder)

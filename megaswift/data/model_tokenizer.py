"""The tokenizer or processor of `--model`, with the chat template and special tokens of the options. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.data.options.data import DataConfig
from megaswift.data.templates.chosen import read_template
from megaswift.data.templates.named import named_templates, template_tokens
from megaswift.data.tokenizer import load_tokenizer
from megaswift.data.vision.files import VideoSampling
from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.folders.source import TOKENIZER_FILES, locate_model, missing_model_file_problems
from megaswift.log import warn
from megaswift.models.family import read_config_json, trains_language_model
from megaswift.models.options.model import ModelConfig
from megaswift.models.vision import VISION_TASKS, has_vision_tower, vision_task_problems

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of which a folder with an image processor has at least one."""


def read_tokenizer(folder: Path, trust: bool, chat_template: str | None) -> Any:
    """The tokenizer in `folder`, with the chat template of the options; code that comes with it runs only with
    --trust_remote_code."""
    tokenizer = load_tokenizer(folder, trust, "use the model's own tokenizer files")
    if chat_template is not None:
        _use_template(tokenizer, chat_template)
    return tokenizer


def training_processor(data: DataConfig, folder: Path, trust: bool) -> Processor:
    """The processor in `folder` as training takes it."""
    frames = VideoSampling(data.video_fps, data.video_min_frames, data.video_max_frames, data.video_max_pixels)
    return read_processor(folder, trust, data.chat_template, data.max_pixels, frames)


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


def tokenizer_or_processor_for(model: ModelConfig, data: DataConfig, task: str) -> Any:
    """Load the tokenizer of `--model`, or the processor of a vision-language model. ConfigError where the task does not
    train such a model.

    The tokenizer is enough for a model whose language model the native engine trains, where the task has no images or
    the folder no processor.
    """
    folder = Path(str(model.model))
    if not (folder / "config.json").is_file() and any((folder / name).is_file() for name in TOKENIZER_FILES):
        return tokenizer_for(model, data)
    folder = locate_model(model, weights=False)
    hf_config = read_config_json(folder)
    looks = task in VISION_TASKS and any((folder / name).is_file() for name in PROCESSOR_FILES)
    if trains_language_model(hf_config) and not looks:
        return tokenizer_for(model, data)
    if problems := vision_task_problems(hf_config, str(model.model), task):
        raise ConfigError(problems)
    if not has_vision_tower(hf_config):
        return tokenizer_for(model, data)
    return training_processor(data, folder, model.trust_remote_code)


def tokenizer_for(model: ModelConfig, data: DataConfig) -> Any:
    """The tokenizer that training on `--model` takes, whatever `--model` is; here a folder that holds nothing else is
    enough."""
    folder = Path(str(model.model))
    alone = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if not alone:
        folder = locate_model(model, weights=False)
    problems = missing_model_file_problems(folder, random_init=True)
    if problems:
        raise WeightsError(problems)
    return read_tokenizer(folder, model.trust_remote_code, data.chat_template)


def named_special_tokens(entries: Iterable[str]) -> list[str]:
    """The tokens in order, each once; a .txt file has one a line."""
    tokens: list[str] = []
    for entry in entries:
        if not entry.endswith(".txt"):
            tokens.append(entry)
            continue
        try:
            lines = Path(entry).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            rule = f"cannot be read ({type(error).__name__})"
            fix = "give tokens, or a UTF-8 text file with one token a line"
            raise ConfigError(Problem(f"--new_special_tokens {entry}", rule, fix)) from None
        tokens += [line.strip() for line in lines if line.strip()]
    return list(dict.fromkeys(tokens))

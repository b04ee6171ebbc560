"""Shared by all command lines: the words that request help, an argument parser that raises our errors, and the error
for an unknown command."""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from megaswift.base.redaction import redacted_command
from megaswift.errors import ConfigError, Problem, UserError, did_you_mean_hint

HELP = ("-h", "--help")
_PAGE = "megaswift board OUT, which shows, starts, stops and resumes runs in the browser, and chats with their models"
ELSEWHERE = {
    "finetune": "megaswift sft",
    "pretrain": "megaswift pt",
    "chat": "megaswift infer",
    "generate": "megaswift infer",
    "serve": "megaswift deploy",
    "server": "megaswift deploy",
    "rollout": "run vllm serve, then megaswift grpo --rollout_backend vllm_server (docs/samplers.md)",
    "merge-lora": "megaswift export --merge_lora true",
    "evaluate": "megaswift eval",
    **dict.fromkeys(("web-ui", "webui", "ui", "dashboard"), _PAGE),
    "compare": "megaswift report OUT1 OUT2",
    "app": "run megaswift deploy and use a chat client for OpenAI's API",
    "list": "megaswift checkpoint ls OUT",
    **dict.fromkeys(
        ("prepare-datasets", "prepare-dataset", "prepare-data", "prepare", "preprocess", "tokenize", "cache"),
        "megaswift data cache DATASET --model DIR --output_dir FOLDER; megaswift data show DATASET --model DIR",
    ),
    **dict.fromkeys(
        ("estimate", "memory", "fit"),
        "megaswift plan MODEL --gpus 8 --gpu h100, or --fit true of megaswift sft and pt",
    ),
    "push": "megaswift export --model DIR --push_to_hub true --hub_model_id ID",
    "quantize": "megaswift export --model DIR --quantization_bit 4",
    "benchmark": "megaswift bench comm",
    "megatron": "megaswift sft, pt or rlhf, which train with Megatron-Core by default; megaswift convert for weights",
}
"""Commands of other toolkits, and what takes their place."""


_ENTRY_FILE = re.compile(r"(?:^|/)(?:cli/)?(?:_megatron/)?([a-z]+)\.py$")
"""An entry file of another toolkit, such as swift/cli/_megatron/rlhf.py; `main.py` starts any of them."""


def help_topic(words: Sequence[str]) -> str | None:
    """Return what a command line asks help for: `lora` in `--help lora`, empty for `--help` alone; None without it."""
    place = next((i for i, word in enumerate(words) if word in HELP), None)
    if place is None:
        return None
    following = words[place + 1 : place + 2]
    return following[0].partition("=")[0] if following else ""


def unknown_command_error(program: str, word: str, commands: Iterable[str]) -> UserError:
    """The mistake of asking `program` for `word`."""
    known = list(commands)
    file = _ENTRY_FILE.search(word)
    if program == "megaswift" and file is not None:
        command = file[1] if file[1] in known else "train"
        rule = "is a file of another toolkit, not a command"
        return UserError(Problem(f"{program} {word}", rule, f"megaswift {command} ..."))
    return UserError(
        Problem(
            f"{program} {word}",
            f"is not a command; commands are {', '.join(known)}",
            (ELSEWHERE.get(_command_name(word), "") if program == "megaswift" else "")
            or did_you_mean_hint(word, known)
            or f"{program} --help",
        )
    )


def _command_name(word: str) -> str:
    """`scripts/prepare_datasets.py` and `Prepare-Datasets` are one name."""
    return word.rpartition("/")[2].removesuffix(".py").lower().replace("_", "-")


def unusable_text_rule(text: str) -> str:
    """Returns what is wrong with a text that no file can hold or be named by, or with a path that leads in a ring;
    empty where nothing is."""
    if "\0" in text:
        return "contains a null character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"contains an unpaired surrogate (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
    try:
        os.stat(os.path.expanduser(text))
    except OSError as error:
        return "is a ring of symbolic links" if error.errno == errno.ELOOP else ""
    return ""


def refuse_unusable_words(words: Iterable[str]) -> None:
    """ConfigError for words of a command line that are no usable text, or a path that leads in a ring."""
    problems = [
        Problem(word, rule, "use text in UTF-8, and a path that is valid on this file system")
        for word in words
        if (rule := unusable_text_rule(word.partition("=")[2] if word.startswith("--") and "=" in word else word))
    ]
    if problems:
        raise ConfigError(problems)


class UserErrorArgumentParser(argparse.ArgumentParser):
    """Mistakes become one of our messages."""

    def error(self, message: str) -> NoReturn:
        """Never returns."""
        wrong = re.search(r"unrecognized arguments: (\S+)", message)
        known = [option for action in self._actions for option in action.option_strings]
        fix = did_you_mean_hint(wrong[1], known) if wrong else ""
        raise ConfigError(Problem(self.prog, redacted_command(message), fix or f"{self.prog} --help"))

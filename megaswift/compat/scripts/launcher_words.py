"""The program that a command starts, with what its launcher says: torchrun, `accelerate launch`, `deepspeed`, or none.

Owns launchers' own options. What the program is, and what its arguments mean, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from megaswift.compat.names.translated import RENAMED
from megaswift.compat.scripts.shell_variables import ExpandedWord
from megaswift.config.sections import NAMES
from megaswift.options.sources import normalize_name

WRAPPERS = ("env", "nohup", "exec", "sudo", "setsid", "command", "stdbuf", "numactl", "srun", "uv", "run", "conda")
SWITCHES_OF_LAUNCHERS = frozenset({
    "standalone", "module", "m", "no_python", "multi_gpu", "cpu", "tpu", "mps", "use_deepspeed", "use_fsdp",
    "use_megatron_lm", "same_network", "debug", "quiet", "no_local_rank", "force_multi", "enable_cpu_affinity",
    "use_env", "autotuning", "save_pid", "no_ssh", "virtual_local_rank",
})  # fmt: skip
"""Options of launchers that take no value; the word after them may be the script."""
LAUNCH_FIELDS = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")
LAUNCH_SPELLINGS = tuple(n for n, ours in RENAMED.items() if ours in LAUNCH_FIELDS) + ("num_processes",)
PYTHON = ("python", "python3")
PROGRAMS = (*PYTHON, "torchrun", "accelerate", "deepspeed", "swift", "megatron", "megaswift", "trl", "llamafactory-cli")
"""Words that a wrapper starts, whatever options it has before them."""
NAMING = ("-n", "--name", "-J", "--job-name", "-p", "--prefix", "--partition", "-u", "--unset")
"""Options of wrappers whose value may be called as a program is: `conda run -n swift`."""


@dataclass
class LaunchedProgram:
    """A program, the words after it, and its launch."""

    name: str
    """A path, a module (`trl.scripts.sft`) or a console script (`swift`)."""
    words: list[ExpandedWord]
    launcher: str = ""
    launch: dict[str, ExpandedWord] = field(default_factory=dict)
    """Our launch options, with the launcher's values."""
    other: dict[str, ExpandedWord] = field(default_factory=dict)
    """The launcher's other options."""
    unset: list[str] = field(default_factory=list)
    """Variables before the program that the script does not set: `torchrun $DISTRIBUTED_ARGS train.py`."""


def launched_program(words: Sequence[ExpandedWord]) -> LaunchedProgram | None:
    """What a command runs; None where it is no program of Python."""
    rest = _after_wrapper(words)
    while rest and (_base(rest[0].text) in WRAPPERS or (len(rest) < len(words) and _between(rest[0].text))):
        rest = rest[1:]
    if not rest:
        return None
    first = _base(rest[0].text)
    after = rest[1:]
    if first in PYTHON:
        return _python(after)
    if first == "torchrun":
        return _launched("torchrun", after)
    if first == "accelerate":
        return _launched("accelerate", after[1:]) if after and after[0].text == "launch" else None
    if first == "deepspeed":
        return _launched("deepspeed", after)
    return LaunchedProgram(rest[0].text, after)


def _after_wrapper(words: Sequence[ExpandedWord]) -> list[ExpandedWord]:
    """The words from the first known program on, where a wrapper stands first; else all."""
    if words and _base(words[0].text) in WRAPPERS:
        for i, word in enumerate(words[1:], 1):
            known = _base(word.text) in PROGRAMS or word.text.endswith(".py")
            if known and words[i - 1].text not in NAMING:
                return list(words[i:])
    return list(words)


def _between(word: str) -> bool:
    """A word between a wrapper and what it starts: `-N 2`, `A=b`."""
    return word.startswith("-") or "=" in word or word.isdigit()


def _base(path: str) -> str:
    name = PurePosixPath(path).name
    return "python" if name.startswith("python3.") else name


def _python(words: list[ExpandedWord]) -> LaunchedProgram | None:
    while words and words[0].text.startswith("-") and words[0].text != "-m":
        if words[0].text == "-c":
            return None
        words = words[2 if words[0].text in ("-W", "-X") else 1 :]
    if not words:
        return None
    if words[0].text != "-m":
        return LaunchedProgram(words[0].text, words[1:])
    module, rest = (words[1].text, words[2:]) if len(words) > 1 else ("", [])
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        return _launched("torchrun", rest)
    if module == "accelerate.commands.launch":
        return _launched("accelerate", rest)
    return LaunchedProgram(module, rest) if module else None


def _launched(launcher: str, words: list[ExpandedWord]) -> LaunchedProgram | None:
    found = LaunchedProgram("", [], launcher)
    at = 0
    while at < len(words) and (words[at].text.startswith("-") or _holds_options(words, at)):
        if not words[at].text.startswith("-"):
            found.unset.append(words[at].text)
            at += 1
            continue
        flag, equals, value = words[at].text.partition("=")
        name = normalize_name(flag.lstrip("-"))
        word = ExpandedWord(value, words[at].unresolved) if equals else ExpandedWord("true")
        if not equals and name not in SWITCHES_OF_LAUNCHERS and at + 1 < len(words):
            at += 1
            word = words[at]
        at += 1
        ours = NAMES.get(RENAMED.get(name, name), "")
        (found.launch if ours in LAUNCH_FIELDS else found.other)[ours if ours in LAUNCH_FIELDS else name] = word
    rest = words[at:]
    if rest and rest[0].text in PYTHON:
        rest = rest[1:]
    if not rest:
        return None
    found.name = rest[0].text
    found.words = rest[1:]
    return found


def _holds_options(words: Sequence[ExpandedWord], at: int) -> bool:
    """Whether this is a variable with options of the launcher: the script comes after it."""
    return bool(words[at].unresolved) and any(word.text.endswith(".py") for word in words[at + 1 :])


def take_launcher_options(program: LaunchedProgram, names: Sequence[str]) -> tuple[ExpandedWord, ...]:
    """Moves options of `accelerate launch` out of a program's arguments, as TRL's CLI does; the arguments left."""
    rest: list[ExpandedWord] = []
    words = list(program.words)
    for i, word in enumerate(words):
        flag, equals, value = word.text.partition("=")
        previous = normalize_name(words[i - 1].text) if i else ""
        if flag.startswith("--") and normalize_name(flag) in names:
            program.launcher = "accelerate"
            if equals:
                program.other[normalize_name(flag)] = ExpandedWord(value, word.unresolved)
        elif i and words[i - 1].text.startswith("--") and previous in names:
            program.other[previous] = word
        else:
            rest.append(word)
    return tuple(rest)


def launch_values(program: LaunchedProgram, environment: Mapping[str, ExpandedWord]) -> dict[str, ExpandedWord]:
    """Our launch options with their values: the launcher's, else those of ms-swift's environment variables."""
    values = {name: environment[name.upper()] for name in LAUNCH_FIELDS if name.upper() in environment}
    return values | program.launch

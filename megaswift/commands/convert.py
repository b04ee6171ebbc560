"""`megaswift convert ...` and the scripts in converters/: options, or a file of them, in; exit code out.

Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.base.byte_size import byte_size_or_none
from megaswift.base.closed_stdout import ignore_closed_stdout
from megaswift.base.command_words import HELP, UserErrorArgumentParser, unknown_command_error
from megaswift.config.sections import TRAINING
from megaswift.error_exit import print_error_once
from megaswift.errors import ConfigError, Problem, UserError, did_you_mean_hint
from megaswift.inference.options.commands import ExportProcessOptions
from megaswift.inference.options.launch import LAUNCH_OPTIONS, node_option_values, variables_as_typed
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.first_node import run_on_node_0
from megaswift.launchers.options.single_process import (
    NodePlace,
    node_problems,
    place_among_nodes,
    unused_processes_notice,
)
from megaswift.options.files import read_config_file
from megaswift.options.sources import GivenOptionValue
from megaswift.options.spelling import TypedOption, problems_as_typed

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
AXES = {
    "tp": "intended tensor-parallel size; the vocabulary is padded for it",
    "pp": "pipeline-parallel size; only checked against the model",
    "vpp": "virtual pipeline chunks per rank; only checked",
    "ep": "expert-parallel size; only checked",
    "etp": "tensor-parallel size of experts; only checked",
}


class FileArgumentParser(UserErrorArgumentParser):
    """Arguments that `--config FILE` gives, too, by their names; those of the command line override it."""

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """ConfigError with all entries of the file that are wrong, by their lines."""
        files, words = config_files_and_words(args)
        self.add_argument("--config", metavar="FILE", help="YAML or JSON file with these arguments and those of nodes")
        positional = [action for action in self._actions if not action.option_strings]
        for action in positional:
            action.nargs = "?"
        entries: dict[str, Any] = {}
        if problems := [problem for given in entries_of_files(files) for problem in self._take(given, entries)]:
            raise ConfigError(problems)
        names = [action.dest for action in positional]
        self.set_defaults(**{name: value for name, value in entries.items() if name not in names})
        found = super().parse_args(words, namespace)
        typed = [value for name in names if (value := getattr(found, name)) is not None]
        open_names = [name for name in names if name not in entries]
        if typed and len(typed) == len(open_names) < len(names):  # one in the file, the other on the command line
            entries |= dict(zip(open_names, typed, strict=True))
        else:
            entries |= dict(zip(names, typed, strict=False))
        for name in names:
            setattr(found, name, entries.get(name))
        if missing := [str(action.metavar) for action in positional if action.dest not in entries]:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return found

    def _take(self, given: GivenOptionValue, entries: dict[str, Any]) -> list[Problem]:
        """Puts the value of a file's entry into `entries`."""
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        if given.name in LAUNCH_OPTIONS or given.value is None:
            return []
        if (action := actions.get(given.name)) is None:
            fix = did_you_mean_hint(given.name, list(actions)) or f"{self.prog} --help"
            return [Problem(given.label, f"is not an option of {self.prog}", fix)]
        if action.nargs == 0 and not isinstance(given.value, bool):  # a switch
            return [Problem(given.label, "must be true or false", f"{given.name}: true")]
        try:
            value = given.value if action.nargs == 0 else self._get_value(action, str(given.value))
            if action.nargs != 0:
                self._check_value(action, value)
        except argparse.ArgumentError as error:
            return [Problem(given.label, str(error.message), f"{self.prog} --help")]
        entries[given.name] = value
        return []


def config_files_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of `--config`, and a YAML file as the first word; the other words."""
    first = [word for word in words[:1] if Path(word).suffix in (".yaml", ".yml")]
    parser = UserErrorArgumentParser(prog="megaswift convert", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    named, others = parser.parse_known_args(list(words[len(first) :]))
    return [*first, *named.config], others


def entries_of_files(files: Sequence[str]) -> list[GivenOptionValue]:
    """ConfigError where a file cannot be read."""
    sources = [read_config_file(file, TRAINING) for file in files]
    if problems := [problem for source in sources for problem in source.problems]:
        raise ConfigError(problems)
    return [given for source in sources for given in source.givens]


def byte_size_argument(text: str) -> int:
    """`5GB`, `512 MiB` or plain bytes."""
    size = byte_size_or_none(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use for example 5GB or 512MiB")
    return size


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _parser(name: str, text: str, source: str) -> FileArgumentParser:
    parser = FileArgumentParser(prog=f"megaswift convert {name}", description=text, allow_abbrev=False)
    parser.add_argument("source", metavar="SRC", type=Path, help=source)
    _target(parser)
    parser.add_argument("--dtype", choices=list(DTYPES), help="the dtype of all tensors (default: each keeps its own)")
    return parser


def _target(parser: UserErrorArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="DST", type=Path, help="the folder to create; it appears only when it is complete"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new folder is complete")


def _shards(parser: UserErrorArgumentParser) -> None:
    parser.add_argument(
        "--max_shard_size",
        "--max-shard-size",
        type=byte_size_argument,
        metavar="SIZE",
        help="maximum file size, such as 5GB (default) or 512MiB",
    )


def _dtype(name: str | None) -> Any:
    """torch's, of a spelling in DTYPES."""
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def hf_to_megatron_command(argv: Sequence[str]) -> int:
    """`megaswift convert hf-to-megatron`."""
    text = (
        "Converts a Hugging Face folder to a sharded Megatron checkpoint (torch_dist). The checkpoint loads on "
        "any layout; the "
        "sizes below describe the intended one."
    )
    parser = _parser("hf-to-megatron", text, "a Hugging Face folder with safetensors")
    for axis, meaning in AXES.items():
        parser.add_argument(f"--{axis}", type=_count, metavar="N", help=meaning)
    parser.add_argument(
        "--format",
        choices=["megaswift", "megatron-lm"],
        default="megaswift",
        help="whose folder to write: megatron-lm has the keys and the tracker file that Megatron-LM loads",
    )
    args = parser.parse_args(argv)
    from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron

    layout = {axis: value for axis in AXES if (value := getattr(args, axis)) is not None}
    options = HfToMegatronOptions(
        layout, _dtype(args.dtype), overwrite=args.overwrite, megatron_lm=args.format == "megatron-lm"
    )
    log.print_result(f"wrote {hf_to_megatron(args.source, args.target, options)}")
    return 0


def megatron_to_hf_command(argv: Sequence[str]) -> int:
    """`megaswift convert megatron-to-hf`."""
    parser = _parser(
        "megatron-to-hf",
        "Converts a sharded Megatron checkpoint (torch_dist) to a Hugging Face folder. Needs only SRC, and for a "
        "checkpoint of another program --hf_config.",
        "a converted checkpoint, OUT/checkpoints/step-N, or OUT (its latest checkpoint); or a checkpoint of "
        "Megatron-LM, ms-swift or Megatron-Bridge",
    )
    parser.add_argument(
        "--hf_config",
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="for a checkpoint of another program: the Hugging Face folder with the model's config.json and tokenizer",
    )
    _shards(parser)
    args = parser.parse_args(argv)
    from megaswift.bridge.convert.to_hf import MAX_SHARD_BYTES, MegatronToHfOptions, megatron_to_hf

    shard = args.max_shard_size or MAX_SHARD_BYTES
    options = MegatronToHfOptions(_dtype(args.dtype), shard, args.overwrite, args.hf_config)
    log.print_result(f"wrote {megatron_to_hf(args.source, args.target, options)}")
    return 0


VERIFY = """\
exit code: 0 all equal; 1 something differs, is missing or extra; 2 invalid command or files

  megaswift convert verify MODEL CHECKPOINT --report report.json   every tensor, bit by bit; SHA-256 of each
  megaswift convert verify MODEL EXPORT --dtype bf16               after casting both
  megaswift convert verify MODEL EXPORT --logits                   both run by transformers in float32
"""


def verify_command(argv: Sequence[str]) -> int:
    """`megaswift convert verify`."""
    parser = FileArgumentParser(
        prog="megaswift convert verify",
        description="Compares two sets of weights.",
        epilog=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "a",
        metavar="A",
        type=Path,
        help="a Hugging Face folder, a converted checkpoint, OUT/checkpoints/step-N, or OUT",
    )
    parser.add_argument("b", metavar="B", type=Path, help="the other set, in any of these forms")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="cast both to this dtype first (default: different dtypes count as a difference)",
    )
    parser.add_argument(
        "--logits", action="store_true", help="compare the logits that transformers computes, not the tensors"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="for --logits: a file with one prompt per line, text or token ids like [1, 2, 3]",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="for --logits: run the Python code in the folders"
    )
    parser.add_argument("--all", action="store_true", help="print equal tensors too")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the full report as JSON")
    # The module below imports torch, so it is loaded once the arguments are known to be good.
    args = parser.parse_args(argv)
    args.dtype = DTYPES[args.dtype] if args.dtype else None
    from megaswift.commands.verify import verify_weights as run

    return run(args)


def merge_lora_command(argv: Sequence[str]) -> int:
    """`megaswift convert merge-lora`."""
    parser = FileArgumentParser(
        prog="megaswift convert merge-lora",
        allow_abbrev=False,
        description=(
            "Merges the adapters of a PEFT folder into a model. Computes in float32; each tensor keeps its dtype."
        ),
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        type=Path,
        help="the Hugging Face folder (or checkpoint) that the adapters were trained on",
    )
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=Path, help="a PEFT folder: OUT/adapter, OUT/checkpoints/step-N/adapter"
    )
    _target(parser)
    _shards(parser)
    args = parser.parse_args(argv)
    from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
    from megaswift.bridge.hf.writer import MAX_SHARD_BYTES

    shard = args.max_shard_size or MAX_SHARD_BYTES
    log.print_result(
        f"wrote {merge_adapter_folder_into_base(args.base, args.adapter, args.target, shard, args.overwrite)}"
    )
    return 0


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "hf-to-megatron": ("convert a Hugging Face folder to a sharded Megatron checkpoint", hf_to_megatron_command),
    "megatron-to-hf": (
        "convert a sharded Megatron checkpoint, also of a run, to a Hugging Face folder",
        megatron_to_hf_command,
    ),
    "merge-lora": ("merge PEFT adapters into a Hugging Face model folder", merge_lora_command),
    "verify": ("compare two folders or checkpoints, by tensors or by logits", verify_command),
}


NODES = """\
The same command may be started on every node: --nnodes N --node_rank RANK --master_addr HOST [--master_port PORT], or
the variables NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. Node 0 does the work, the others end with its exit code.

--config FILE.yaml gives any of these options and arguments: source: SRC, target: DST, tp: 2, nnodes: 2."""


def convert_usage() -> str:
    """The page of `megaswift convert --help`."""
    rows = "\n".join(f"  {name:<16}{text}" for name, (text, _) in COMMANDS.items())
    return f"usage: megaswift convert COMMAND ...     (megaswift convert COMMAND --help)\n\n{rows}\n\n{NODES}\n"


def convert_command(argv: Sequence[str]) -> int:
    """`megaswift convert ...`; returns the exit code, or raises a UserError."""
    if not argv or argv[0] in HELP:
        print(convert_usage(), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise unknown_command_error("megaswift convert", argv[0], COMMANDS)
    try:
        if any(word in HELP for word in argv):
            return COMMANDS[argv[0]][1](argv[1:])
        place, words = _place_and_other_words(argv[1:])
        return run_on_node_0(place, f"convert {argv[0]}", lambda: COMMANDS[argv[0]][1](words))
    except KeyboardInterrupt as stopped:  # a conversion says what it left; earlier there is nothing to tell
        log.info(str(stopped) or "stopped")
        return 128 + signal.SIGINT


def _place_and_other_words(words: Sequence[str]) -> tuple[NodePlace | None, list[str]]:
    """Returns the place among nodes that the launch options, variables and files give, and the words without these
    options."""
    take_cluster_variables(os.environ)
    parser = UserErrorArgumentParser(prog="megaswift convert", add_help=False, allow_abbrev=False)
    for name in LAUNCH_OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=_launch_type(name))
    given, others = parser.parse_known_args(list(words))
    flags = {name: value for name, value in vars(given).items() if value is not None}
    entries = {
        entry.name: entry
        for entry in entries_of_files(config_files_and_words(others)[0])
        if entry.name in LAUNCH_OPTIONS
    }
    if wrong := [problem for entry in entries.values() for problem in _launch_entry_problems(entry)]:
        raise ConfigError(wrong)
    values = node_option_values(flags, os.environ, {name: entry.value for name, entry in entries.items()})
    launch = ExportProcessOptions(**values)
    of_file = {n for n, entry in entries.items() if n not in flags and str(entry.value) == str(values.get(n))}
    typed = variables_as_typed({n: value for n, value in values.items() if n not in of_file and n not in flags})
    typed |= {name: TypedOption(entries[name].spelling, entries[name].label) for name in of_file}
    if problems := [*node_problems(launch)]:
        raise ConfigError(problems_as_typed(problems, typed, {name: name for name in typed}))
    for notice in unused_processes_notice(launch):
        log.info(notice)
    return place_among_nodes(asdict(launch), os.environ), others


EXAMPLES = {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "master_port": 29500}


def _launch_type(name: str) -> Callable[[str], Any]:
    types: dict[str, Callable[[str], Any]] = {"master_addr": str, "node_rank": _rank, "master_port": _port}
    return types.get(name, _count)


def _rank(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, from 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 1 to 65535")
    return int(text)


def _launch_entry_problems(entry: GivenOptionValue) -> list[Problem]:
    if entry.value is None:
        return []
    try:
        _launch_type(entry.name)(str(entry.value))
    except argparse.ArgumentTypeError as error:
        return [Problem(entry.label, str(error), f"{entry.name}: {EXAMPLES[entry.name]}")]
    return []


def run_converter_script(command: str) -> int:
    """Run one of these commands with the process's own arguments, as the scripts in converters/ do."""
    try:
        with ignore_closed_stdout():
            return convert_command([command, *sys.argv[1:]])
    except UserError as error:
        return print_error_once(error, os.environ)

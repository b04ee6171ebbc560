"""The console script `megaswift`: a table of commands, each imported on demand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaswift.base.closed_stdout import ignore_closed_stdout
from megaswift.base.command_words import HELP, refuse_unusable_words, unknown_command_error
from megaswift.error_exit import end_past_calls_left_behind, print_error_once
from megaswift.errors import UserError, storage_error
from megaswift.options.tasks import TASKS
from megaswift.version import __version__

if TYPE_CHECKING:
    from megaswift.config import SwiftConfig


def _train(task: str) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        from megaswift.commands.training import main as train

        return train(task, argv)

    return command


def _task_of_options(argv: list[str]) -> int:
    """`megaswift train ...`."""
    from megaswift.train import main as train

    return train(argv)


def _config(argv: list[str]) -> int:
    """`megaswift config [TASK] FILE [overrides]` and `megaswift config --schema`."""
    from megaswift import log
    from megaswift.config import load_config

    if not argv or any(a in HELP for a in argv):
        print(CONFIG_USAGE)
        return 0 if argv else 2
    if argv == ["--schema"]:
        from megaswift.config.schema import config_json_schema

        print(json.dumps(config_json_schema(), indent=2))
        return 0
    named = argv[0] in TASKS and not Path(argv[0]).is_file()
    cfg = _with_engine(load_config(argv[0] if named else None, argv[1:] if named else argv))
    fits = _processes_text(cfg)
    print(cfg.to_yaml(), end="", flush=True)
    log.info(f"accepted: a configuration of megaswift {cfg.task}{fits}")
    return 0


def _processes_text(cfg: SwiftConfig) -> str:
    """Say on how many processes the layout was checked.

    Raises:
        ConfigError: The layout does not divide the processes that the options name.
    """
    from megaswift import log
    from megaswift.commands.training import process_count
    from megaswift.errors import ConfigError
    from megaswift.parallel.layout import requested_axis_sizes, size_problems

    axes = requested_axis_sizes(cfg.parallel)
    if not (cfg.launch.nproc_per_node or cfg.launch.nnodes or cfg.launch.num_workers):
        return "" if set(axes.values()) == {1} else "; without --nproc_per_node its layout is not checked"
    count = process_count(cfg.launch)
    if problems := size_problems(count, axes):
        raise ConfigError(problems)
    return f" on {log.count_text(count, 'process')}"


def _with_engine(cfg: SwiftConfig) -> SwiftConfig:
    """The configuration with the engine that a run takes; `auto` where that depends on a model that is not here."""
    from megaswift.engine.options.engine_checks import requested_engine

    if cfg.model.model is not None and Path(cfg.model.model).is_dir():
        from megaswift.commands.training import process_count
        from megaswift.run.checks.engine_choice import resolve_engine

        return resolve_engine(cfg, process_count(cfg.launch))
    requested = requested_engine(cfg)
    return cfg if requested == cfg.engine.engine else cfg.replace(engine=requested)


def _data(argv: list[str]) -> int:
    """`megaswift data show ...`, `megaswift data index ...` and `megaswift data cache ...`."""
    if argv[:1] == ["show"]:
        from megaswift.data.model_tokenizer import tokenizer_or_processor_for
        from megaswift.data.show.samples import main as show

        return show(argv[1:], tokenizer_or_processor_for)
    if argv[:1] == ["index"]:
        from megaswift.data.indexed.write import main as index
        from megaswift.data.model_tokenizer import tokenizer_or_processor_for

        return index(argv[1:], tokenizer_or_processor_for)
    if argv[:1] == ["cache"]:
        from megaswift.data.model_tokenizer import tokenizer_or_processor_for
        from megaswift.data.store.write import main as cache

        return cache(argv[1:], tokenizer_or_processor_for)
    if argv and argv[0] not in HELP:
        raise unknown_command_error("megaswift data", argv[0], ("show", "index", "cache"))
    print("megaswift data show DATASET --model DIR     inspect tokens, loss mask, lengths and packing (show --help)")
    print(
        "megaswift data index DATASET --model DIR --output PREFIX     write Megatron-LM's .bin and .idx (index --help)"
    )
    print(
        "megaswift data cache DATASET --model DIR --output_dir FOLDER     write tokens for several runs (cache --help)"
    )
    return 0 if argv else 2


def _convert(argv: list[str]) -> int:
    """`megaswift convert ...`."""
    from megaswift.commands.convert import convert_command

    return convert_command(argv)


def _checkpoint(argv: list[str]) -> int:
    """`megaswift checkpoint ...`."""
    from megaswift.commands.checkpoint import main as checkpoint

    return checkpoint(argv)


def _report(argv: list[str]) -> int:
    from megaswift.commands.report import main as report

    return report(argv)


def _board(argv: list[str]) -> int:
    from megaswift.commands.board import main as board

    return board(argv)


def _infer(argv: list[str]) -> int:
    from megaswift.infer import main as infer

    return infer(argv)


def _deploy(argv: list[str]) -> int:
    from megaswift.deploy import main as deploy

    return deploy(argv)


def _export(argv: list[str]) -> int:
    from megaswift.export import main as export

    return export(argv)


def _eval(argv: list[str]) -> int:
    from megaswift.eval import main as evaluate

    return evaluate(argv)


def _sample(argv: list[str]) -> int:
    from megaswift.sample import main as sample

    return sample(argv)


def _migrate(argv: list[str]) -> int:
    from megaswift.commands.migrate import main as migrate

    return migrate(argv)


def _submit(argv: list[str]) -> int:
    from megaswift.commands.submit import main as submit

    return submit(argv)


def _plan(argv: list[str]) -> int:
    from megaswift.commands.plan import main as plan

    return plan(argv)


def _simulate(argv: list[str]) -> int:
    from megaswift.commands.simulate import main as simulate

    return simulate(argv)


def _jobs(argv: list[str]) -> int:
    from megaswift.commands.jobs import main as jobs

    return jobs(argv)


def _bench(argv: list[str]) -> int:
    from megaswift.commands.bench import main as bench

    return bench(argv)


def _doctor(argv: list[str]) -> int:
    from megaswift.commands.doctor import main as doctor

    return doctor(argv)


def _bisect(argv: list[str]) -> int:
    from megaswift.commands.bisection import main as bisect

    return bisect(argv)


CONFIG_USAGE = """\
megaswift config [TASK] FILE [--name value ...]     check a configuration and print it with all defaults
megaswift config pt --lr 1e-4 ...                   the same without a file (default task: sft)
megaswift config --schema                           JSON schema of configuration files, for editors

Options are checked, and the layout against --nproc_per_node and --nnodes; neither data nor weights are read.
"""

COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    **{task: (text, _train(task)) for task, text in TASKS.items()},
    "rlhf": ("the task given by --rlhf_type", _train("rlhf")),
    "train": ("the task given by the configuration file or --algorithm", _task_of_options),
    "config": ("check and print a configuration; print the JSON schema", _config),
    "data": ("data show: inspect tokens, masks, lengths; data index: .bin/.idx", _data),
    "convert": ("convert, verify and merge weights (Hugging Face, Megatron)", _convert),
    "checkpoint": ("list, verify and remove the checkpoints of a run", _checkpoint),
    "report": ("compare runs on a page: curves, completions, options", _report),
    "board": ("show, start and stop runs in the browser; chat with their models", _board),
    "infer": ("generate: interactive chat, or batch inference on a prompt file", _infer),
    "deploy": ("serve a model over an OpenAI-compatible API", _deploy),
    "export": ("write a model folder with adapters merged, or quantized", _export),
    "eval": ("scores on tasks of lm-evaluation-harness and files of questions", _eval),
    "sample": ("completions scored with rewards; the best as a data set", _sample),
    "migrate": ("translate scripts and files of other toolkits to YAML files", _migrate),
    "plan": ("layouts that fit on GPUs, with memory and time; needs none", _plan),
    "simulate": ("collectives, memory and pipeline of single ranks of a large run", _simulate),
    "submit": ("submit a run as a job of a cluster", _submit),
    "jobs": ("status, output and end of submitted jobs", _jobs),
    "bench": ("measure communication for each group of a parallel layout", _bench),
    "bisect": ("compare a step of a run with Hugging Face, tensor by tensor", _bisect),
    "doctor": ("check packages, devices, network and other nodes", _doctor),
}

PLAIN_COMMANDS = (
    "config",
    "data",
    "convert",
    "checkpoint",
    "report",
    "board",
    "migrate",
    "plan",
    "simulate",
    "submit",
    "jobs",
    "bench",
    "bisect",
    "doctor",
)
"""Commands whose words are no options of a table, which checks each value."""
MEGATRON_COMMANDS = ("sft", "pt", "rlhf")
"""Commands that ms-swift starts as `megatron COMMAND`: here they train with Megatron-Core by default."""


def usage() -> str:
    """The page of `megaswift --help`."""
    commands = "\n".join(f"  {name:<10} {text}" for name, (text, _) in COMMANDS.items())
    return f"""\
megaswift {__version__}: train Hugging Face models with Megatron-Core

usage: megaswift COMMAND ...     (megaswift COMMAND --help)

{commands}

  megaswift sft --model DIR --dataset data.jsonl
  NPROC_PER_NODE=8 megaswift sft run.yaml --tp 4 --pp 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    code = 0
    try:
        with ignore_closed_stdout():
            code = _run(words)
    finally:
        if argv is None:  # this process is the command
            end_past_calls_left_behind(code)
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in (*HELP, "help"):
        if words[:1] == ["help"] and words[1:]:
            return _run([words[1], "--help", *words[2:]])
        print(usage(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        print(__version__)
        return 0
    if words[0] == "megatron" and len(words) > 1 and words[1] in MEGATRON_COMMANDS:
        words = words[1:]
    try:
        if words[0] not in COMMANDS:
            raise unknown_command_error("megaswift", words[0], COMMANDS)
        if words[0] in PLAIN_COMMANDS:
            refuse_unusable_words(words[1:])
        return COMMANDS[words[0]][1](words[1:])
    except UserError as error:
        return print_error_once(error, os.environ)
    except OSError as error:
        if (refused := storage_error(error)) is None:
            raise
        return print_error_once(refused, os.environ)

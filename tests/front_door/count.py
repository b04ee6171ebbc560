"""How many of other people's commands pass everything that happens before processes start or weights are read.

    python -m tests.front_door.count FOLDER [--list] [--inference]

FOLDER holds shell scripts, such as ms-swift's examples. Each command is typed as it stands, with tiny models of
the same kind and small local data in place of the named ones: options, rules, engine choice and preflight. What depends
on this machine (a GPU, free memory) is left out. Prints the count and the causes of refusals by the number of commands.
--inference counts infer, deploy and export in place of training.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import yaml

from megaswift import log
from megaswift.commands.training import further_problems_of_refused_config, process_count
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.options.spelling import errors_as_typed
from megaswift.options.tasks import ALIGNMENT, RL
from megaswift.run.checks import preflight
from megaswift.run.checks.distillation import teacher_problems
from megaswift.run.checks.engine_choice import resolve_engine
from tests.front_door.commands import INFERENCE, Command, commands_in_folder
from tests.front_door.inference_commands import inference_refusal
from tests.front_door.tiny_models import tiny_model_folder

MODELS = ("model", "model_id", "model_id_or_path", "ref_model", "reward_model", "teacher_model", "value_model")
DATA = ("dataset", "val_dataset", "cached_dataset", "cached_val_dataset")
ROWS = (
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}, '
    '{"role": "assistant", "content": "Paris."}], "rejected_response": "Rome.", "solution": "Paris", "label": true}\n'
)


def replaced(words: Iterable[str], root: Path) -> list[str]:
    """The words with local models, data and output in place of the named ones."""
    out: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            out.append(f"--{name}={_local(name, value, root)}" if equals else word)
        else:
            out.append(_local(name, word, root))
    return out


def replaced_file(path: Path, root: Path) -> str:
    """A copy of a YAML configuration with the same replacements."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        several = [_local(name, str(v), root) for v in (value if isinstance(value, list) else [value])]
        if name in (*MODELS, *DATA, "output_dir"):
            values[name] = several if isinstance(value, list) else several[0]
    copy = root / "copies" / path.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(copy)


def _local(name: str, value: str, root: Path) -> str:
    if name in MODELS:
        folder = tiny_model_folder(value, root, reward=name == "reward_model" or "reward" in value.lower())
        return str(folder) if folder else value
    if name in DATA:
        count = value.partition("#")[2]
        return str(root / "rows.jsonl") + (f"#{count}" if count else "")
    return str(root / "out") if name == "output_dir" else value


def typed(command: Command, root: Path) -> tuple[str | None, list[str], dict[str, str]]:
    """The task, the words and the environment of a command as it is typed here."""
    words = replaced(command.words, root)
    for i, word in enumerate(words):
        if word.endswith((".yaml", ".yml")) and not Path(word).is_absolute():
            name = word.replace("$SCRIPT_DIR", str(Path(command.file).parent))
            places = [home / name for home in (Path(), Path("examples"), Path("examples") / Path(command.file).parent)]
            words[i] = next((replaced_file(path, root) for path in places if path.is_file()), name)
    if not any(w.split("=")[0] in ("--output_dir", "--save") for w in words):
        words += ["--output_dir", str(root / "out")]
    own = {k: OF_CLUSTER.get(v, v) for k, v in command.environ.items()}
    if OF_CLUSTER.keys() & set(command.environ.values()):  # the script counts on a cluster that sets all of them
        own = {"MASTER_ADDR": OF_CLUSTER["$MASTER_ADDR"], "MASTER_PORT": OF_CLUSTER["$MASTER_PORT"]} | own
    environ = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")} | own
    return None if command.task in ("rlhf", "train") else command.task, words, environ


def loaded(command: Command, root: Path) -> SwiftConfig:
    """The configuration of a command that is accepted."""
    task, words, environ = typed(command, root)
    with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(log, "info"):
        return load_config(task, words, complete=True)


def refusal(command: Command, root: Path) -> list[Problem]:
    """What is wrong with a command; empty when it would start."""
    task, words, environ = typed(command, root)
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(log, "info"),
        mock.patch.object(log, "warn"),
    ):
        try:
            cfg = load_config(task, words, complete=True, beyond=further_problems_of_refused_config)
            if command.task == "rlhf" and cfg.task not in ALIGNMENT:
                return [Problem("--rlhf_type", "is missing", "")]
            with errors_as_typed(cfg.typed, NAMES):
                world = process_count(cfg.launch)
                cfg = resolve_engine(cfg, world, tell=False)
                checks = [
                    (lambda: preflight.model_problems(cfg, world), UserError),
                    (lambda: teacher_problems(cfg, world), UserError),
                    (lambda: preflight.rl_run_problems(cfg, world) if cfg.task in RL else [], ConfigError),
                    *preflight.data_output_and_tracker_checks(cfg),
                ]
                errors = preflight.collect_check_errors(checks)
                return [p for error in errors for p in error.problems if not MACHINE.search(p.rule)]
        except UserError as error:
            return [p for p in error.problems if not MACHINE.search(p.rule)]


OF_CLUSTER = {"$WORLD_SIZE": "2", "$RANK": "0", "$MASTER_ADDR": "127.0.0.1", "$MASTER_PORT": "29500"}
"""Variables that a cluster sets."""
MACHINE = re.compile(
    "(needs|requires) the package|is not installed|no CUDA device|no kernel for a CPU|needs a GPU|CUDA device|"
    "cannot be compiled"
)
"""Problems of this machine, not of the command."""


def cause(problem: Problem) -> str:
    """A problem without what differs from command to command."""
    words = problem.what.split()
    name = words[0] if words and words[0].startswith("--") else " ".join(words[:3])
    return re.sub(r"/\S+", "PATH", f"{name}: {problem.rule}")[:150]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="count", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="every command with its problems")
    parser.add_argument("--inference", action="store_true", help="infer, deploy and export")
    args = parser.parse_args(argv)
    commands = [c for c in commands_in_folder(args.folder) if (c.task in INFERENCE) == args.inference]
    judge = inference_refusal if args.inference else refusal
    os.chdir(args.folder.resolve().parent)  # scripts are started where the folder lies
    passed, causes, only = 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "rows.jsonl").write_text(ROWS * 64)
        for command in commands:
            problems = [p for p in judge(command, root) if not MACHINE.search(p.rule)]
            passed += not problems
            found = {cause(p) for p in problems}
            causes.update(found)
            if len(found) == 1:
                only.update(found)
            if args.list:
                print(f"{'ok ' if not problems else 'NO '} {command.file}:{command.line}")
                for p in problems:
                    print(f"      {p.what[:100]} | {p.rule[:140]} | {p.fix[:100]}")
    print(f"{passed} of {len(commands)} commands pass")
    for text, n in causes.most_common(90):
        print(f"{n:5} {only[text]:4}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

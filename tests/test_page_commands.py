"""The commands of the pages: training and inference pass everything that comes before a run starts its processes or
reads weights, with stand-ins for the files that a page supposes; the words of the other commands pass their parsers.

Those of the README and of the tutorials also run: tests/test_tutorials.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import COMMANDS, PLAIN_COMMANDS, main
from megaswift.data import model_tokenizer
from megaswift.errors import Problem, UserError
from megaswift.options.tasks import TASKS
from tests.front_door.commands import INFERENCE, Command
from tests.front_door.count import ROWS, refusal
from tests.front_door.inference_commands import inference_refusal
from tests.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "converters/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
HERE = re.compile(r"<<'(\w+)'.*?^\1$", re.DOTALL | re.MULTILINE)
"""A file that a page writes."""
STARTED = re.compile(r"(?:^|(?<=[\s(]))megaswift(?:/(?:cli/_megatron/)?(\w+)\.py| (\w+))(?: (.*))?$")
ASSIGNED = re.compile(r"(?:^|(?<=\s))([A-Z_]+)=(\S+)(?=\s)")
PARSED = ("eval", "sample")
"""Commands whose words are judged by their parser."""
ENDS = ("&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>", ">/dev/null", '"')
LAUNCHED = re.compile(r"(?:torchrun .*--nproc_per_node|accelerate .*--num_processes|deepspeed .*--num_gpus) (\d+)")
"""A launcher, with the processes that it starts on a node."""
PLACES = {
    "DIR": "Qwen2.5-7B-Instruct",
    "BASE": "Qwen2.5-7B",
    "MODEL": "Qwen2.5-7B-Instruct",
    "GPT_OSS": "gpt-oss-20b",
    "BERT_DIR": "bert-base-uncased",
    "RM_DIR": "Qwen2.5-7B-reward",
    "TEACHER": "Qwen2.5-14B-Instruct",
    "out": "Qwen2.5-7B-Instruct",
    "quickstart-output/model": "Qwen2.5-7B-Instruct",
    "quickstart-output/run/hf": "Qwen2.5-7B-Instruct",
    "lora-merged": "Qwen2.5-7B-Instruct",
    "cluster-out/hf": "Qwen2.5-7B-Instruct",
    "OUT/adapter": "output/adapter",
}
"""A model or adapter of the reader's own, and the name of one that a stand-in is known for."""
RUN = "task: sft\nmodel: Qwen2.5-7B-Instruct\ndataset: [rows.jsonl]\n"
REFUSED = {
    "sft --model Qwen3-8B --dataset d.jsonl --tp 3 --nproc_per_node 8": "a layout that the page shows to be refused",
    "sft --model DIR --dataset AI-ModelScope/alpaca-gpt4-data-zh#500 swift/self-cognition#200 --use_hf false": "the "
    "stand-ins lie on this machine",
    "sft --model megatron-run --hf_config Qwen3-8B --tp 4 --pp 2 --dataset data.jsonl": "the stand-ins are Hugging "
    "Face folders",
    "pt --model DIR --dataset 0.3 web 0.7 code --data_split 98,2,0 --max_steps 1000": "the stand-ins are no .bin files",
    "gkd --model DIR --teacher_logits probabilities --dataset data.jsonl --lmbda 0 --learning_rate 2e-5 --output_dir "
    "out-second": "the command before it, which writes the folder, has not run",
    "export --model DIR --quant_method gptq --quant_bits 4 --dataset data.jsonl#2000 --output_dir SMALL-GPTQ": "the "
    "tests' environment has no llmcompressor",
    "export --model DIR --quant_method awq --quant_bits 4 --dataset data.jsonl --output_dir SMALL-AWQ": "the "
    "tests' environment has no llmcompressor",
}
"""Commands that do not start, and why the page has them."""


def lines(text: str) -> Iterator[str]:
    """The lines of commands, joined, without comments."""
    for _, language, block in FENCE.findall(text):
        if language in ("", "bash", "sh"):
            for line in HERE.sub("", block).replace("\\\n", " ").splitlines():
                yield re.split(r"(?:^|\s)#(?:\s|$)", line.strip())[0].removeprefix("$ ").strip()


def commands(page: Path) -> Iterator[Command]:
    """The commands of megaswift's on a page."""
    for number, line in enumerate(lines(page.read_text(encoding="utf-8"))):
        found = STARTED.search(line)
        if found is None or line.startswith("megaswift: "):
            continue
        name = found[1] or found[2]
        if name not in COMMANDS:
            continue
        following = (found[3] or "").removesuffix('"' if 'bash -c "' in line else "")
        words = shlex.split(following)
        end = next((at for at, word in enumerate(words) if word in ENDS or word.endswith(";")), len(words))
        words = words[:end]
        if launched := LAUNCHED.search(line[: found.start()]):
            words += ["--nproc_per_node", launched[1]]
        environ = dict(ASSIGNED.findall(line[: found.start()] + " "))
        yield Command(page.name, number, "megaswift", name, tuple(words), environ)


ALL = [(page, command) for page in PAGES if "zh-CN" not in page.name for command in commands(page)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("rows", "data", "polite-train"):
        (folder / f"{name}.jsonl").write_text(ROWS * 64)
    for name in ("configs", "scripts", "converters"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "OUT").mkdir()
    for file in ("run.yaml", "OUT/config.yaml"):
        (folder / file).write_text(RUN)
    (folder / "output/adapter").mkdir(parents=True)
    (folder / "output/adapter/adapter_config.json").write_text('{"base_model_name_or_path": "Qwen2.5-7B"}')
    (folder / "my_plugins.py").write_text("")
    (folder / "my_rewards.py").write_text("def brevity(completions, **columns): ...\nexact = brevity\n")
    for page in PAGES:
        for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", page.read_text(), re.DOTALL | re.MULTILINE):
            for own, known in PLACES.items():
                text = re.sub(rf"^model: {own}$", f"model: {known}", text, flags=re.MULTILINE)
            (folder / name).write_text(text)
    return folder


def named(pages: list[tuple[Path, Command]]) -> list[Any]:
    return [pytest.param(command, id=f"{page.name}-{command.task}-{command.line}") for page, command in pages]


@pytest.mark.wide
@pytest.mark.parametrize(
    "command", named([(page, c) for page, c in ALL if c.task in (*TASKS, "rlhf", "train", *INFERENCE, *PARSED)])
)
def test_a_run_may_start(command: Command, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    for name, value in command.environ.items():
        monkeypatch.setenv(name, value)
    judge = {**dict.fromkeys(INFERENCE, inference_refusal), **dict.fromkeys(PARSED, parse_refusal)}.get(
        command.task, refusal
    )
    words = tuple(PLACES.get(word, word) for word in command.words if word != "...")
    problems = judge(Command(**{**vars(command), "words": words}), root)
    shown = " ".join((command.task, *command.words))
    assert bool(problems) == (shown in REFUSED), problems


def parse_refusal(command: Command, root: Path) -> list[Problem]:
    """What the parser of a command refuses; files that the pages write lie in the working folder."""
    words = [str(root / word) if word.startswith("output/") else word for word in command.words]
    try:
        importlib.import_module(f"megaswift.{command.task}").COMMAND.parse(words)
    except UserError as error:
        return [*error.problems]
    return []


RUN_ELSEWHERE = "data.md"
"""tests/data/test_commands_of_the_data_page.py"""


class ParsedError(Exception):
    """The words have passed the parser."""


@pytest.mark.parametrize(
    "command", named([(page, c) for page, c in ALL if c.task in PLAIN_COMMANDS and page.name != RUN_ELSEWHERE])
)
def test_the_words_are_understood(command: Command, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops behind the parser of a command; that of `data` has read its words when it asks for the tokenizer."""
    monkeypatch.chdir(root)
    if command.task == "config":
        assert main([command.task, *command.words]) == 0
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **more: Any) -> None:
        parse(self, *given, **more)
        raise ParsedError

    def read(*given: Any) -> None:
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    monkeypatch.setattr(model_tokenizer, "tokenizer_or_processor_for", read)
    with pytest.raises(ParsedError):
        main([command.task, *command.words])

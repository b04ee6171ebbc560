"""The conversation in the terminal: what goes into the model, commands, Ctrl-C, a process with a pipe."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.inference.chat_inputs import ChatInputRenderer
from megaswift.inference.generator import GenerationParams, Generator
from megaswift.inference.model import ModelConfigAndTokenizer
from megaswift.inference.options.commands import ChatTemplateOptions
from megaswift.serve.terminal import Terminal
from tests.inference.models import opened, plain
from tests.sources import ROOT

NEW = 6


@pytest.fixture(scope="module")
def open_model(model: Path) -> tuple[ModelConfigAndTokenizer, Generator]:
    return opened(model)


def conversation(
    open_model: tuple[ModelConfigAndTokenizer, Generator], lines: list[str], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[str, Terminal]:
    prepared, generator = open_model
    out = io.StringIO()
    terminal = Terminal(
        generator,
        ChatInputRenderer(prepared, ChatTemplateOptions(system=how.get("system"))),
        GenerationParams(),
        how.get("new", NEW),
        stream=how.get("stream", True),
        out=out,
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    terminal.run()
    return out.getvalue(), terminal


def expected(model: Path, turns: list[str], system: str = "") -> list[str]:
    """Answers to these questions, each with all that was said before."""
    tokenizer, theirs = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    text, found = f"<u>{system}<e>" if system else "", []
    for turn in turns:
        text += f"<u>{turn}<e><a>"
        found += plain(theirs, tokenizer, [tokenizer(text)["input_ids"]], NEW, do_sample=False)
        text += f"{found[-1]}<e>"
    return found


def test_turns_build_on_one_another_until_they_are_cleared(
    model: Path, open_model: tuple[ModelConfigAndTokenizer, Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, terminal = conversation(
        open_model, ["1+2?", "and \\", "x", "/clear", "1+2?", "", "/quit", "never"], monkeypatch, system="be"
    )
    want = expected(model, ["1+2?", "and \nx"], "be")
    assert [m["content"] for m in terminal.messages] == ["1+2?", want[0]]
    assert out.count(want[0]) == 2 and want[1] in out and "conversation cleared" in out and "never" not in out
    assert out.index(want[0]) < out.index(want[1])


def test_an_answer_is_printed_when_it_is_complete(
    model: Path, open_model: tuple[ModelConfigAndTokenizer, Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    (want,) = expected(model, ["1+2?"])
    shown: list[str] = []
    monkeypatch.setattr(Terminal, "_show", lambda self, text, logprobs: shown.append(text))
    conversation(open_model, ["1+2?"], monkeypatch, stream=False)
    assert shown == [want]
    shown.clear()
    conversation(open_model, ["1+2?"], monkeypatch)
    assert len(shown) > 1 and "".join(shown) == want


def test_what_looks_like_a_command_is_not_sent(
    open_model: tuple[ModelConfigAndTokenizer, Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, terminal = conversation(open_model, ["/clera", "/save a.txt", "/usr/bin", "//ab"], monkeypatch)
    assert [m["content"] for m in terminal.messages[::2]] == ["/ab"]
    for part in (
        "(/clera is not a command: did you mean /clear?; to send it to the model, write //clera)",
        "(/save is not a command: the commands are /clear, /help, /image, /quit; to send",
        "(/usr/bin is not a command: ",
    ):
        assert part in out


def test_a_conversation_that_grows_too_long_is_told(
    open_model: tuple[ModelConfigAndTokenizer, Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, terminal = conversation(open_model, ["a" * 130, "b"], monkeypatch)
    assert (
        "the prompt has 133 tokens; prompt and answer must fit the context length of 128" in out
        and [m["content"] for m in terminal.messages][0] == "b"
    )


def test_ctrl_c_stops_an_answer_and_keeps_it(
    open_model: tuple[ModelConfigAndTokenizer, Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    slow = open_model[1].model.register_forward_hook(lambda *_: time.sleep(0.05))
    try:
        timer.start()
        out, terminal = conversation(open_model, ["ab"], monkeypatch, new=100)
    finally:
        timer.join()
        slow.remove()
        signal.signal(signal.SIGINT, before)
    assert "(stopped)" in out and len(terminal.messages) == 2 and 0 < len(terminal.messages[1]["content"]) < 100


@pytest.mark.process
@pytest.mark.slow
def test_the_command_with_a_pipe(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megaswift", "infer", "--model", str(model), "--max_new_tokens", str(NEW)],
        input="1+2?\n",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "(the whole model)  cpu" in done.stderr
    assert done.stdout.startswith(expected(model, ["1+2?"])[0])

"""Interactive chat in the terminal: streamed answers; Ctrl-C stops an answer, Ctrl-D exits.

Owns the loop and the signal handling. Standard input that is not a terminal is read line by line, so that messages can
be piped in.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from megaswift.errors import did_you_mean_hint
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer
from megaswift.inference.generator import AnswerRequest, GenerationParams, Generator

HELP = """\
/clear clears the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer,
a line that ends in \\ continues on the next line, //TEXT sends /TEXT
/image FILE attaches an image to the next message (vision-language models)"""
ASK = "> "
COMMANDS = ("/clear", "/help", "/image", "/quit")


@dataclass
class Terminal:
    """One conversation."""

    generator: Generator
    prompts: ChatInputRenderer
    sampling: GenerationParams
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stream: bool = True
    """Whether an answer is printed while it is generated."""
    out: TextIO = field(default_factory=lambda: sys.stdout)
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """Image parts of the next message."""

    def run(self) -> None:
        """Runs the chat until the input ends."""
        greet(HELP, self.out)
        while (question := read_text(self.out)) is not None:
            if question == "/quit":
                return
            if question == "/clear":
                self.messages.clear()
                self.images.clear()
                print("(conversation cleared)", file=self.out)
            elif question == "/help":
                print(HELP, file=self.out)
            elif question.partition(" ")[0] == "/image":
                self._look(question.removeprefix("/image").strip())
            elif question.startswith("/") and not question.startswith("//"):
                print(_unknown(question), file=self.out)
            elif question:
                question = question[1:] if question.startswith("//") else question
                self.answer(question)

    def _look(self, path: str) -> None:
        """An image for the next question."""
        try:
            self.images.append(self.prompts.image(path))
        except ChatInputError as error:
            print(f"({error})", file=self.out)
        else:
            print("(attached to the next message)", file=self.out)

    def answer(self, question: str) -> None:
        """Sends a message and streams the answer to `out`."""
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        messages = [*self.messages, {"role": "user", "content": content}]
        try:
            request = self.prompts.request(
                self.prompts.of_chat(messages),
                self.max_new_tokens,
                self.stop,
                listener=self._show if self.stream else None,
            )
        except ChatInputError as error:
            print(f"({error}; /clear clears the conversation)", file=self.out)
            return
        self.images = []
        with _ctrl_c_stops(request):
            completion = self.generator.generate([request], self.sampling)[0]
        if not self.stream:
            self._show(completion.text, ())
        ended = {"length": f"(stopped after {completion.tokens} tokens)", "cancelled": "(stopped)"}.get(
            completion.reason, ""
        )
        print(f" {ended}".rstrip(), file=self.out, flush=True)
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]

    def _show(self, text: str, logprobs: Any) -> None:
        print(text, end="", file=self.out, flush=True)


def _unknown(question: str) -> str:
    """The hint for a line that begins like a command; it is not sent to the model."""
    word = question.split()[0]
    meant = did_you_mean_hint(word, COMMANDS) or f"the commands are {', '.join(COMMANDS)}"
    return f"({word} is not a command: {meant}; to send it to the model, write /{word})"


def greet(text: str, out: TextIO) -> None:
    """Tell a person, not a pipe, what can be typed."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys and history for input())
        print(text, file=out)


def read_text(out: TextIO) -> str | None:
    """Return what is typed next, lines that end in a backslash joined with the next; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            prompt = "  " if lines else ASK
            line = input(prompt) if sys.stdin.isatty() else _line()
        except EOFError:
            print(file=out)
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D exits)", file=out)
            lines.clear()
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines).strip()


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextlib.contextmanager
def _ctrl_c_stops(request: AnswerRequest) -> Iterator[None]:
    """The first Ctrl-C ends the answer at the next token, a second one the program."""

    def stop(number: int, frame: Any) -> None:
        if request.cancelled:
            raise KeyboardInterrupt
        request.cancelled = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

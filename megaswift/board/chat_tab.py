"""The tab in which one talks to the model of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import gradio as gr

from megaswift.board.chat import Chat, ChatError

MAX_TOKENS = 256
NOTE = (
    "The first run shown answers: its export, its adapter, or its newest checkpoint. The first question loads the "
    "model, which takes memory of this machine's devices, and 10 minutes without a question end it."
)


def chat_tab(chat: Chat, chosen: gr.Dropdown, folder_of: Callable[[Sequence[str]], Path | None]) -> None:
    """Build the content of the tab.

    Args:
        chat: The models.
        chosen: The runs that are shown.
        folder_of: Returns the folder of the first of these runs.
    """
    gr.HTML(f"<p>{NOTE}</p>")
    facts: dict[str, Any] = {"render_markdown": False, "sanitize_html": True, "feedback_options": None}
    talk = gr.Chatbot(label="Chat", height=420, buttons=[], **facts)
    message = gr.Textbox(label="Message", lines=1, max_lines=8, submit_btn="Send", elem_id="chat-message")
    with gr.Row():
        system = gr.Textbox(label="System message", lines=1, max_lines=4)
        tokens = gr.Number(MAX_TOKENS, label="Maximum tokens", precision=0, minimum=1)
        temperature = gr.Textbox(label="Temperature", placeholder="the model's own; 0: greedy", lines=1)
    with gr.Row():
        halt = gr.Button("Interrupt")
        clear = gr.Button("New conversation")
        unload = gr.Button("End the model")

    def send(
        keys: list[str], said: list[Any], text: str, system: str, tokens: float | None, temperature: str
    ) -> Iterator[list[Any]]:
        if not text.strip():
            yield [said, text]
            return
        history = [*said, _shown("user", text)]
        asked = [{"role": "system", "content": system}] if system.strip() else []
        asked += [{"role": each["role"], "content": _text(each["content"])} for each in history]
        yield [[*history, _shown("assistant", "...")], ""]
        folder = folder_of(keys)
        try:
            if folder is None:
                raise ChatError("Choose a run above.")
            wishes = {"max_tokens": int(tokens or MAX_TOKENS), "temperature": _temperature(temperature)}
            for answer in chat.answer(folder, asked, **wishes):
                yield [[*history, _shown("assistant", answer)], gr.skip()]
        except ChatError as error:
            gr.Warning(escape(str(error)), duration=None)  # which renders HTML
            yield [said, text]

    asking = message.submit(
        send, [chosen, talk, message, system, tokens, temperature], [talk, message], concurrency_limit=None
    )
    halt.click(None, None, None, cancels=[asking])
    clear.click(lambda: [], None, talk, cancels=[asking])
    unload.click(chat.close, None, None, cancels=[asking])


def _temperature(text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise ChatError(f"Temperature: {text} is not a number.") from None


def _shown(role: str, text: str) -> dict[str, str]:
    """A message for Gradio, which would render HTML in it: the user sees the characters themselves."""
    return {"role": role, "content": escape(text, quote=False)}


def _text(content: Any) -> str:
    """The text of a message that Gradio holds."""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return unescape("".join(map(str, parts)))

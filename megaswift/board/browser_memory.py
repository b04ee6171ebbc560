"""Values of widgets that the browser keeps for the next visit, in its local storage.

Gradio's own component for that (6.31) still holds its default when the page's load event asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr


class BrowserMemory:
    """Values that the browser keeps under a name."""

    def __init__(self, name: str) -> None:
        self.name = json.dumps(name)
        self._carrier = gr.JSON(visible=False)

    def keep(self, triggers: Sequence[Any], widgets: Sequence[Any]) -> None:
        """Keep the values of widgets whenever one of the triggers fires. Runs in the browser alone."""
        js = f"(...values) => {{ localStorage.setItem({self.name}, JSON.stringify(values)); }}"
        gr.on(triggers, None, [*widgets], None, js=js, trigger_mode="multiple")

    def recall(self, page: gr.Blocks, show: Callable[[list[Any]], list[Any]], outputs: Sequence[Any]) -> None:
        """Call `show` with the values that were kept, an empty list if none were, when the page is opened."""
        kept = f"JSON.parse(localStorage.getItem({self.name}) || '[]')"
        js = f"() => {{ try {{ return [{kept}]; }} catch {{ return [[]]; }} }}"
        page.load(show, [self._carrier], [*outputs], js=js, show_progress="hidden")

"""Which of Transformer Engine's attention kernels an engine takes, for the length of its passes.

Megatron-Core writes the choice into environment variables when a model is built, and fails when another model wrote
others; Transformer Engine reads them at its first pass and keeps what it found. So the second of two engines of
different `--attn_impl` in one process would not be built, or would silently use the first one's kernels. Here the
variables hold while an engine builds or computes, and Transformer Engine looks again when they change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
CHOOSER = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"

Variables = dict[str, str | None]


def _present() -> Variables:
    return {name: os.environ.get(name) for name in VARIABLES}


def _write(values: Variables) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _restored() -> Iterator[None]:
    before = _present()
    try:
        yield
    finally:
        _write(before)


class TEAttentionBackendEnv:
    """The variables of one engine; `chosen` False: the user's own, or none, so that Transformer Engine chooses."""

    last_used: Variables | None = None
    """The variables of the engine that computed last in this process."""

    def __init__(self, chosen: bool) -> None:
        self.chosen = chosen
        self.values = _present()

    @contextmanager
    def building(self) -> Iterator[None]:
        """While a model is built: Megatron-Core finds no variable and writes its own, which are kept."""
        with _restored():
            _write(dict.fromkeys(VARIABLES))
            yield
            if self.chosen:
                self.values = _present()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the model computes."""
        with _restored():
            _write(self.values)
            chooser = sys.modules.get(CHOOSER)
            if chooser is not None and TEAttentionBackendEnv.last_used != self.values:
                chooser._attention_backends["backend_selection_requires_update"] = True
                TEAttentionBackendEnv.last_used = self.values
            yield

"""No name of Megatron-Core that the engine uses is missing in the newest supported release."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from tests.engine.megatron.names_of_newest_release import NAMES, defined, sources, used, used_of

RENAMED = {"get_main_grads_for_grad_norm": "get_grads_for_grad_norm"}
"""Names of older releases and of the newest, where the engine takes the one that there is."""


@pytest.mark.wide
def test_names_that_the_engine_uses(megatron: ModuleType) -> None:
    """Of the installed release; a file has those of the newest."""
    newest = set(NAMES.read_text().split())
    known = newest | {old for old, new in RENAMED.items() if new in used()}
    installed = used_of(sources(Path(megatron.__file__ or "").parent))
    missing = {name: place for name, place in installed.items() if name not in known}
    how = "python -m tests.engine.megatron.names_of_newest_release WHEEL writes its names anew"
    assert not missing, f"not known to be in Megatron-Core's newest supported release ({how}): {missing}"


@pytest.mark.wide
def test_both_names_of_the_layer_inside_a_layer_for_multi_token_prediction(megatron: ModuleType) -> None:
    """Megatron-Core's schedules set the micro-batch's number on `transformer_layer` (0.16) or `mtp_model_layer`
    (0.19)."""
    from megaswift.engine.megatron.layers.mtp import MtpLayer

    layer = MtpLayer.__new__(MtpLayer)
    nn.Module.__init__(layer)
    layer.transformer_layer = nn.Identity()
    assert layer.mtp_model_layer is layer.transformer_layer


def test_what_counts_as_defined() -> None:
    """Methods, parameters, fields and attributes; not what is only read."""
    text = "class A:\n    b: int = 0\n    def c(self, d, *, e=1):\n        self.f = g.h(k=2)\n        async_name = 3\n"
    assert defined([text]) == {"A", "b", "c", "self", "d", "e", "f", "async_name"}

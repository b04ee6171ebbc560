"""A release of Transformer Engine as the one that argument lists belong to, for tests that call stand-ins directly."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.te import registry, sources


@pytest.fixture(params=sources.RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each release's compiled module in place, without its Python."""
    module = registry.module(request.param)
    module.__release__ = request.param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)
    yield request.param

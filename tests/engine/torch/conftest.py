"""The model folder of these tests, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.models import build


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense model whose every parameter moves the loss."""
    return build("dense", tmp_path_factory.mktemp("torch-models") / "dense")

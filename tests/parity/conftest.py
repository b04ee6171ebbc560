"""The oracle's numbers, once a test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.references import References


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tiny models are made in."""
    return tmp_path_factory.mktemp("parity-models")


@pytest.fixture(scope="session")
def references(models: Path) -> References:
    """Hugging Face's numbers, with auxiliary losses for MoE models."""
    return References(models)

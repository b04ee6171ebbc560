"""The rank processes and the oracle's numbers, once a test session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.pool import Pool
from tests.parity.references import References


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight rank processes at most, imports paid once."""
    with Pool() as started:
        yield started


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tiny models are made in."""
    return tmp_path_factory.mktemp("parity-models")


@pytest.fixture(scope="session")
def references(models: Path) -> References:
    """Hugging Face's numbers, with auxiliary losses for MoE models."""
    return References(models)

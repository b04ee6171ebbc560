"""The model that answers in most of these tests; each file has its own, beside which it may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.models import folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's."""
    return folder(tmp_path_factory.mktemp("inference") / "model")

"""What the tests of rollouts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.models import folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in Hugging Face format."""
    return folder(tmp_path_factory.mktemp("rollout") / "model")

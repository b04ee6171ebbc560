"""What tests of rows with images share: processors of two families, and a folder with pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.data.vision.processor import Processor
from tests.data.makers import vision_processor
from tests.parity import vision


@pytest.fixture(scope="module", params=["llava", "gemma3"])
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """Of a tiny model."""
    return vision_processor(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With images/0.png and so on."""
    vision.write_images(tmp_path / "images")
    return tmp_path

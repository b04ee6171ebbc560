"""Folders that tests share (read only), and fresh copies to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bridge.folders import make


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where variants are made once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def fresh(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a variant's folder that a test may damage."""
    return lambda variant: Path(shutil.copytree(make(variant, folders), tmp_path / variant))

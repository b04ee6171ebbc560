"""What every test may use: one thread a process, no hub, and a tiny tokenizer with tiny models of each family, made on the spot."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="session")
def megatron() -> ModuleType:
    """megatron.core, made to run without CUDA: our engine package has to be imported before it, whichever test comes first."""
    importlib.import_module("megaswift.engine.megatron")
    importlib.import_module("megatron.core.transformer")
    return importlib.import_module("megatron.core")

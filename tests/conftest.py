"""What every test may use: one thread a process, no hub, and rank processes that have paid for their imports."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from megaswift import error_exit
from tests.parity.pool import Pool, close_shared, shared

TE = (
    "engine/megatron/optim/test_clipping.py",
    "memory/test_activation_bytes.py",
    "memory/test_state_bytes.py",
    "net/test_layouts.py",
    "parity/test_capacity.py",
    "parity/test_cuda_graphs.py",
    "parity/test_fp8.py",
    "parity/test_fp8_tensor_parallel.py",
    "parity/test_fp8_token_parallel.py",
    "parity/test_fp8_weights.py",
    "parity/test_gradient_accumulation_fusion.py",
    "parity/test_lora_te.py",
    "parity/test_mtp.py",
    "parity/test_prefix_sharing.py",
    "parity/test_te.py",
    "parity/test_te_families.py",
    "parity/test_tp_comm_overlap.py",
    "placement/test_placement.py",
    "te/test_attention_backend.py",
    "te/test_cross_entropy.py",
    "te/test_fp8_tensor_parallel.py",
    "te/test_ranks_without_tokens.py",
    "te/test_resume.py",
)
"""Files whose ranks import Transformer Engine, some ten seconds a release."""
PARSED = (
    "config/test_every_inference_option_is_read.py",
    "engine/test_group_backends.py",
    "engine/test_squared_norm.py",
    "test_layers.py",
    "test_mirror.py",
    "test_named_modules.py",
    "test_names_in_text.py",
    "test_style.py",
)
"""Files that look at the repository's own sources, whose parsing takes some five seconds."""
TOGETHER = dict.fromkeys(TE, "transformer engine") | dict.fromkeys(PARSED, "sources")
"""File below tests/ -> the group that one worker runs."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Images set the variable: each of the many processes would compile the sources anew, and pytest rewrite its files."""
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
"""torch looks up the name of each connection's address: a name service that is slow to answer must not make tests wait,
in this process and those that it starts."""
is_watched = error_exit.is_watched
error_exit.is_watched = lambda: True
"""A command that a test runs in this process does not end it."""
gc.disable()  # what is imported and collected stays to the end: the collector would look through it again and again


def pytest_collection_finish() -> None:
    """From here on the collector looks at what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process, unless pytest has yet to say what was wrong with its arguments: Python would free for five
    seconds what was imported."""
    session = config.pluginmanager.getplugin("session")
    if session is not None and session.exitstatus != pytest.ExitCode.USAGE_ERROR:
        error_exit.is_watched = is_watched
        error_exit.end_process(int(session.exitstatus))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together under `--dist loadfile`, and so do the files of a group."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file.removeprefix("tests/"), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def megatron() -> ModuleType:
    """megatron.core, made to run without CUDA: our engine package has to be imported before it, whichever test comes
    first."""
    importlib.import_module("megaswift.engine.megatron")
    importlib.import_module("megatron.core.transformer")
    return importlib.import_module("megatron.core")


@pytest.fixture(scope="session", autouse=True)
def _pool_ends() -> Iterator[None]:
    """Whoever started the pool: it ends with the session."""
    yield
    close_shared()


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Eight rank processes at most."""
    return shared()


@pytest.fixture(scope="session")
def te_pool() -> Pool:
    """The same with Transformer Engine on the test device."""
    from tests.te.sources import RELEASES

    return shared(RELEASES[0])


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer, a new one for each file: tests set its options between cases."""
    from tests.losses import trainers

    return trainers.grpo(tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def reinforce(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer of REINFORCE leave-one-out."""
    from tests.losses import trainers

    return trainers.rloo(tmp_path_factory.mktemp("rloo"))

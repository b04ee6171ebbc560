"""`--tf32`: torch's switches, and the devices and modules that cannot follow. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megaswift.engine.tf32 import set_tf32, tf32_problems


@pytest.fixture
def switches() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("tf32", [True, False, None])
def test_switches(tf32: bool | None, before: bool, switches: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
    set_tf32(tf32)
    wanted = before if tf32 is None else tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (wanted, wanted)


@pytest.mark.parametrize(
    ("tf32", "capability", "dtype", "transformer_engine", "rule"),
    [
        (True, None, "float32", True, "there is no CUDA device"),
        (False, None, "float32", True, ""),
        (None, None, "float32", True, ""),
        (True, (7, 5), "float32", True, "needs a GPU of compute capability 8.0 or later, and this one has 7"),
        (True, (9, 0), "float32", True, ""),
        (False, (9, 0), "float32", True, "Transformer Engine always rounds"),
        (False, (9, 0), "float32", False, ""),
        (False, (9, 0), "bfloat16", True, ""),
        (False, (7, 5), "float32", True, ""),
    ],
)
def test_devices(
    tf32: bool | None,
    capability: tuple[int, int] | None,
    dtype: str,
    transformer_engine: bool,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = [p.rule for p in tf32_problems(tf32, dtype, transformer_engine)]
    assert len(found) == bool(rule) and all(rule in text for text in found)

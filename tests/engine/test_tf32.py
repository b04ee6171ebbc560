"""`--tf32`: torch's switches, and the devices and modules that cannot follow. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.engine.tf32 import set_tf32, tf32_problems


def config(tf32: bool | None, **options: Any) -> SwiftConfig:
    return SwiftConfig(task="sft", model="m", **options | ({} if tf32 is None else {"tf32": tf32}))


@pytest.fixture
def switches() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("tf32", [True, False, None])
def test_switches(tf32: bool | None, before: bool, switches: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
    set_tf32(config(tf32))
    wanted = before if tf32 is None else tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (wanted, wanted)


@pytest.mark.parametrize(
    ("tf32", "capability", "options", "rule"),
    [
        (True, None, {}, "there is no CUDA device"),
        (False, None, {"torch_dtype": "float32"}, ""),
        (None, None, {}, ""),
        (True, (7, 5), {}, "needs a GPU of compute capability 8.0 or later, and this one has 7"),
        (True, (9, 0), {}, ""),
        (False, (9, 0), {"torch_dtype": "float32"}, "Transformer Engine always rounds"),
        (False, (9, 0), {"torch_dtype": "float32", "transformer_impl": "torch"}, ""),
        (False, (9, 0), {"torch_dtype": "float32", "engine": "ddp"}, ""),
        (False, (9, 0), {"torch_dtype": "bfloat16"}, ""),
        (False, (9, 0), {}, "Transformer Engine always rounds"),  # the checkpoint's dtype
        (False, (7, 5), {"torch_dtype": "float32"}, ""),
    ],
)
def test_devices(
    tf32: bool | None,
    capability: tuple[int, int] | None,
    options: dict[str, Any],
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = [p.rule for p in tf32_problems(config(tf32, **options), "float32")]
    assert len(found) == bool(rule) and all(rule in text for text in found)

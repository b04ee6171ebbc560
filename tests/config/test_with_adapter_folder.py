"""A configuration that starts from adapters which its own options have made.

Covers: megaswift/config/swift_config.py.
"""

from __future__ import annotations

from megaswift.config import SwiftConfig


def test_later_changes_keep_the_folder() -> None:
    """Rank and targets are refused beside a folder that a user gives; here they made it."""
    cfg = SwiftConfig(train_type="lora", lora_rank=4, target_modules=("q_proj",), init_weights="pissa")
    started = cfg.with_adapter_folder("made")
    assert cfg.lora.adapters is None and started.lora.adapters == "made"
    changed = started.replace(padding_free=False).replace(lr=1e-3)
    assert changed.lora.adapters == "made" and changed.lora.lora_rank == 4
    assert changed.data.padding_free is False and changed.optim.learning_rate == 1e-3
    assert cfg.replace(padding_free=False).lora.adapters is None

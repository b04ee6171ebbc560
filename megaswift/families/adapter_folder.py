"""What an adapter folder says of itself. No torch, no peft."""

from __future__ import annotations

import json
from pathlib import Path


def kind_of(adapter: Path) -> str:
    """peft_type of an adapter folder in small letters; LoRA where it cannot be told, whose reader says what is wrong."""
    try:
        return str(json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["peft_type"]).lower()
    except (OSError, ValueError, KeyError, TypeError):
        return "lora"

"""Layer 1: the configuration of a run: the options of all parts as one tree, the rules between parts, and the values
that follow from them. No torch.

`SwiftConfig` and `load_config` are looked up on first use: a module below needs the other modules only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaswift.config.swift_config import SwiftConfig, load_config

__all__ = ["SwiftConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("megaswift.config.swift_config"), name)
    raise AttributeError(f"module 'megaswift.config' has no attribute {name!r}")

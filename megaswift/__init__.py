"""megaswift: train any supported Hugging Face model with Megatron-Core on any parallel layout.

Owns the names of the Python API. They are looked up on first use, so that `import megaswift` and `--help` need no
torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from megaswift.version import __version__

__all__ = ["SwiftConfig", "Trainer", "__version__"]

_WHERE = {"SwiftConfig": "megaswift.config", "Trainer": "megaswift.api"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        importlib.import_module("megaswift.error_exit").explain_uncaught_errors()
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'megaswift' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])

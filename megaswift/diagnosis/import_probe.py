"""A program: imports torch and the modules named as arguments, and prints a line of JSON for each.

It is a process of its own because a library built for another torch can end the process that imports it. Other errors
of an import end this program; the caller reads the last line of standard error and starts it again for the rest.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Version, CUDA, NCCL and devices of the installed torch."""
    import torch

    cuda = torch.cuda.is_available()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if cuda else 0)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        "cuda_available": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "architectures": torch.cuda.get_arch_list() if cuda else [],
        "devices": [{"name": p.name, "memory": p.total_memory, "capability": [p.major, p.minor]} for p in properties],
    }


def main(names: list[str]) -> int:
    """`names`: torch first. Output of the libraries themselves goes to standard error."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in names:
        row: dict[str, Any] = {"module": name, "error": ""}
        try:
            if name == "torch":
                row["facts"] = torch_facts()
            else:
                importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(row), file=lines, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

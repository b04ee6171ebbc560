"""torchvision's Python beside a torch without CUDA, for tests: put this folder on PYTHONPATH.

Published torchvision is compiled for the CUDA build of torch, and beside a CPU build its own import fails, since two
operators of object detection are not registered. They are declared here, when torchvision is first asked for; scaling
images and videos is written in terms of torch's operators and is torchvision's own.
"""

from __future__ import annotations

import sys
from typing import Any

OPERATORS = ("nms", "qnms")


class DeclaredOperators:
    """An import hook that finds nothing itself."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS if torch.version.cuda is None else ():
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclaredOperators())  # type: ignore[arg-type]

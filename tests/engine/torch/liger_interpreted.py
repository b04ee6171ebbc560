"""liger-kernel's kernels computed by Triton's interpreter, without a GPU, beside transformers' own layers: the largest
differences.

A program of its own: the interpreter is chosen before Triton is imported. Two things that it cannot do are done for it
here: scalars that are floats become tensors, and functions of CUDA's library are written out.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoModelForCausalLM
from triton.runtime import interpreter

from megaswift.engine.torch.model import apply_liger
from tests.parity.models import config, randomize

_plain = interpreter._implicit_cvt


def _with_floats(arg: Any) -> Any:
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
    return _plain(arg)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


interpreter._implicit_cvt = _with_floats
rms_norm.rsqrt, geglu.tanh = _rsqrt, _tanh


def main(variant: str) -> dict[str, Any]:
    """Of the logits, and of the gradients as a share of each tensor's largest value; which kernels ran."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32)
    randomize(plain, 3)
    fast = copy.deepcopy(plain)
    apply_liger(fast)
    ids = torch.randint(3, 60, (2, 9))
    ours, theirs = fast(input_ids=ids).logits, plain(input_ids=ids).logits
    kernels = {node.name() for node in _nodes(ours.grad_fn) if "Liger" in node.name()}
    for logits in (ours, theirs):
        logits.square().mean().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(fast.parameters(), plain.parameters(), strict=True)]
    worst = max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)
    return {"logits": float((ours - theirs).abs().max()), "gradients": worst, "kernels": sorted(kernels)}


def _nodes(end: Any) -> list[Any]:
    """Of the graph that a gradient goes through."""
    found, waiting = set(), [end]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [n for n, _ in node.next_functions]
    return list(found)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

"""liger-kernel's kernels in a model without a GPU: what is replaced, what must stay, and what they compute in Triton's
interpreter."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch

from megaswift.engine.torch.model import apply_liger
from megaswift.errors import ConfigError
from tests.parity.models import VARIANTS, config
from tests.sources import ROOT


def model(variant: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    made: torch.nn.Module = AutoModelForCausalLM.from_config(config(variant))
    return made


def test_layers_are_replaced_and_the_head_is_not() -> None:
    """`logits_to_keep` picks the columns that have labels; a fused loss would take the logits away."""
    pytest.importorskip("liger_kernel")
    made = model("dense")
    forward, names = type(made).forward, list(made.state_dict())
    apply_liger(made)
    assert type(made).forward is forward and "forward" not in vars(made)
    assert "logits_to_keep" in inspect.signature(made.forward).parameters
    norms = [m for n, m in made.named_modules() if n.endswith("norm")]
    assert norms and all("liger" in m.forward.__func__.__module__ for m in norms), "norms are transformers' still"
    assert list(made.state_dict()) == names


def test_an_architecture_without_kernels_is_refused() -> None:
    pytest.importorskip("liger_kernel")
    assert "minimax_m2" in VARIANTS
    with pytest.raises(ConfigError, match="has no kernels for model_type minimax_m2"):
        apply_liger(model("minimax_m2"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dense", "llama", "gemma2"])
def test_the_kernels_compute_what_transformers_does(variant: str) -> None:
    """By Triton's interpreter, which computes on a CPU what a GPU would be given."""
    pytest.importorskip("liger_kernel")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.torch.liger_interpreted", variant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logits"] < 1e-5 and found["gradients"] < 1e-5, found
    assert any("RMSNorm" in k for k in found["kernels"]) and any("Rope" in k for k in found["kernels"]), found

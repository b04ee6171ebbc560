"""How a folder stores its experts, as its tensors' names tell.

Covers: megaswift/models/stored_form.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaswift.models.stored_form import has_stacked_experts, stored_experts_form

STACK = "model.language_model.layers.3.mlp.experts.gate_up_proj"
OWN = "model.language_model.layers.3.mlp.experts.0.gate_proj.weight"
PREDICTION = "mtp.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("names", "stacked"),
    [
        ([STACK], True),
        ([STACK.replace("language_model.", "")], True),
        ([OWN, PREDICTION], False),
        ([STACK, PREDICTION.replace(".experts.gate_up_proj", ".experts.0.gate_proj.weight")], True),
    ],
)
def test_names(names: list[str], stacked: bool, tmp_path: Path) -> None:
    assert has_stacked_experts(names) is stacked
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert stored_experts_form(tmp_path) is stacked
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_experts_form(tmp_path) is stacked


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"[]", b'{"weight_map": 3}'])
def test_no_weights_or_damaged_ones(content: bytes, tmp_path: Path) -> None:
    """Whoever reads them says so."""
    assert stored_experts_form(tmp_path) is None
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(content)
        assert stored_experts_form(tmp_path) is None

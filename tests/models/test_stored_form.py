"""How a folder stores its experts, as its tensors' names tell, and what a checkpoint adds.

Covers: megaswift/models/stored_form.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaswift.models.stored_form import CHECKPOINT_FACTS, StoredForm, read_stored_form

STACK = "model.language_model.layers.3.mlp.experts.gate_up_proj"
OWN = "model.language_model.layers.3.mlp.experts.0.gate_proj.weight"
AHEAD = "mtp.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ([STACK], StoredForm(True)),
        ([STACK.replace("language_model.", "")], StoredForm(True)),
        ([OWN, AHEAD], StoredForm(False, True)),
        ([STACK, AHEAD.replace(".experts.gate_up_proj", ".experts.0.gate_proj.weight")], StoredForm(True)),
    ],
)
def test_names(names: list[str], form: StoredForm, tmp_path: Path) -> None:
    assert StoredForm.of_names(names) == form
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert read_stored_form(tmp_path) == form
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_stored_form(tmp_path) == form


@pytest.mark.parametrize("form", [StoredForm(), StoredForm(True, False, 2), StoredForm(mtp_stacked_experts=True)])
def test_a_checkpoint_says_it(form: StoredForm, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_FACTS).write_text(json.dumps({"format": 1, **form.facts()}))
    assert read_stored_form(tmp_path) == form


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"[]", b'{"weight_map": 3}'])
def test_no_weights_or_damaged_ones(content: bytes, tmp_path: Path) -> None:
    """Whoever reads them says so."""
    assert read_stored_form(tmp_path) is None
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(content)
        assert read_stored_form(tmp_path) is None

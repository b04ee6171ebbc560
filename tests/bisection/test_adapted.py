"""PEFT's joined matrices taken apart: what PEFT has loaded from a folder is what the folder has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megaswift.bisection.adapted import AdaptedModel
from megaswift.bridge.adapters.folder import PeftFolder, write_peft_folder
from megaswift.errors import UserError
from tests.bridge.folders import plan_of
from tests.parity import lora, models


def loaded(leaves: tuple[str, ...], folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT has of random adapters in a run's folder, by the names of modules."""
    home = models.build("moe", folder / "model")
    made = PeftFolder(lora.make_adapter(home, folder / "made", leaves, ("model.norm.weight",)))
    plan = made.plan(plan_of(home), training=True)
    written = write_peft_folder(folder / "adapter", plan, made.read(plan).items(), str(home))
    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    found = AdaptedModel(model, written, plan)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {**dict(found.by_disk_name(trained)), **found.whole(trained)}


def test_every_matrix_is_found(tmp_path: Path) -> None:
    """Experts' too, whose gate and up PEFT joins, and of which transformers holds all in one parameter."""
    found = loaded((*lora.ATTENTION, *lora.MLP), tmp_path)
    stored = lora.read_adapter(tmp_path / "adapter")
    assert stored.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_adapters_that_peft_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no reference: PEFT says .*(\n.*)*all experts of a layer"):
        loaded(("q_proj", "experts.1.down_proj"), tmp_path)

"""Conversions that look at a parameter's shape, where a rank holds a part of the parameter."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from megaswift.bridge.hf.model_folder import tensors_by_disk_name
from megaswift.bridge.hf.source import HfSource
from megaswift.engine.torch.conversions import conversion_groups
from tests.parity import vision


def test_experts_are_transposed_where_parameters_are_divided(tmp_path: Path) -> None:
    """Files of Qwen3-VL-MoE hold the experts transposed; transformers decides by the shape of the parameter, which is
    empty between the steps of ZeRO-3."""
    model = AutoModelForImageTextToText.from_pretrained(vision.write_model("qwen3_vl_moe", tmp_path))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    source = HfSource(tmp_path)
    read = {}
    for group in conversion_groups(model, source):
        read |= group.convert(model, {name: source.slice(name) for _, name in group.stored})
    assert any("experts.gate_up_proj" in name for name in whole)
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())
    written = tensors_by_disk_name(model, whole)
    assert written.keys() == {*source.names()} and all(torch.equal(written[n], source.slice(n)) for n in written)

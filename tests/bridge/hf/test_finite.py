"""Weights that are not finite are refused, and named, by either engine.

Covers: megaswift/bridge/convert/to_megatron.py, megaswift/bridge/convert/to_hf.py,
megaswift/engine/torch/layer_classes.py, megaswift/models/quantized_training.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.bridge.hf import finite
from megaswift.commands import training
from megaswift.errors import WeightsError
from megaswift.inference.model import load_config_tokenizer_and_processor, load_model_and_prompt_device
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions
from tests.inference.models import adapters
from tests.trainers.inputs import write_inputs, write_model

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", finite.CHECKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.arange(12.0, dtype=dtype).reshape(3, 4)
    assert finite.all_values_finite(tensor)
    tensor[1, 2] = bad
    assert not finite.all_values_finite(tensor)
    with pytest.raises(WeightsError, match=r"in b$|in b\n"):
        finite.check_weights_finite([("a", torch.ones(2)), ("b", tensor)])


def test_what_is_not_looked_at() -> None:
    for tensor in (
        torch.ones(3, dtype=torch.int64),
        torch.ones(0),
        torch.ones(3, device="meta"),
        torch.ones(2, dtype=torch.uint8),
    ):
        assert finite.all_values_finite(tensor)


@pytest.mark.process
@pytest.mark.parametrize("engine", ["megatron", "ddp"])
def test_a_run_is_refused_before_its_first_step(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_inputs(tmp_path)
    path, name = tmp_path / "model/model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 4] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SystemExit) as left:
        training.main("sft", [*words, "--engine", engine, "--max_steps", "2", "--output_dir", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert left.value.code == 2 and f"not finite (NaN or infinity) in {name}" in err
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A model's folder with one NaN."""
    folder = tmp_path / "model"
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME][3, 4] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_inference_and_quantization_refuse_the_folder(damaged: Path, bits: int | None) -> None:
    with pytest.raises(WeightsError, match=f"--model: has values that are not finite .* in {NAME}") as error:
        load_model_and_prompt_device(
            load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(damaged)), None),
            PlacementOptions(quantization_bit=bits),
        )
    assert len(error.value.problems) == 1 and error.value.exit_code == 2


def test_inference_refuses_a_checkpoint_and_adapters(damaged: Path, tmp_path: Path) -> None:
    hf_to_megatron(damaged, tmp_path / "checkpoint")
    with pytest.raises(WeightsError, match=f"not finite .* in {NAME}"):
        load_model_and_prompt_device(
            load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(tmp_path / "checkpoint")), None),
            PlacementOptions(),
        )
    write_model(tmp_path / "whole")
    folder = adapters(tmp_path / "adapter", tmp_path / "whole")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = math.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"--adapters {folder}: has values that are not finite"):
        load_model_and_prompt_device(
            load_config_tokenizer_and_processor(
                ModelLoadingOptions(model=str(tmp_path / "whole"), adapters=(str(folder),)), None
            ),
            PlacementOptions(),
        )


def test_conversions_warn_of_non_finite_weights(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways, and an overflow of the dtype that was asked for; nothing of a folder that is whole."""
    write_model(tmp_path / "whole")
    hf_to_megatron(tmp_path / "whole", tmp_path / "a")
    megatron_to_hf(tmp_path / "a", tmp_path / "b")
    assert "not finite" not in capsys.readouterr().err
    hf_to_megatron(damaged, tmp_path / "c")
    err = capsys.readouterr().err
    assert err.count("not finite") == 1 and f"{tmp_path / 'c'} has values" in err and NAME in err
    megatron_to_hf(tmp_path / "c", tmp_path / "d")
    assert f"in {NAME}. They were written unchanged" in capsys.readouterr().err
    merge_adapter_folder_into_base(damaged, adapters(tmp_path / "adapter", tmp_path / "whole"), tmp_path / "e")
    assert f"in {NAME}. They were written unchanged" in capsys.readouterr().err
    large = load_file(tmp_path / "whole/model.safetensors")
    large[NAME][0, 0] = 1e6
    save_file(large, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    hf_to_megatron(tmp_path / "whole", tmp_path / "f", HfToMegatronOptions(dtype=torch.float16))
    assert f"not finite (NaN or infinity) in {NAME}" in capsys.readouterr().err

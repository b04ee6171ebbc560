"""`megaswift export` between Hugging Face folders and Megatron checkpoints; safetensors' own reader compares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.errors import UserError
from megaswift.export import main
from tests.inference.models import adapters, folder

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("export") / "model")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_equal(one: Path, other: Path) -> None:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_to_megatron_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    layout = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "1"]
    words = ["--model", str(model), "--to_mcore", "true", "--output_dir", str(mcore), *layout]
    assert main([*words, "--test_convert_precision", "true"]) == 0
    assert (mcore / ".metadata").is_file() and " equal" in capsys.readouterr().out
    words = ["--mcore_model", str(mcore), "--to_hf", "true", "--output_dir", str(back), "--torch_dtype", "bf16"]
    assert main(words) == 0
    found = tensors(back)
    assert all(torch.equal(found[name], t.bfloat16()) for name, t in tensors(model).items())


def test_merged_into_a_megatron_checkpoint(model: Path, tmp_path: Path) -> None:
    adapter = str(adapters(tmp_path / "adapter", model))
    source = ["--model", str(model), "--adapters", adapter, "--merge_lora", "true", "--output_dir"]
    assert main([*source, str(tmp_path / "merged"), "--to_hf", "true"]) == 0
    assert main([*source, str(tmp_path / "mcore"), "--to_mcore", "true"]) == 0
    assert main(["--mcore_model", str(tmp_path / "mcore"), "--to_hf", "true"]) == 0
    assert_equal(tmp_path / "merged", tmp_path / "mcore-hf")
    assert {p.name for p in tmp_path.iterdir()} == {"adapter", "merged", "mcore", "mcore-hf"}


def test_what_a_merged_model_cannot_be(model: Path, tmp_path: Path) -> None:
    source = ["--adapters", str(adapters(tmp_path / "adapter", model)), "--merge_lora", "true"]
    with pytest.raises(UserError, match="merging keeps the dtype of each tensor, float32"):
        main([*source, "--to_hf", "true", "--torch_dtype", "bfloat16"])
    with pytest.raises(UserError, match="--model_type llama: does not match the model"):
        main([*source, "--model_type", "llama"])
    with pytest.raises(UserError, match="--model_type llama: does not match the model"):
        main(["--model", str(model), "--to_mcore", "true", "--model_type", "llama"])


def test_a_layout_that_the_model_does_not_have(model: Path, tmp_path: Path) -> None:
    words = ["--model", str(model), "--to_mcore", "true", "--output_dir", str(tmp_path / "mcore"), "--tp", "3"]
    with pytest.raises(UserError, match="3"):
        main(words)
    assert not (tmp_path / "mcore").exists()

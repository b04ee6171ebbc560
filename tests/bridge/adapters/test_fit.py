"""Adapter folders that lack tensors, or belong to another model, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megaswift.bridge.adapters.fit import check_adapter_sizes, load_whole_adapter
from megaswift.errors import WeightsError

TARGETS = ["q_proj", "down_proj"]
KINDS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=2, target_modules=TARGETS),
    "dora": peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "head": peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "embedding": peft.LoraConfig(r=2, target_modules=[*TARGETS, "embed_tokens"]),
    "tokens": peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[1, 2]),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "boft": peft.BOFTConfig(boft_block_size=2, target_modules=["q_proj"]),
}


def base(hidden: int = 8, layers: int = 2) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=1, num_key_value_heads=1, head_dim=8, **sizes))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_less(kind: str, tmp_path: Path) -> None:
    """A folder as PEFT writes it is whole; without any one of its tensors it is not, but PEFT loads it."""
    made: Any = peft.get_peft_model(base(), KINDS[kind])
    made.save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    whole = load_file(path)
    assert isinstance(load_whole_adapter(base(), tmp_path, is_trainable=True), peft.PeftModel)
    own = [name for name in whole if "lora" in name or "embed_tokens.base_layer" not in name]
    for name in own:
        save_file({k: t for k, t in whole.items() if k != name}, path)
        with pytest.raises(WeightsError) as caught:
            load_whole_adapter(base(), tmp_path, is_trainable=True)
        [problem] = caught.value.problems
        shared = name.endswith("vera_A")  # PEFT refuses a folder without it itself
        assert shared or str(problem) == f"{tmp_path}, tensor {name}: is missing"
        assert not shared or str(problem).startswith(f"--adapters {tmp_path}: PEFT cannot load it: Specified to load")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, ""),
        ({"hidden": 16}, r"model: .*_proj has 8 (in|out)puts there and 16 in this model"),
        ({"layers": 1}, r"model: .* has 1 layer"),
    ],
)
def test_adapters_of_another_model(sizes: dict[str, int], words: str, tmp_path: Path) -> None:
    """By the sizes of a model without memory."""
    made: Any = peft.get_peft_model(base(), KINDS["lora"])
    made.save_pretrained(str(tmp_path))
    with torch.device("meta"):
        skeleton = base(**sizes)
    if not words:
        check_adapter_sizes(skeleton, tmp_path, "m")
        assert {p.device.type for p in skeleton.parameters()} == {"meta"}
        return
    with pytest.raises(WeightsError, match=rf"(?s)was trained on another {words}.*--model BASE, or adapters of m"):
        check_adapter_sizes(skeleton, tmp_path, "m")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_a_resized_vocabulary_is_told(kind: str, tmp_path: Path) -> None:
    grown = base()
    grown.resize_token_embeddings(11)
    made: Any = peft.get_peft_model(grown, KINDS[kind])
    made.save_pretrained(str(tmp_path))
    with torch.device("meta"):
        skeleton = base()
    said = r"stores an embedding of 11 rows, the model has 8: its vocabulary was resized before training"
    with pytest.raises(WeightsError, match=said):
        check_adapter_sizes(skeleton, tmp_path, "m")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stored_base_weights_need_a_model_with_memory(tmp_path: Path) -> None:
    """A sharded engine's placeholders, of one element, take none."""
    made: Any = peft.get_peft_model(base(), KINDS["embedding"])
    made.save_pretrained(str(tmp_path))
    model = base()
    check_adapter_sizes(model, tmp_path, "m")
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(torch.zeros(()).expand(embedding.weight.shape))
    with pytest.raises(
        WeightsError, match=r"under its adapter on model\.embed_tokens, which sharded engines do not load"
    ):
        check_adapter_sizes(model, tmp_path, "m")


def test_sizes_of_other_kinds_are_pefts_words(tmp_path: Path) -> None:
    """The first size, not the title of torch's list."""
    made: Any = peft.get_peft_model(base(), KINDS["boft"])
    made.save_pretrained(str(tmp_path))
    with pytest.raises(WeightsError, match=r"PEFT cannot load it: .*size mismatch for .*boft_R"):
        load_whole_adapter(base(hidden=16), tmp_path)


def test_a_lack_of_memory_is_none_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has advice of its own."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peft.PeftModel, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_whole_adapter(base(), tmp_path)

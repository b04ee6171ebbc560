"""Models that are no family here answer as transformers does, each prompt alone, also in batches padded on the left.

Covers: megaswift/inference/generator.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from megaswift.errors import ConfigError, WeightsError
from megaswift.inference import device_placement
from megaswift.inference.generator import AnswerRequest, GenerationParams
from tests.engine.torch.other_models import ENCODERS, KINDS, config_of, write
from tests.inference.models import PROMPTS, opened, plain
from tests.parity import vision
from tests.trainers.inputs import write_model

pytestmark = pytest.mark.wide
NEW = 8
QUICK = ("bloom", "rwkv")
ROOM = {
    "jetmoe": 150,
    "granitemoe": 150,
    "llama4_text": 250,
    "jamba": 150,
    "falcon_h1": 100,
    "lfm2": 150,
    "openai-gpt": 230,
    "granitemoehybrid": 800,
    "qwen3_next": 1500,
}
"""KiB for those whose layers are larger."""
REFUSED = {
    "bert": "accelerate found no device map",
    "roberta": "accelerate found no device map",
    "jetmoe": "uses weights outside their module's forward call",
}
"""What cannot be on the disk, and what is said of it."""


def folder(kind: str, root: Path) -> Path:
    """A model whose greedy answers vary, with a tokenizer of characters."""
    tokenizer = AutoTokenizer.from_pretrained(write_model(root / "tokenizer"))
    made = write(kind, root / kind, len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in KINDS if k not in ENCODERS]
)
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_answers_of_a_batch(kind: str, offload: bool, tmp_path: Path) -> None:
    made = folder(kind, tmp_path)
    how = {"max_memory": f"cpu:{ROOM.get(kind, 60)}KiB", "offload_folder": str(tmp_path / "off")} if offload else {}
    if offload and kind in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[kind]):
            opened(made, **how)
        return
    _, generator = opened(made, **how)
    assert any(p.is_meta for p in generator.model.parameters()) == offload
    prompts = [generator.tokenizer(text)["input_ids"] for text in PROMPTS]
    found = [c.text for c in generator.generate([AnswerRequest(tuple(p), NEW) for p in prompts], GenerationParams())]
    want = plain(AutoModelForCausalLM.from_pretrained(made), generator.tokenizer, prompts, NEW, do_sample=False)
    assert found == want and len(set(want)) > 2


@pytest.mark.parametrize(("kind", "together"), [("trocr", False), ("rwkv", False), ("bloom", True)])
def test_prompts_go_together_where_the_model_looks_at_the_mask(
    kind: str, together: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by asking the model; transformers pads for all of them."""
    made = folder(kind, tmp_path)
    _, generator = opened(made)
    prompts = [generator.tokenizer(text)["input_ids"] for text in PROMPTS]
    want = plain(AutoModelForCausalLM.from_pretrained(made), generator.tokenizer, prompts, NEW, do_sample=False)
    capsys.readouterr()
    for _ in range(2):
        assert [
            c.text for c in generator.generate([AnswerRequest(tuple(p), NEW) for p in prompts], GenerationParams())
        ] == want
    assert generator._tried == {False: together}
    assert capsys.readouterr().err.count("of different lengths depend on the batch") == int(not together), "told once"


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_are_refused(kind: str, tmp_path: Path) -> None:
    """transformers would answer."""
    with pytest.raises(WeightsError, match=r"is an encoder \(\w+\).*\n.*\"is_decoder\": true"):
        opened(folder(kind, tmp_path))


@pytest.mark.parametrize("kind", ["biogpt", "openai-gpt", "gpt2"])
@pytest.mark.parametrize("room", range(30, 100, 10))
def test_layers_stay_whole(kind: str, room: int) -> None:
    """Also those that transformers does not name; what one adds to its input must be on the same device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(kind))
    model.tie_weights()
    placed = device_placement.decide_device_map(device_placement.ModuleSizes(model), "auto", {"cpu": room * 1024})
    assert not [name for name in placed if re.search(r"\.\d+\.", name)], placed


@pytest.mark.parametrize(
    "kind", ["llava", *(pytest.param(k, marks=pytest.mark.slow) for k in vision.KINDS if k != "llava")]
)
def test_vision_language_models_answer_text(kind: str, tmp_path: Path) -> None:
    made = vision.write_model(kind, tmp_path / kind)
    _, generator = opened(made)
    prompts = [generator.tokenizer(text)["input_ids"] for text in PROMPTS]
    found = [c.text for c in generator.generate([AnswerRequest(tuple(p), NEW) for p in prompts], GenerationParams())]
    assert found == plain(
        AutoModelForImageTextToText.from_pretrained(made), generator.tokenizer, prompts, NEW, do_sample=False
    )

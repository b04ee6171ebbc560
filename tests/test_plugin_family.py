"""A model family that a file of `--external_plugins` registers: a run on the native engine from a checkpoint of that
family, beside transformers' own class of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from megaswift.trainers.hooks.metrics import read_lines
from tests.test_plugins import RECIPES
from tests.trainers.inputs import write_conversations, write_model
from tests.trainers.runs import run

RATE, ROWS, STEPS = 1e-2, 8, 2


class OurQwenConfig(Qwen2Config):
    model_type = "our_qwen"


class OurQwenForCausalLM(Qwen2ForCausalLM):
    config_class = OurQwenConfig


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that transformers has written of a class that was registered with it, as users do."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    AutoConfig.register("our_qwen", OurQwenConfig)
    AutoModelForCausalLM.register(OurQwenConfig, OurQwenForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "other"))
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = OurQwenConfig(
        vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=128, tie_word_embeddings=False, **sizes
    )
    made = OurQwenForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "our_qwen"
    return tmp_path / "model"


@pytest.mark.process
def test_a_run_of_a_family_of_a_plugin(model: Path, tmp_path: Path) -> None:
    """Loss of each step and the exported weights are those of transformers' class, which loads the export."""
    file, data = tmp_path / "family.py", write_conversations(tmp_path / "data.jsonl", ROWS * STEPS)
    file.write_text(dict(RECIPES)["Model families"])
    words = ["--model", str(model), "--dataset", str(data), "--dataset_cache_dir", str(tmp_path / "cache"), "--lr"]
    words += [str(RATE), "--shuffle", "false", "--report_to", "none", "--lr_scheduler_type", "constant"]
    words += ["--weight_decay", "0", "--max_grad_norm", "0", "--adam_epsilon", "1e-6", "--external_plugins", str(file)]
    said = run(
        words, tmp_path / "out", "--max_steps", STEPS, "--global_batch_size", ROWS, "--engine", "megatron", "--tp", 2
    )
    ours, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert type(ours) is OurQwenForCausalLM and "transformers, " not in said
    adam, losses = torch.optim.AdamW(ours.parameters(), RATE, (0.9, 0.95), 1e-6, 0.0), []
    rows = [json.loads(line)["messages"] for line in data.read_text(encoding="utf-8").splitlines()]
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for ask, answer in rows[step * ROWS : (step + 1) * ROWS]:
            texts = (f"<u>{ask['content']}<e><a>", f"{answer['content']}<e>")
            prompt, end = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
            labels = torch.tensor([[-100] * len(prompt) + end])
            loss = ours(torch.tensor([prompt + end]), labels=labels).loss
            total, count = total + loss * len(end), count + len(end)
        adam.zero_grad()
        (total / count).backward()
        losses.append(total.item() / count)
        adam.step()
    assert [line["loss"] for line in read_lines(tmp_path / "out" / "metrics.jsonl")] == pytest.approx(losses, rel=1e-5)
    exported = tmp_path / "out" / "hf"
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert type(loaded) is OurQwenForCausalLM and not any(info[k] for k in ("missing_keys", "unexpected_keys"))
    written = load_file(exported / "model.safetensors")
    assert written.keys() == ours.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], written[name])
        assert (written[name] - weight).abs().max() <= 2e-4 * weight.abs().max(), name

"""A tiny Qwen3.5 with experts learns the quickstart's questions: fine-tuned on one layout, resumed on another,
exported, asked by transformers, and trained further with GRPO."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.sources import ROOT
from tests.trainers.runs import kill, start

QUICK = ROOT / "scripts" / "quickstart"
DATA = QUICK / "data"
STEPS = 200


def make_model(folder: Path) -> Path:
    """A gated delta net, then attention, each with four experts and a shared one."""
    from make_model import make_tokenizer, texts
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    tokenizer = make_tokenizer(texts(DATA))
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    )
    Qwen3_5MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(words: list[str], out: Path, *options: object, script: str = "megaswift/sft.py") -> None:
    """A whole run on two processes, which takes minutes."""
    process = start(words, out, *options, script=script)
    try:
        said, _ = process.communicate(timeout=1500)
    finally:
        kill(process)
    assert process.returncode == 0, said[-3000:]


@pytest.mark.slow
@pytest.mark.process
def test_it_learns_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(QUICK), *sys.path])
    from ask import read, score

    common = [
        "--model",
        str(make_model(tmp_path / "model")),
        "--dataset",
        str(DATA / "train.jsonl"),
        "--max_length",
        "128",
    ]
    common += ["--torch_dtype", "float32", "--engine", "megatron"]
    batch = ["--per_device_train_batch_size", "48", "--global_batch_size", "48", "--warmup_steps", "4"]
    schedule = ["--learning_rate", "4e-3", "--lr_decay_iters", str(STEPS)]
    first, second = tmp_path / "first", tmp_path / "second"
    half = STEPS // 2
    run([*common, *batch, *schedule], first, "--tp", 2, "--sp", "true", "--ep", 2, "--max_steps", half)
    step = first / "checkpoints" / f"step-{half}"
    run([*common, *batch, *schedule], second, "--pp", 2, "--max_steps", STEPS, "--resume_from_checkpoint", step)
    asked = read(DATA / "heldout.jsonl")
    assert score(tmp_path / "model", asked) < 5
    learned = score(second / "hf", asked)
    assert learned > 70

    words = ["--model", str(second / "hf"), *common[2:], "--reward_funcs", f"{QUICK / 'exact_match_reward.py'}:exact"]
    words += ["--max_completion_length", "8", "--num_generations", "8", "--learning_rate", "1e-4", "--max_steps", "6"]
    words += ["--per_device_train_batch_size", "64", "--global_batch_size", "64", "--rollout_backend", "transformers"]
    run(words, tmp_path / "grpo", "--tp", 2, "--sp", "true", "--ep", 2, script="megaswift/grpo.py")
    lines = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert len(rewards) == 6 and min(rewards) > 0.4
    assert score(tmp_path / "grpo" / "hf", asked) > learned - 15

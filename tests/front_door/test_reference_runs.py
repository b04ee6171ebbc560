"""Rows of the reference documents run to their export: the loss is finite, weights change where they are trained, and
transformers computes from the export the loss that the run's last evaluation had.

Covers: tests/front_door/reference_runs.py.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megaswift.trainers.hooks.metrics import read_lines
from tests.front_door.reference_rows import ROWS, Row
from tests.front_door.reference_runs import DENSE, EXPERTS, PREFERENCES, RUNS, SHARED, Run
from tests.trainers.inputs import write_conversations, write_model, write_preferences
from tests.trainers.runs import run

pytestmark = pytest.mark.process
BY_LABEL = {row.label: row for row in ROWS}
ENDS = ("--max_steps", 2, "--save_steps", 2, "--logging_steps", 1, "--report_to", "none", "--max_length", 64)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
REWARD = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in one[0]["content"]) / 10 for one in completions]
"""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each architecture, rows, pairs, and a reward model."""
    made = tmp_path_factory.mktemp("reference")
    write_preferences(made, rows=24)
    for kind, more in ((DENSE, {}), (EXPERTS, MOE)):
        write_model(made / kind)
        torch.manual_seed(1)
        fields = {
            **SIZES,
            **more,
            "num_hidden_layers": 4,
            "vocab_size": len(AutoTokenizer.from_pretrained(made / kind)),
        }
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False}
        config = AutoConfig.for_model(kind, **fields, **special, max_position_embeddings=128)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made / kind)
    judge = AutoConfig.from_pretrained(made / DENSE, num_labels=1)
    AutoModelForSequenceClassification.from_config(judge, dtype=torch.float32).save_pretrained(made / "judge")
    AutoTokenizer.from_pretrained(made / DENSE).save_pretrained(made / "judge")
    (made / "reward.py").write_text(REWARD)
    write_conversations(made / "rows.jsonl", rows=128)
    (made / "text.jsonl").write_text('{"text": "1+2? 3"}\n' * 32)
    write_conversations(made / "held.jsonl", rows=8, seed=9)
    return made


def words_of(row: Row, wanted: Run, folder: Path, tmp_path: Path) -> list[str]:
    """The row's words with local inputs and a small size."""
    model, data = folder / wanted.model, folder / "rows.jsonl"
    if wanted.task in (*PREFERENCES, "kto"):
        data = folder / ("judged.jsonl" if wanted.task == "kto" else "pairs.jsonl")
    if row.task == "pt":
        data = folder / "text.jsonl"
    changes = {**SHARED, **wanted.smaller, "--model": str(model), "--model_id_or_path": str(model)}
    changes |= {"--dataset": str(data), "--reward_model": str(folder / "judge")}
    changes |= {str(name): "" for name in ENDS[::2]}
    changes["--reward_funcs"] = f"{folder / 'reward.py'}:digits"
    words = shlex.split(row.words)
    if row.deepspeed is not None:
        (tmp_path / "DS.json").write_text(json.dumps(row.deepspeed))
        words = [str(tmp_path / "DS.json") if w == "DS.json" else w for w in words]
    out: list[str] = []
    if row.yaml is not None:
        (tmp_path / "run.yml").write_text(yaml.safe_dump(row.yaml).replace("DS.json", str(tmp_path / "DS.json")))
        out += ["--config", str(tmp_path / "run.yml")]
    at = 0
    while at < len(words):
        end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
        value = changes.get(words[at])
        out += words[at:end] if value is None else [words[at], value] * bool(value)
        at = end
    return out


def loss_by_transformers(model: torch.nn.Module, folder: Path) -> float:
    """The mean over label tokens of held.jsonl."""
    tokenizer = AutoTokenizer.from_pretrained(folder / DENSE)
    total, count = 0.0, 0
    for line in (folder / "held.jsonl").read_text().splitlines():
        turns = json.loads(line)["messages"]
        made = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float()
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[mask[1:]]
        total, count = total + float(each.sum()), count + each.numel()
    return total / count


def exported(out: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The export as transformers, or PEFT on the base model, reads it."""
    if not (out / "adapter").is_dir():
        return AutoModelForCausalLM.from_pretrained(out / "hf", dtype=dtype).eval()
    import peft

    named = json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(named, dtype=dtype)  # of initial weights, what they leave of the base
    return peft.PeftModel.from_pretrained(model, out / "adapter").eval()


def changed(out: Path, base: Path) -> tuple[set[str], set[str]]:
    """Names of the tensors that differ from where the run began, and of those that do not."""
    from safetensors.torch import load_file

    if (out / "adapter").is_dir():  # B begins at 0
        tensors = load_file(out / "adapter" / "adapter_model.safetensors")
        moved = {n for n, t in tensors.items() if "lora_B" in n and t.abs().max() > 0}
        return moved, {n for n in tensors if "lora_B" in n} - moved
    before, after = (load_file(place / "model.safetensors") for place in (base, out / "hf"))
    moved = {
        n for n, t in after.items() if n not in before or not torch.equal(t.float(), before[n].to(t.dtype).float())
    }
    return moved, {*after} - moved


def test_only_accepted_rows_are_run() -> None:
    assert [wanted.label for wanted in RUNS if BY_LABEL[wanted.label].answer] == []


@pytest.mark.parametrize("wanted", [pytest.param(r, id=r.label, marks=[pytest.mark.slow] * r.slow) for r in RUNS])
def test_to_the_export(wanted: Run, folder: Path, tmp_path: Path) -> None:
    row, out, base = BY_LABEL[wanted.label], tmp_path / "out", folder / wanted.model
    task = wanted.task or row.task
    words = words_of(row, wanted, folder, tmp_path)
    supervised = task in ("sft", "pt")
    held = ("--val_dataset", folder / "held.jsonl", "--eval_steps", 2) if task == "sft" else ()
    own = ("--max_completion_length", 6) if task in ("grpo", "ppo") else ()
    run(words, out, *ENDS, *held, *own, ranks=wanted.ranks, task=task)
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and all(math.isfinite(line["loss"]) for line in lines)
    moved, still = changed(out, base)
    assert len(moved) > len(still) * (4 if supervised else 0), (moved, still)
    if task == "sft":
        said: dict[str, Any] = yaml.safe_load((out / "config.yaml").read_text())
        dtype = getattr(torch, str(said["model"]["torch_dtype"]).replace("auto", "float32"))
        evaluated = read_lines(out / "eval.jsonl")[-1]
        assert evaluated["step"] == 2
        assert loss_by_transformers(exported(out, dtype), folder) == pytest.approx(
            evaluated["loss"], rel=TOLERANCE[dtype]
        )

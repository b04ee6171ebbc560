"""The quickstart: its data is what its generator writes and asks nothing that training shows; the whole script makes
the model learn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.quickstart import make_model
from tests.sources import ROOT

QUICK = ROOT / "scripts" / "quickstart"
DATA = QUICK / "data"


def conversations(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def python(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_held_out_question_is_trained_on_but_every_answer_is() -> None:
    train = [m for row in conversations("train.jsonl") for m in row]
    asked = {m["content"] for m in train if m["role"] == "user"}
    answered = {m["content"] for m in train if m["role"] == "assistant"}
    held_out = conversations("heldout.jsonl")
    assert len(held_out) == 100
    assert [q["content"] for q, _ in held_out if q["content"] in asked] == []
    assert [a["content"] for _, a in held_out if a["content"] not in answered] == []


@pytest.mark.process
def test_the_generator_writes_the_bundled_files(tmp_path: Path) -> None:
    python(QUICK / "make_data.py", tmp_path)
    for name in ("train.jsonl", "heldout.jsonl", "preference/train.jsonl", "preference/heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_model_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loadable, a few million parameters, and the template marks the assistant's words and end of turn, nothing
    else."""
    make_model.main(DATA, tmp_path / "model")
    assert re.search(r"gpus \d+\n$", capsys.readouterr().out)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert model.config.model_type == "qwen3" and 1e6 < sum(p.numel() for p in model.parameters()) < 5e6
    chat = [{"role": "user", "content": "What is 7 in words?"}, {"role": "assistant", "content": "seven"}]
    out = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "seven<|im_end|>"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The whole script: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    command = ["bash", "scripts/quickstart.sh", "--env", sys.prefix, "--output", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out, done.stdout


@pytest.mark.process
def test_the_whole_script(quickstart: tuple[Path, str]) -> None:
    """Trains on four processes, exports, reloads; exact answers to held-out questions rise from nothing to most."""
    out, told = quickstart
    scores = {when: int(share) for when, share in re.findall(r"held-out questions, (before|after): (\d+)%", told)}
    assert scores["before"] <= 2 and scores["after"] >= 70, told[-2000:]
    for name in ("loss.png", "report.html", "metrics.jsonl", "config.yaml", "hf/config.json"):
        assert (out / "run" / name).stat().st_size > 0, name
    asked = {q["content"] for q, _ in conversations("heldout.jsonl")}
    shown = [(q, answer) for q, answer in re.findall(r"^  (\S.*)\n    (\S.*)$", told, re.MULTILINE) if q in asked]
    assert len(shown) == 3, told[-2000:]
    places = dict(re.findall(r"^(loss curve|report|model) +(/\S+)", told, re.MULTILINE))
    assert places == {"loss curve": f"{out}/run/loss.png", "report": f"{out}/run/report.html", "model": f"{out}/run/hf"}


@pytest.mark.process
@pytest.mark.slow
def test_the_model_then_learns_the_bundled_pairs(quickstart: tuple[Path, str]) -> None:
    """By the command of docs/preference.md: held out, the right answer gains on the wrong one."""
    out, _ = quickstart
    text = (ROOT / "docs" / "preference.md").read_text(encoding="utf-8")
    found = re.search(r"^megaswift (dpo (?:.*\\\n)*.*quickstart-output/dpo)$", text, re.MULTILINE)
    assert found is not None
    words = found[1].replace("\\\n", " ").replace("quickstart-output", str(out)).split()
    done = subprocess.run(
        [sys.executable, "-m", "megaswift", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "dpo" / "eval.jsonl").read_text().splitlines()]
    assert lines[-1]["rewards/accuracies"] >= 0.95 and lines[-1]["rewards/margins"] > lines[0]["rewards/margins"] > 0

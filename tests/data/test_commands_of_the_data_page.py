"""Every command of docs/data.md, on files of its names: inspections run, and training reads its first batch.

Left out: the commands whose data are on a hub or in a bucket (tests/data/sources/test_hub.py and
test_copy_remote_datasets.py have local servers).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.config import load_config
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.model_tokenizer import tokenizer_or_processor_for
from tests.data.makers import TEXT, chat, jsonl, tokenizer
from tests.sources import ROOT

ELSEWHERE = ("s3://", "AI-ModelScope", "MS::")


def commands() -> list[str]:
    """The lines of the page's code blocks that run megaswift on local files, without comments."""
    page = (ROOT / "docs" / "data.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shell = [block for language, block in blocks if language in ("", "bash")]
    lines = [line.partition("  #")[0].strip() for block in shell for line in block.splitlines()]
    return [c for c in lines if c.startswith("megaswift ") and not any(e in c for e in ELSEWHERE)]


def make_files(folder: Path) -> None:
    """What the page names."""
    for name in ("DIR", "BASE"):
        tokenizer("qwen", "qwen3" if name == "DIR" else None).save_pretrained(folder / name)
    for name in ("data", "chat", "code", "val"):
        jsonl(folder / f"{name}.jsonl", [chat(f"hello {i}", f"Paris {name}") for i in range(40)])
    jsonl(folder / "pairs.jsonl", [{**chat("hello", f"Paris {i}"), "rejected_response": "you"} for i in range(8)])
    jsonl(folder / "corpus.jsonl", [{"text": text} for text in TEXT * 20])
    (folder / "corpus.txt").write_text("\n".join(TEXT) * 20)
    (folder / "run.yaml").write_text("task: sft\nmodel: DIR\ndataset: [data.jsonl]\nlearning_rate: 1.0e-5\n")
    jsonl(folder / "large.jsonl", [{"text": text} for text in TEXT * 600])
    for name in ("web", "code"):
        main(["data", "index", "large.jsonl", "--model", "DIR", "--output", name])


def test_the_page_has_commands() -> None:
    assert len(commands()) > 15 and {c.split()[1] for c in commands()} == {"data", "sft", "pt", "export"}


@pytest.mark.wide
def test_every_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGASWIFT_CACHE", str(tmp_path / "cache"))
    make_files(tmp_path)
    for command in commands():
        words = shlex.split(command)[1:]
        words = [w if before != "--dataset_num_proc" else "2" for before, w in zip(["", *words], words, strict=False)]
        if words[0] in ("data", "export"):
            if words[:2] == ["data", "index"]:
                for old in tmp_path.glob("corpus.*n*"):
                    old.unlink() if old.suffix in (".bin", ".idx") else None
            assert main(words) == 0, command
            continue
        cfg = load_config(words[0], [*words[1:], "--output_dir", "out", "--nproc_per_node", "2"])
        geometry = LoaderGeometry(dp_rank=0, dp_size=1, per_device=2, accumulation=1)
        source, _ = build_train_and_eval_sources(
            cfg.data, cfg.train, tokenizer_or_processor_for(cfg.model, cfg.data, cfg.task), geometry, cfg.task
        )
        assert sum(int(batch.input_ids.numel()) for batch in source.next()) > 0, command
    assert (tmp_path / "report.html").stat().st_size > 1000 and "certified" in capsys.readouterr().out

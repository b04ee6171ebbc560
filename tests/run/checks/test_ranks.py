"""What ranks must agree on at the start, with real ranks that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift import distributed
from megaswift.config import SwiftConfig
from megaswift.engine.process_group import init_default_and_gloo_process_groups
from megaswift.errors import UserError
from megaswift.run.checks import ranks as agreement_of_ranks_at_start
from tests.parity import pool
from tests.sources import ROOT


def differing(rank: int, world: int, payload: dict[str, Any]) -> list[str]:
    """What each check says on this rank."""
    init_default_and_gloo_process_groups("gloo", 30)
    agreement_of_ranks_at_start.VISIBLE_SECONDS = 0.5
    options = {"task": "sft", "model": "m", "dataset": ["d"], "dataset_cache_dir": f"cache-{rank}"}
    last = rank == world - 1
    cfg, other = (SwiftConfig(**options, **more) for more in ({}, {"learning_rate": 3e-4, "seed": 7} if last else {}))
    folder = Path(payload["folder"])
    file = folder / "out/config.yaml" if not last else folder / "elsewhere/config.yaml"
    facts = agreement_of_ranks_at_start.program_and_device_facts(folder, torch.device("cpu"))
    checks = [
        lambda: agreement_of_ranks_at_start.refuse_ranks_with_other_options(cfg),
        lambda: agreement_of_ranks_at_start.refuse_ranks_that_differ(facts),
        lambda: agreement_of_ranks_at_start.refuse_unshared_output_folder(folder / "out/config.yaml"),
        lambda: agreement_of_ranks_at_start.refuse_ranks_with_other_options(other),
        lambda: agreement_of_ranks_at_start.refuse_ranks_that_differ(
            facts | ({"torch": "1.0", "model": "x"} if last else {})
        ),
        lambda: agreement_of_ranks_at_start.refuse_ranks_that_differ({"data": str(rank // 2)}),
        lambda: agreement_of_ranks_at_start.refuse_unshared_output_folder(file),
    ]
    said = []
    for check in checks:
        try:
            check()
            said.append("")
        except UserError as error:
            said.append(str(error))
    distributed.barrier()
    return said


@pytest.mark.process
def test_ranks_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.yaml").write_text("a: 1\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    results = pool.shared().run(f"{__name__}:differing", {"folder": str(tmp_path)}, 4)
    assert all(result[:6] == results[0][:6] and result[6] for result in results)
    same, versions, shared, options, programs, data, unshared = results[0]
    assert (same, versions, shared) == ("", "", "")
    assert "--learning_rate: differs between ranks" in options and "0.0003 on rank 3" in options and "--seed" in options
    assert "give every node the same command" in options and "install one version" in programs
    assert "torch: differs between ranks" in programs and "1.0 on rank 3" in programs and "on ranks 0-2" in programs
    assert "give every node the same model folder" in programs
    assert "data: differs between ranks: 0 on ranks 0-1" in data and "same data files" in data
    assert "is not the same folder on every node: rank 3" in unshared


def test_two_checkouts_of_one_version_differ(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "inner/__pycache__").mkdir(parents=True)
        (tmp_path / name / "top.py").write_text("x = 1\n")
        (tmp_path / name / "inner/module.py").write_text("y = 1\n" if name != "c" else "y = 2\n")
        (tmp_path / name / "inner/__pycache__/module.pyc").write_text(name)
    a, b, c = (agreement_of_ranks_at_start.package_source_digest(tmp_path / name) for name in ("a", "b", "c"))
    assert a == b != c
    (tmp_path / "b/inner/module.py").rename(tmp_path / "b/module.py")
    assert agreement_of_ranks_at_start.package_source_digest(tmp_path / "b") != a
    own = agreement_of_ranks_at_start.package_source_digest()
    assert agreement_of_ranks_at_start.package_source_digest(ROOT / "megaswift") == own
    facts = agreement_of_ranks_at_start.program_and_device_facts(tmp_path, torch.device("cpu"))
    assert own in facts["megaswift"] and facts["model"] == "no config.json"
    models = set()
    for file, text in (("config.json", "{}"), ("tokenizer.json", "{}"), ("tokenizer.json", "[]"), ("notes.txt", "x")):
        (tmp_path / file).write_text(text)
        models.add(agreement_of_ranks_at_start.program_and_device_facts(tmp_path, torch.device("cpu"))["model"])
    assert len(models) == 3, "also the tokenizer, not other files"


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3 (b)"), ([0, 1, 2], "ranks 0-2 (a, b)"), ([0, 2, 3], "ranks 0, 2-3 (a, b)")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert agreement_of_ranks_at_start.rank_text(ranks, ["a", "a", "b", "b"]) == text

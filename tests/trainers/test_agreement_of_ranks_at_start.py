"""What ranks must agree on at the start, with real ranks that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift import distributed
from megaswift.config import SwiftConfig
from megaswift.engine.start_default_process_group import init_default_and_gloo_process_groups
from megaswift.errors import UserError
from megaswift.trainers import agreement_of_ranks_at_start
from tests.parity import pool


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


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3 (b)"), ([0, 1, 2], "ranks 0-2 (a, b)"), ([0, 2, 3], "ranks 0, 2-3 (a, b)")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert agreement_of_ranks_at_start.rank_text(ranks, ["a", "a", "b", "b"]) == text

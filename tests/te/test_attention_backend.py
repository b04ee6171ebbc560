"""Two engines of different `--attn_impl` in one process each take their own kernels.

Covers: megaswift/engine/megatron/layers/attention/te.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.engine.megatron.layers.attention.te import VARIABLES, TEAttentionBackendEnv
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.pool import Pool


def job(rank: int, world: int, folder: Path) -> list[int]:
    """Calls of the fused kernel in a forward pass of each of three engines, in turn, twice; on the ranks."""
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.cases import global_batch
    from tests.parity.measure import build
    from tests.te.registry import CALLS

    engines, context = [], None
    for words in ("dense te attn=unfused", "dense te attn=fused", "dense te"):
        case = parse(words)
        engine, context = build(case, folder, world) if context is None else (_another(case, folder, context), context)
        engines.append(engine)
    counts = []
    for engine in engines * 2:
        before = CALLS["fused_attn_fwd"]
        engine.evaluate(global_batch(parse("dense te"), 0), CrossEntropy())
        counts.append(CALLS["fused_attn_fwd"] - before)
    assert not any(name in os.environ for name in VARIABLES)
    context.close()
    return counts


def _another(case: object, folder: Path, context: object) -> object:
    """One more engine over the same groups."""
    import json

    from megaswift.config import SwiftConfig
    from megaswift.families import family_of
    from megaswift.run.engines import native_engine

    cfg = SwiftConfig(task="sft", model=str(folder), **case.config())  # type: ignore[attr-defined]
    raw = json.loads((folder / "config.json").read_text())
    engine = native_engine(cfg, family_of(raw).spec(raw), context)  # type: ignore[arg-type]
    engine.load_hf(folder)
    return engine


@pytest.mark.process
def test_each_engine_has_its_kernels(te_pool: Pool, tmp_path: Path) -> None:
    (counts,) = te_pool.run("tests.te.test_attention_backend:job", build_model("dense", tmp_path / "model"), 1)
    (unfused, fused, auto), again = counts[:3], counts[3:]
    assert again == counts[:3]
    assert unfused == 0 and fused == auto > 0, counts


def test_variables_of_the_user_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error; without a choice of `--attn_impl` they hold."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    chosen, left = TEAttentionBackendEnv(True), TEAttentionBackendEnv(False)
    for backend in (chosen, left):
        with pytest.raises(ValueError), backend.building():  # noqa: PT011
            assert not any(name in os.environ for name in VARIABLES)
            os.environ["NVTE_FLASH_ATTN"] = "1"
            raise ValueError
        assert os.environ["NVTE_FUSED_ATTN"] == "0" and "NVTE_FLASH_ATTN" not in os.environ
    with chosen.building():
        os.environ |= {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"}
    with chosen.computing():
        assert os.environ["NVTE_FLASH_ATTN"] == "1"
    with left.computing():
        assert os.environ["NVTE_FUSED_ATTN"] == "0" and "NVTE_FLASH_ATTN" not in os.environ

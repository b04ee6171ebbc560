"""Memory of conversions from and to other programs' checkpoints: at most 0.5 GB beyond the imports, of any model.

Covers: megaswift/bridge/foreign/tensors.py.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.bridge.folders import plan_of
from tests.bridge.peaks import printed
from tests.bridge.sparse import write_sparse

pytestmark = [pytest.mark.process, pytest.mark.slow]
LIMIT = 500_000_000
PROGRAM = """
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
way, source, target, config = sys.argv[1:]
before = peak()
if way == "forth":
    hf_to_megatron(source, target, HfToMegatronOptions(megatron_lm=True))
else:
    megatron_to_hf(source, target, MegatronToHfOptions(hf_config=Path(config)))
print(before, peak())
"""


def write_legacy(folder: Path, hf: Path, tp: int) -> None:
    """A legacy checkpoint of zeros, one file for each tensor-parallel rank."""
    entries = plan_of(hf).entries
    for rank in range(tp):
        state = {entry.megatron: torch.zeros(entry.shard_shape(tp), dtype=torch.bfloat16) for entry in entries}
        place = folder / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        args = Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
        torch.save({"args": args, "model": state}, place / "model_optim_rng.pt")


def test_a_model_beyond_the_limit(tmp_path: Path) -> None:
    """2.2 GB of weights, the largest tensor 67 MB."""
    hf = tmp_path / "hf"
    largest = write_sparse(
        hf,
        1 << 28,
        vocab_size=16384,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    write_legacy(tmp_path / "legacy" / "iter_0000001", hf, 2)
    weights = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    assert weights > 4 * LIMIT and largest < LIMIT / 4
    for way, source, target in (("forth", "hf", "m"), ("back", "m", "out"), ("back", "legacy", "out-2")):
        before, end = map(int, printed(PROGRAM, way, tmp_path / source, tmp_path / target, hf).split())
        print(f"{way} {source}: {end / 1e6:.0f} MB in all, {(end - before) / 1e6:.0f} beyond the imports")
        assert end - before <= LIMIT, (way, source, end - before)
        assert (tmp_path / target).is_dir()

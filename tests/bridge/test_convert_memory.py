"""Memory of the converters: bounded by the largest tensor and some blocks, never by the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bridge.peaks import printed
from tests.bridge.sparse import write_sparse, write_sparse_adapter

pytestmark = pytest.mark.process
PROGRAM = """
from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
before = peak()
if len(sys.argv) > 1:
    {"forth": hf_to_megatron, "back": megatron_to_hf, "merge":
    merge_adapter_folder_into_base}[sys.argv[1]](*sys.argv[2:])
print(before, peak())
"""


def peak(*words: object) -> tuple[int, int]:
    """Bytes resident at most: after the imports, and in the end."""
    before, end = printed(PROGRAM, *words).split()
    return int(before), int(end)


def weights_of(folder: Path) -> int:
    """Bytes of a Hugging Face folder's tensors."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_a_model_beyond_the_allowed_growth(tmp_path: Path) -> None:
    """0.8 GB of weights, the largest tensor 34 MB: growth below a third of the weights, both ways."""
    largest = write_sparse(
        tmp_path / "hf",
        1 << 28,
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    for way, source, target in (("forth", "hf", "m"), ("back", "m", "out")):
        before, end = peak(way, tmp_path / source, tmp_path / target)
        assert end - before <= 2 * largest + (192 << 20) < weights_of(tmp_path / "hf") / 3, (way, end - before)


def promised(root: Path) -> int:
    """12 GB of weights below `root`, the largest tensor 0.5 GB; how many bytes a conversion may have in all."""
    largest = write_sparse(
        root / "hf",
        vocab_size=65536,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    allowed = (2 << 30) + 2 * largest
    assert weights_of(root / "hf") > 3 * allowed
    return allowed


@pytest.mark.slow
def test_the_promise(tmp_path: Path) -> None:
    """At most 2 GiB + 2 x the largest tensor in all."""
    allowed = promised(tmp_path)
    for way, source, target in (("forth", "hf", "m"), ("back", "m", "out")):
        _, end = peak(way, tmp_path / source, tmp_path / target)
        assert end <= allowed, (way, end)


@pytest.mark.slow
def test_the_promise_of_a_merge(tmp_path: Path) -> None:
    """The same, with more adapters than that: 2.5 GB, and an output layer of 1 GB."""
    allowed = promised(tmp_path)
    assert write_sparse_adapter(tmp_path / "adapter", tmp_path / "hf", 320) > allowed
    before, end = peak("merge", tmp_path / "hf", tmp_path / "adapter", tmp_path / "merged")
    print(
        f"{end / 2**20:.0f} MiB in all, {(end - before) / 2**20:.0f} beyond the imports, allowed {allowed / 2**20:.0f}"
    )
    assert end <= allowed, end

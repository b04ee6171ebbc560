"""Samples of indexed data beside Megatron-Core's own GPTDataset and BlendedDataset, over files that its own builder has
written.

Covers: megaswift/data/indexed/files.py, megaswift/data/indexed/batches.py.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megaswift.engine.megatron  # noqa: F401 (before megatron.core)

# isort: split
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megaswift.config import SwiftConfig
from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.indexed import files
from megaswift.data.indexed.batches import (
    DocumentBoundaries,
    IndexedBatchSource,
    IndexedSamples,
    SplitRequest,
    load_indexed_samples,
)
from megaswift.data.indexed.files import open_indexed_tokens, smallest_token_type, write_indexed_tokens
from megaswift.data.indexed.order import split_ranges
from megaswift.data.options.indexed import IndexedBlend, parse_indexed_blend
from megaswift.errors import DataError
from tests.data.makers import tokenizer

EOD, VOCABULARY = 0, 500


def written(folder: Path, name: str, documents: int, seed: int, longest: int = 40, dtype: Any = np.int32) -> str:
    """A corpus of random documents, some of several sequences, by Megatron-Core's own builder; its prefix."""
    rng = np.random.default_rng(seed)
    prefix = str(folder / name)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for _ in range(documents):
        parts = [rng.integers(1, VOCABULARY, int(n)) for n in rng.integers(1, longest, int(rng.integers(1, 3)))]
        parts[-1] = np.append(parts[-1], EOD)
        builder.add_document(torch.tensor(np.concatenate(parts)), [len(p) for p in parts])
    builder.finalize(f"{prefix}.idx")
    return prefix


def megatron_s(
    cache: Path, blend: Sequence[str], split: str, samples: Sequence[int | None], length: int, **flags: Any
) -> list[Any]:
    """Megatron-Core's data sets for training, evaluation and tests."""
    weights = [float(w) for w in blend[::2]] if len(blend) > 1 and blend[0][0].isdigit() else None
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=length,
        blend=(list(blend[1::2] if weights else blend), weights),
        split=split,
        path_to_cache=str(cache),
        tokenizer=SimpleNamespace(eod=EOD, pad=-1, vocab_size=None, unique_identifiers={}),  # type: ignore[arg-type]
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **flags},
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(samples), lambda: True, config).build()  # type: ignore[arg-type]


def ours(
    cache: Path, blend: Sequence[str], part: tuple[float, float], samples: int | None, length: int
) -> IndexedSamples:
    found = parse_indexed_blend(blend)
    assert found is not None
    cache.mkdir(exist_ok=True)
    return load_indexed_samples(SplitRequest(found, part, samples, length, 7), cache, DocumentBoundaries(EOD))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "a": written(folder, "a", 60, 1),
        "b": written(folder, "b", 25, 2, 90, np.uint16),
        "c": written(folder, "c", 9, 3),
    }


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Megatron-Core's blends ask for the rank."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


CASES = {
    "part of an epoch": (["a"], "1", 20, 16),
    "whole epochs": (["a"], "1", 300, 16),
    "the last epoch apart": (["a"], "1", 170, 16),
    "many epochs": (["c"], "1", 400, 8),
    "a split": (["a"], "90,10,0", 100, 16),
    "splits in fractions": (["b"], "0.8,0.15,0.05", 30, 32),
    "a blend": (["0.3", "a", "0.7", "b"], "1", 90, 16),
    "a blend of three, repeated, split": (["5", "a", "1", "b", "2", "c"], "80,20", 500, 16),
    "one data set with a weight": (["2", "a"], "1", 60, 16),
    "as they are": (["a", "b", "c"], "1", 150, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_are_megatron_core_s(case: str, corpora: dict[str, str], tmp_path: Path) -> None:
    names, split, samples, length = CASES[case]
    blend = [corpora.get(name, name) for name in names]
    train, evaluation, _ = megatron_s(tmp_path / "theirs", blend, split, (samples, 12, 0), length)
    for theirs, part, count in ((train, 0, samples), (evaluation, 1, 12)):
        if theirs is None:
            assert split_ranges(split)[part][0] == split_ranges(split)[part][1]
            continue
        made = ours(tmp_path / "ours", blend, split_ranges(split)[part], count, length)
        assert len(made) >= count
        for k in range(count):
            tokens = made.read(k)[0]
            assert tokens[:-1].tolist() == theirs[k]["tokens"].tolist(), (case, part, k)
            assert tokens[1:].tolist() == theirs[k]["labels"].tolist()


@pytest.mark.parametrize(("resets", "masks"), [(False, True), (True, False), (True, True)])
def test_masks_are_megatron_core_s(resets: bool, masks: bool, corpora: dict[str, str], tmp_path: Path) -> None:
    """Attention between documents, positions, and loss after the end of a document; packed documents are padded to a
    multiple of 4."""
    flags = {"reset_position_ids": resets, "reset_attention_mask": resets, "eod_mask_loss": masks}
    theirs = megatron_s(tmp_path / "theirs", [corpora["a"]], "1", (30, 0, 0), 24, **flags)[0]
    made = ours(tmp_path / "ours", [corpora["a"]], (0.0, 1.0), 30, 24)
    made.boundaries = DocumentBoundaries(EOD, resets, masks)
    assert sum((theirs[k]["tokens"] == EOD).any().item() for k in range(30)) > 5
    shape = PaddingShape(doc_multiple=4 if resets else 1)
    for k in range(0, 30, 2):
        (batch,) = made.batches([[made.read(k), made.read(k + 1)]], shape, False)
        want = [theirs[k], theirs[k + 1]]
        kept = batch.valid
        for name, got in (("tokens", batch.input_ids), ("labels", batch.labels), ("position_ids", batch.positions)):
            assert got[kept].tolist() == torch.cat([w[name] for w in want]).tolist(), name
        assert batch.loss_weights[kept].tolist() == torch.cat([w["loss_mask"] for w in want]).tolist()
        assert batch.loss_weights[~kept].sum() == 0
        if resets:
            assert batch.cu_seqlens is not None and batch.cu_seqlens.remainder(4).sum() == 0
            places = torch.arange(batch.valid.shape[1])
            document = torch.searchsorted(batch.cu_seqlens, places, right=True)
            seen = (document[:, None] == document[None]) & (places[:, None] >= places[None])
            seen = seen[kept[0]][:, kept[0]]
            masked = torch.block_diag(*(w["attention_mask"][0].logical_not().float() for w in want)).bool()
            assert torch.equal(seen, masked)
        else:
            assert batch.cu_seqlens is None


def config(tmp_path: Path, dataset: Sequence[str], **options: Any) -> SwiftConfig:
    given = {"max_length": 16, "max_steps": 6, "dataset_cache_dir": str(tmp_path / "cache"), "data_seed": 7, **options}
    return SwiftConfig(task="pt", model="m", dataset=list(dataset), **given)


def source(cfg: SwiftConfig, **geometry: Any) -> tuple[IndexedBatchSource, Any]:
    made, evaluation = build_train_and_eval_sources(
        cfg.data, cfg.train, tokenizer("qwen"), LoaderGeometry(**geometry), "pt"
    )
    assert isinstance(made, IndexedBatchSource)
    return made, evaluation


def numbers(batches: Sequence[Any]) -> list[int]:
    return [n for batch in batches for n in batch.sample_ids.tolist()]


def test_batches_of_ranks_are_megatron_s_and_resume(corpora: dict[str, str], tmp_path: Path) -> None:
    """Global batch k holds samples [k gbs, (k + 1) gbs): micro-batches over ranks, then accumulation."""
    cfg = config(tmp_path, ["0.5", corpora["a"], "0.5", corpora["b"]])
    ranks = [source(cfg, dp_rank=r, dp_size=2, per_device=2, accumulation=2)[0] for r in range(2)]
    for step in range(2):
        first = step * 8
        assert numbers(ranks[0].next()) == [first, first + 1, first + 4, first + 5]
        assert numbers(ranks[1].next()) == [first + 2, first + 3, first + 6, first + 7]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    (other, _) = source(cfg, per_device=4, accumulation=2)
    other.load_state_dict(state)
    assert numbers(other.next()) == list(range(16, 24))
    assert other.epoch == pytest.approx(24 / other.samples.one_pass)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_seed": 8}, "--data_seed was 7"),
        ({"max_length": 8}, "--max_length was 16"),
        ({"data_split": "50,50"}, "--data_split takes other parts"),
        ({"max_steps": 200}, "epochs of a"),
        ({"dataset": "c"}, "other content"),
        ({"dataset": "a c"}, "named 1 data sets"),
    ],
)
def test_another_order_is_refused_on_resume(
    change: dict[str, Any], said: str, corpora: dict[str, str], tmp_path: Path
) -> None:
    names = ["a"]
    made, _ = source(config(tmp_path, [corpora["a"]]), per_device=4)
    state = made.state_dict()
    if "dataset" in change:
        names = change["dataset"].split()
        change = {}
    other, _ = source(config(tmp_path, [corpora[n] for n in names], **change), per_device=4)
    with pytest.raises(DataError, match=said):
        other.load_state_dict(state)


def test_more_steps_in_the_same_epoch_keep_the_position(corpora: dict[str, str], tmp_path: Path) -> None:
    made, _ = source(config(tmp_path, [corpora["a"]]), per_device=4)
    wanted = [numbers(made.next()) for _ in range(3)][-1]
    other, _ = source(config(tmp_path, [corpora["a"]], max_steps=9), per_device=4)
    other.load_state_dict(made.state_dict() | {"rows_taken": 8})
    batch = other.next()
    assert numbers(batch) == wanted
    assert batch[0].input_ids.tolist() == [made.samples.read(n)[0][:-1].tolist() for n in wanted]


def test_evaluation_has_the_second_share_or_data_of_its_own(corpora: dict[str, str], tmp_path: Path) -> None:
    cfg = config(tmp_path, [corpora["a"]], data_split="80,20,0")
    _, evaluation = source(cfg, per_device=3)
    part = ours(tmp_path / "ours", [corpora["a"]], (0.8, 1.0), None, 16)
    shown = [n for batches in evaluation.eval_batches() for n in numbers(batches) if n >= 0]
    assert shown == list(range(len(part)))
    assert evaluation.data.read(0)[0].tolist() == part.read(0)[0].tolist()
    cfg = config(tmp_path, [corpora["a"]], val_dataset=["1", corpora["b"], "1", corpora["c"]], eval_iters=2)
    _, evaluation = source(cfg, per_device=4)
    assert len(evaluation.data) == 8 and evaluation.data.chosen[:4].tolist() == [0, 1, 0, 1]


def test_too_little_data_is_named(corpora: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than one sample of --max_length 4096"):
        source(config(tmp_path, [corpora["c"]], max_length=4096), per_device=2)
    with pytest.raises(DataError, match="a weight before each prefix, which repeats data"):
        source(config(tmp_path, [corpora["a"], corpora["c"]], max_steps=500), per_device=8)
    with pytest.raises(DataError, match="token [0-9]+ is out of range"):
        made, _ = source(config(tmp_path, [corpora["a"]]), per_device=8, vocabulary=50)
        made.next()


def test_written_files_are_megatron_core_s(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    rng = np.random.default_rng(0)
    for vocabulary in (300, 70_000):
        documents = [rng.integers(0, vocabulary, n) for n in (5, 1, 17)]
        prefix = str(tmp_path / f"v{vocabulary}")
        lengths = np.array([len(d) for d in documents])
        write_indexed_tokens(prefix, lengths, documents, smallest_token_type(vocabulary))
        theirs = IndexedDataset(prefix)
        assert [theirs[i].tolist() for i in range(3)] == [d.tolist() for d in documents]
        assert theirs.document_indices.tolist() == [0, 1, 2, 3]
        mine = open_indexed_tokens(prefix)
        assert [mine.read(i, 0, 99 if i == 2 else len(d)).tolist() for i, d in enumerate(documents)][:2] == [
            d.tolist() for d in documents[:2]
        ]


@pytest.mark.parametrize("fault", ["magic", "version", "type", "index", "binary", "missing"])
def test_damaged_files_are_refused(fault: str, tmp_path: Path) -> None:
    prefix = written(tmp_path, "d", 5, 1)
    index, binary = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    content = bytearray(index.read_bytes())
    said = {
        "magic": "is not an index of Megatron-LM",
        "version": "has version 2",
        "type": "token type 7",
        "index": r"d\.idx: is cut off",
        "binary": r"d\.bin: is cut off",
        "missing": r"d\.bin: cannot be read",
    }[fault]
    if fault == "magic":
        content[0] = 65
    elif fault == "version":
        content[9] = 2
    elif fault == "type":
        content[17] = 7
    elif fault == "index":
        content = content[:-60]
    index.write_bytes(content)
    if fault == "binary":
        binary.write_bytes(binary.read_bytes()[:-8])
    elif fault == "missing":
        binary.unlink()
    with pytest.raises(DataError, match=said):
        open_indexed_tokens(prefix)


INDEX = struct.Struct("<9sQBQQ4i4q5q")


@pytest.mark.parametrize(
    ("lengths", "offsets", "said"),
    [
        ((50,) * 4, (0, -200, 400, 600), r"d\.idx, sequence 1: begins at byte -200"),
        ((50,) * 4, (0, 200, 401, 600), r"d\.idx, sequence 2: begins at byte 401"),
        ((50, 50, -50, 50), (0, 200, 400, 600), r"d\.idx, sequence 2: has -50 tokens"),
        ((50,) * 4, (10**12, 200, 400, 600), r"d\.bin: is cut off: 800 bytes; sequence 0 of .*d\.idx ends at byte 1,0"),
        ((50,) * 4, (0, 2**63 - 4, 400, 600), r"d\.bin: is cut off: 800 bytes; sequence 1 of "),
        ((50, 50, 2**31 - 1, 50), (0, 200, 400, 600), r"d\.bin: is cut off: 800 bytes; sequence 2 of "),
        ((50, 50, 50, 50), (0, 200, 400, 604), r"d\.bin: is cut off: 800 bytes; sequence 3 of .* ends at byte 804"),
    ],
)
def test_every_sequence_lies_within_the_tokens(
    lengths: tuple[int, ...], offsets: tuple[int, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d.idx").write_bytes(INDEX.pack(b"MMIDIDX\0\0", 1, 4, 4, 5, *lengths, *offsets, *range(5)))
    (tmp_path / "d.bin").write_bytes(bytes(800))
    for at_a_time in (1 << 20, 1):
        monkeypatch.setattr(files, "CHECKED", at_a_time)
        with pytest.raises(DataError, match=said):
            open_indexed_tokens(str(tmp_path / "d"))


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_pipe_is_no_indexed_data(suffix: str, tmp_path: Path) -> None:
    prefix = written(tmp_path, "d", 5, 1)
    Path(f"{prefix}{suffix}").unlink()
    os.mkfifo(f"{prefix}{suffix}")
    with pytest.raises(DataError, match=rf"d\{suffix}: is not a file"):
        open_indexed_tokens(prefix)


def test_what_entries_mean(corpora: dict[str, str], tmp_path: Path) -> None:
    a, b = corpora["a"], corpora["b"]
    assert parse_indexed_blend(["data.jsonl", "0.3"]) is None
    assert parse_indexed_blend([f"{a}.bin"]) == parse_indexed_blend([a]) == IndexedBlend((a,), None)
    assert parse_indexed_blend(["30", a, "0.7", b]) == IndexedBlend((a, b), (30.0, 0.7))
    for wrong in (["0.3", a, b], [a, "0.3"], ["0", a, "1", b], ["-1", a], [a, "data.jsonl"]):
        with pytest.raises(ValueError):
            parse_indexed_blend(wrong)

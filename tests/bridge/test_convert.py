"""HF -> checkpoint -> HF, bit for bit, for every family and dtype; interruptions, refusals, what lies in the
folders.

Covers: megaswift/bridge/convert/resumable.py, megaswift/bridge/convert/job.py,
megaswift/bridge/checkpoint/source.py, megaswift/bridge/weight_source.py, megaswift/bridge/checkpoint/pickle_scan.py,
megaswift/bridge/hf/header.py.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from megaswift.bridge.checkpoint.entries import sharded_state_dict_entry
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.convert import job, to_hf, to_megatron
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import CheckpointError, LayoutError, UserError
from tests.bridge.folders import make, plan_of, rewrite, set_config, tensors_of
from tests.bridge.test_round_trip import ALL

pytestmark = pytest.mark.wide

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY_DTYPE = ("dense", "dense-tied", "moe", "gpt_oss", "deepseek_v3", "phi3")
forth, back = to_megatron.hf_to_megatron, to_hf.megatron_to_hf


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Names, dtypes and bits."""
    assert a.keys() == b.keys() and a
    assert {n: t.dtype for n, t in a.items()} == {n: t.dtype for n, t in b.items()}
    different = [n for n in a if not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))]
    assert not different, different[:5]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "dtype"), [(v, d) for v in ALL for d in DTYPES if d == "bfloat16" or v in EVERY_DTYPE]
)
def test_bitwise(variant: str, dtype: str, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders, DTYPES[dtype])
    forth(folder, tmp_path / "m", to_megatron.HfToMegatronOptions(layout={"tp": 2}, file_bytes=100_000))
    back(tmp_path / "m", tmp_path / "hf", to_hf.MegatronToHfOptions(max_shard_bytes=150_000))
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(folder))
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "hf"))
    assert ours == theirs


@pytest.mark.wide
def test_small_blocks_change_nothing(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in many parts: rows, and parts of rows."""
    for variant, size in (("moe", 1000), ("qwen2", 100)):
        monkeypatch.setattr(job.split_region_into_blocks, "__defaults__", (size,))
        folder = make(variant, folders, torch.bfloat16)
        forth(folder, tmp_path / variant)
        back(tmp_path / variant, tmp_path / f"{variant}-hf")
        assert_same(tensors_of(tmp_path / f"{variant}-hf"), tensors_of(folder))


def test_each_tensor_keeps_its_own_dtype(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fresh("moe")
    kinds = list(DTYPES.values())
    mixed = {n: t.to(kinds[i % 3]) for i, (n, t) in enumerate(tensors_of(folder).items())}
    rewrite(folder, mixed)
    forth(folder, tmp_path / "m")
    back(tmp_path / "m", tmp_path / "hf")
    assert_same(tensors_of(tmp_path / "hf"), mixed)
    back(tmp_path / "m", tmp_path / "half", to_hf.MegatronToHfOptions(dtype=torch.bfloat16))
    assert_same(tensors_of(tmp_path / "half"), {n: t.bfloat16() for n, t in mixed.items()})
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    forth(folder, tmp_path / "m16", to_megatron.HfToMegatronOptions(dtype=torch.float16))
    back(tmp_path / "m16", tmp_path / "hf16")
    assert_same(tensors_of(tmp_path / "hf16"), {n: t.half() for n, t in mixed.items()})


def test_bits_that_are_no_numbers(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    """NaN payloads, infinities, negative zero, subnormals: every pattern of two bytes."""
    folder = fresh("dense")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weird = {n: patterns[torch.arange(t.numel()) * 7 % 2**16].view(t.shape) for n, t in tensors_of(folder).items()}
    rewrite(folder, weird)
    forth(folder, tmp_path / "m")
    back(tmp_path / "m", tmp_path / "hf")
    assert_same(tensors_of(tmp_path / "hf"), weird)


def with_prediction_layer(folder: Path) -> dict[str, Tensor]:
    """A layer for further tokens, which no model trains, added to a folder; all its tensors."""
    at = f"model.layers.{plan_of(folder).spec.num_layers}."
    more = {
        "eh_proj.weight": torch.randn(4, 8),
        "enorm.weight": torch.randn(4).bfloat16(),
        "scale": torch.arange(3, dtype=torch.int64),
    }
    rewrite(folder, {**tensors_of(folder), **{at + name: tensor for name, tensor in more.items()}})
    set_config(folder, num_nextn_predict_layers=1)
    return tensors_of(folder)


def test_prediction_layers_pass_through(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fresh("glm4_moe")
    want = with_prediction_layer(folder)
    forth(folder, tmp_path / "m")
    back(tmp_path / "m", tmp_path / "hf")
    assert_same(tensors_of(tmp_path / "hf"), want)
    back(tmp_path / "m", tmp_path / "half", to_hf.MegatronToHfOptions(dtype=torch.bfloat16))
    plan = plan_of(folder)
    assert_same(tensors_of(tmp_path / "half"), {n: t.bfloat16() if n in plan.hf_shapes else t for n, t in want.items()})


@pytest.mark.parametrize("variant", ["dense", "moe-tied"])
def test_torchs_own_reader_reads_it(variant: str, folders: Path, tmp_path: Path) -> None:
    """Not our reader: torch.distributed.checkpoint, key by key, against the shards the engine would load."""
    folder = make(variant, folders, torch.bfloat16)
    forth(folder, tmp_path / "m", to_megatron.HfToMegatronOptions(layout={"tp": 2}))
    loaded = _load_state_dict_from_keys(checkpoint_id=tmp_path / "m", storage_reader=FileSystemReader(tmp_path / "m"))
    plan, source = plan_of(folder), open_weights(folder)
    at = {entry.megatron: sharded_state_dict_entry(entry, 144) for entry in plan.entries}
    assert set(loaded) == {p.key for p in at.values()}
    for entry in plan.entries:
        where = at[entry.megatron]
        tensor = loaded[where.key]
        assert tuple(tensor.shape) == where.whole
        want = entry.read(source, padded_vocab=144)
        assert torch.equal(tensor if entry.expert is None else tensor[entry.expert], want), entry.megatron


def test_the_files_of_the_folders(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    folder = fresh("dense")
    side = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "generation_config.json": '{"top_p": 0.5}',
        "chat_template.jinja": "hi",
    }
    for name, text in side.items():
        (folder / name).write_text(text)
    forth(folder, tmp_path / "m", to_megatron.HfToMegatronOptions(layout={"tp": 4, "pp": 2}))
    facts = json.loads((tmp_path / "m" / "conversion.json").read_text())
    assert facts["padded_vocabulary"] == 160 and facts["layout"] == {"tp": 4, "pp": 2}
    assert TorchDistSource(tmp_path / "m").shape("output_layer.weight") == (160, 64)
    shutil.rmtree(folder)
    back(tmp_path / "m", tmp_path / "hf", to_hf.MegatronToHfOptions(max_shard_bytes=50_000))
    assert {n: (tmp_path / "hf" / n).read_text() for n in side} == side
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("variant", "layout", "told"),
    [
        ("dense", {"tp": 3}, "tp"),
        ("moe", {"ep": 3}, "ep"),
        ("dense", {"pp": 3}, "pp"),
        ("dense", {"ep": 2}, "ep"),
    ],
)
def test_layouts_that_the_model_does_not_allow(
    variant: str, layout: dict[str, int], told: str, folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError) as caught:
        forth(make(variant, folders), tmp_path / "m", to_megatron.HfToMegatronOptions(layout=layout))
    assert told in str(caught.value) and not list(tmp_path.iterdir())


class Stop(Exception):
    """Stands for whatever ends a conversion."""


def stop_after(monkeypatch: pytest.MonkeyPatch, items: int, error: type[BaseException]) -> list[int]:
    """The conversion ends before item number `items` of this run; the numbers of those that are begun."""
    begun: list[int] = []
    move = job._move

    def limited(stage: Any, item: Any, number: int, meter: Any) -> None:
        if len(begun) == items:
            raise error
        begun.append(number)
        move(stage, item, number, meter)

    monkeypatch.setattr(job, "_move", limited)
    return begun


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["forth", "back"])
def test_an_interrupted_conversion_resumes(
    way: str,
    error: type[BaseException],
    fresh: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = fresh("moe")
    if way == "back":
        forth(folder, tmp_path / "m")
    source = folder if way == "forth" else tmp_path / "m"
    convert, target = (forth, tmp_path / "out") if way == "forth" else (back, tmp_path / "out")
    with monkeypatch.context() as patch:
        first = stop_after(patch, 5, error)
        with pytest.raises(job.ConversionInterrupted if error is KeyboardInterrupt else error):
            convert(source, target)
    assert not target.exists() and len(first) == 5
    with monkeypatch.context() as patch:
        second = stop_after(patch, 10**9, error)
        convert(source, target)
    assert "resuming: 5 of" in capsys.readouterr().err and not set(first) & set(second)
    if way == "forth":
        back(target, tmp_path / "hf")
        target = tmp_path / "hf"
    assert_same(tensors_of(target), tensors_of(folder))
    assert not list(tmp_path.glob(".*"))


def test_another_source_starts_anew(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fresh("dense")
    with monkeypatch.context() as patch:
        stop_after(patch, 5, Stop)
        with pytest.raises(Stop):
            forth(folder, tmp_path / "m")
    rewrite(folder, {n: t + 1 for n, t in tensors_of(folder).items()})
    forth(folder, tmp_path / "m")
    assert "starting over" in capsys.readouterr().err
    back(tmp_path / "m", tmp_path / "hf")
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(folder))


def test_nothing_is_replaced_unasked(folders: Path, tmp_path: Path) -> None:
    folder = make("dense", folders)
    forth(folder, tmp_path / "m")
    before = (tmp_path / "m" / ".metadata").stat().st_ino
    with pytest.raises(CheckpointError, match="already exists"):
        forth(folder, tmp_path / "m")
    assert (tmp_path / "m" / ".metadata").stat().st_ino == before
    (tmp_path / "m" / "stray").write_text("")
    forth(folder, tmp_path / "m", to_megatron.HfToMegatronOptions(overwrite=True))
    assert not (tmp_path / "m" / "stray").exists() and open_weights(tmp_path / "m").names()


def test_progress_shows_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on a terminal: a line now and then. What an interrupted run had done does not count as speed."""
    now = [100.0]
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    meter = job.ProgressMeter(16 * 10**9, 10**9, stream)
    meter.add(10**9)
    assert stream.getvalue() == ""
    now[0] += 11
    meter.add(10 * 10**9)
    assert stream.getvalue() == "12.0 of 16.0 GB, 1.00 GB/s, ETA 0:04\n"


def test_a_full_disk_is_noticed_before(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, and 1,000 are free"):
        forth(make("dense", folders), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_the_wrong_way_round(folders: Path, tmp_path: Path) -> None:
    folder = make("dense", folders)
    forth(folder, tmp_path / "m")
    (tmp_path / "made").mkdir()
    for convert, source, told in (
        (forth, tmp_path / "m", "is already a Megatron checkpoint"),
        (back, folder, "is already a Hugging Face folder"),
        (back, tmp_path / "none", "does not exist\n    try: look in "),
        (back, tmp_path / "madee", "does not exist\n    try: did you mean made\\?"),
        (forth, tmp_path / "madee", "does not exist\n    try: did you mean made\\?"),
        (back, tmp_path, "contains no checkpoint"),
    ):
        with pytest.raises(UserError, match=told):
            convert(source, tmp_path / "out")

"""Reading a legacy file runs nothing that it names, and its options and tensors are those that were saved.

Covers: megaswift/bridge/foreign/legacy_pickle.py, megaswift/bridge/foreign/legacy.py.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import types
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.bridge.file_tensor import mapped_tensor
from megaswift.bridge.foreign.legacy_pickle import LegacyFile
from megaswift.errors import CheckpointError


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *words: Any) -> None:
        self.function = function
        self.words = words

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.words


def archive(path: Path, description: bytes) -> Path:
    """A file of torch.save with this description."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", description)
        file.writestr("archive/data/0", bytes(64))
    return path


def named(module: str, name: str, *, stack: bool = False) -> bytes:
    """A pickle that calls a function by its name, with the text `x`."""
    if stack:
        text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        return b"\x80\x04" + text + b"\x93\x8c\x01x\x85R."
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X\x01\x00\x00\x00x\x85R."


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("subprocess", "check_output"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("__builtin__", "eval"),
    ("builtins", "compile"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("importlib", "import_module"),
    ("runpy", "run_path"),
    ("pty", "spawn"),
    ("socket", "create_connection"),
    ("shutil", "rmtree"),
    ("pickle", "loads"),
    ("torch", "load"),
    ("torch", "_dynamo"),
    ("torch", "hub.load"),
    ("torch", "float32.__class__"),
    ("torch.hub", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("torch._utils", "_rebuild_from_type_v2"),
    ("torch.jit", "load"),
    ("numpy", "load"),
    ("numpy", "fromfile"),
    ("numpy.core.multiarray", "fromfile"),
    ("numpy.testing._private.utils", "runstring"),
    ("collections", "OrderedDict.__class__"),
    ("argparse", "ArgumentParser"),
    ("argparse", "FileType"),
    ("argparse", "Namespace.__init__.__globals__"),
    ("_io", "open"),
    ("_io", "FileIO"),
    ("_codecs", "lookup"),
    ("copyreg", "_reconstructor"),
    ("functools", "partial"),
    ("operator", "attrgetter"),
    ("code", "interact"),
    ("webbrowser", "open"),
    ("megatron", "core"),
    ("megatronx.core", "run"),
    ("transformer_enginex", "run"),
    ("", "eval"),
]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(words) for words in NAMES])
def test_other_names_are_refused(module: str, name: str, stack: bool, tmp_path: Path) -> None:
    archive(tmp_path / "file.pt", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="has no entry model"):
        LegacyFile(tmp_path / "file.pt")  # imports what it needs itself
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=r"cannot be read|has no entry model|no dictionary"):
        LegacyFile(archive(tmp_path / "file.pt", named(module, name, stack=stack)))
    assert set(sys.modules) == before


def test_what_runs_with_pickle_does_not_run_here(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    for function, *words in (
        (os.system, f"touch {fired}"),
        (subprocess.check_output, ["touch", str(fired)]),
        (Path.touch, fired),
        (eval, f"open({str(fired)!r}, 'w')"),
        (io.open, str(fired), "w"),
    ):
        state = {"model": OrderedDict(w=torch.ones(2)), "args": Namespace(a=Calls(function, *words))}
        torch.save(state, tmp_path / "file.pt")
        torch.load(tmp_path / "file.pt", weights_only=False)
        assert fired.exists(), function
        fired.unlink()
        with pytest.raises(CheckpointError, match="which is not part of a checkpoint's weights"):
            LegacyFile(tmp_path / "file.pt")
        assert not fired.exists(), function


def test_classes_of_megatron_are_neither_imported_nor_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired = tmp_path / "fired"
    module = types.ModuleType("megatron.core.pretended")
    module.touch = lambda: fired.touch()  # type: ignore[attr-defined]
    module.touch.__module__, module.touch.__qualname__ = module.__name__, "touch"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    state = {"model": OrderedDict(w=torch.ones(2)), "args": Namespace(a=Calls(module.touch))}  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "file.pt")
    monkeypatch.delitem(sys.modules, module.__name__)
    assert "a" in LegacyFile(tmp_path / "file.pt").options
    assert module.__name__ not in sys.modules and not fired.exists()


Kind = enum.Enum("Kind", {"gpt": 1}, module="megatron.core.enums")


def test_options_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = types.ModuleType("megatron.core.enums")
    pretended.Kind = Kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.enums", pretended)
    big = torch.arange(40.0).view(5, 8)
    model = OrderedDict(
        whole=big,
        rows=big[2:4],
        turned=big.t(),
        halves=torch.nn.Parameter(torch.arange(6).bfloat16().view(2, 3)),
        bytes=torch.tensor([1, 2, 255], dtype=torch.uint8),
        _extra_state=io.BytesIO(b"x"),
        none=None,
    )
    numbers = {"i": np.int64(-5), "f": np.float32(1.5), "b": np.bool_(True)}
    args = Namespace(tp=2, dtype=torch.bfloat16, kind=Kind.gpt, names=["a"], none=None, exit=signal.SIGTERM, **numbers)
    state = {
        "args": args,
        "model": model,
        "iteration": 7,
        "rng_state": [{"np": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}],
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "seen": {1, 2}},
    }
    torch.save(state, tmp_path / "file.pt")
    file = LegacyFile(tmp_path / "file.pt")
    assert {name: file.options[name] for name in ("tp", "names", "none", "i", "f", "b")} == {
        "tp": 2,
        "names": ["a"],
        "none": None,
        "i": -5,
        "f": 1.5,
        "b": True,
    }
    assert file.options["dtype"] is torch.bfloat16
    [chunk] = file.chunks
    assert set(chunk) == {"whole", "rows", "turned", "halves", "bytes"}
    for name in ("whole", "rows", "halves", "bytes"):
        assert torch.equal(mapped_tensor(file.located(chunk[name])), model[name].detach()), name
    with pytest.raises(ValueError, match="not in row-major order"):
        file.located(chunk["turned"])


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ([1], "holds no dictionary"),
        ({"args": Namespace()}, "has no entry model"),
        ({"model": [1]}, "its entry model is no dictionary"),
        ({"model": {"language_model": {}}}, "from before Megatron-Core"),
    ],
)
def test_other_contents(state: Any, told: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=told):
        LegacyFile(tmp_path / "file.pt")


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(pickle.dumps({"model": {}}))
    with pytest.raises(CheckpointError, match="is not a zip archive"):
        LegacyFile(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(100))
    with pytest.raises(CheckpointError, match=r"data\.pkl is compressed"):
        LegacyFile(path)
    torch.save({"model": {"w": torch.ones(64)}}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is not a zip archive"):
        LegacyFile(path)


def test_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(4)}}, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as file:
        records = {info.filename: file.read(info) for info in file.infolist()}
    [name] = [name for name in records if name.endswith("data.pkl")]
    assert any(op.name == "BININT1" and value == 4 for op, value, _ in pickletools.genops(records[name]))
    records[name] = records[name].replace(b"K\x04", b"K\x63")
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as file:
        for each, content in records.items():
            file.writestr(each, content)
    read = LegacyFile(tmp_path / "file.pt")
    with pytest.raises(ValueError, match="it has 396 bytes, its storage 16"):
        read.located(read.chunks[0]["w"])

"""Files of strangers: pipes and devices end no command's patience, links publish no other file of the machine.

Covers: megaswift/folders/side_files.py.
"""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megaswift import cli
from megaswift.base.plain_files import files_below, outside_link_rule, read_plain_file
from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.checkpoint.hf_metadata import copy_tokenizer_and_template_files, read_original_tensor_dtypes
from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata
from megaswift.bridge.hf.base_model import link_weights_copy_rest
from megaswift.errors import CheckpointError, Problem, UserError, WeightsError
from megaswift.folders.saved_steps import load_manifest_or_problem, step_named_by_latest_json
from megaswift.folders.side_files import side_file_problems, side_files
from megaswift.models.family import read_config_json
from megaswift.rollout.sync_folders import WeightFolder
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hooks.best_model import copy_export
from megaswift.trainers.hub_clients import HubRepository


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A call that waits for a pipe is interrupted."""

    def late(*_: object) -> None:
        raise AssertionError("still waiting after 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a file of someone else's beside it."""
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/a.jinja"):
        (folder / name).write_text("{}")
    (tmp_path / "secret").write_text("canary")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key.jinja").write_text("canary")
    return folder


LINKS = [
    ("tokenizer_notes.txt", "../secret"),
    ("tokenizer.model", "../../secret"),
    ("chat_template_x", "../secret"),
    ("generation_config.json", "../secret"),
    ("vocab.txt", "inner"),
]


def linked(model: Path, name: str, target: str) -> None:
    if target == "inner":  # by way of a link that is itself inside
        (model / "inner").symlink_to("../secret")
    (model / name).symlink_to((model.parent / "secret") if target == "../../secret" else target)


COPIES: list[Callable[[Path, Path], object]] = [
    copy_tokenizer_and_template_files,
    link_weights_copy_rest,
    copy_export,
    lambda source, target: WeightFolder(target, source).write([("a", torch.zeros(1))]),
]


@pytest.mark.parametrize(("name", "target"), LINKS)
@pytest.mark.parametrize("copy", COPIES, ids=["checkpoint", "base model", "best model", "weight sync"])
def test_no_copy_follows_a_link_out_of_the_folder(
    copy: Callable[[Path, Path], object], name: str, target: str, model: Path, tmp_path: Path
) -> None:
    if copy is COPIES[3]:
        name = "notes.txt"
    linked(model, name, target)
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match=rf"{name}: is a link to .*secret, outside its folder"):
        copy(model, tmp_path / "out")
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.read_text() == "canary"]


def test_a_linked_folder_of_templates_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "additional_chat_templates" / "a.jinja").unlink()
    (model / "additional_chat_templates").rmdir()
    (model / "additional_chat_templates").symlink_to("../secrets")
    with pytest.raises(WeightsError, match=r"key.jinja: is a link to .*secrets/key.jinja"):
        side_files(model)
    assert [p.what for p in side_file_problems(model)] == [str(model / "additional_chat_templates" / "key.jinja")]


def test_links_within_a_folder_and_of_a_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.model").symlink_to("tokenizer.json")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert [p.name for p in side_files(model)] == [
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "a.jinja",
    ]
    assert [p.name for p in side_files(snapshot)] == ["tokenizer.json"]
    assert side_file_problems(model) == side_file_problems(snapshot) == []
    (tmp_path / "model-link").symlink_to(model)
    assert len(side_files(tmp_path / "model-link")) == 4
    (model / "ring").symlink_to("ring")
    assert "is not a file name" in outside_link_rule(model, model / "ring") or not (model / "ring").exists()


def test_an_upload_follows_no_link(model: Path) -> None:
    class Client:
        def send(self, *_: object) -> None:
            raise AssertionError("sent")

    (model / "notes").symlink_to("../secrets")
    with pytest.raises(WeightsError, match="notes: is a link to"):
        HubRepository(Client(), None, "a/b").send(model, "m")  # type: ignore[arg-type]
    assert model / "notes" in files_below(model)


def test_an_adapter_folder_with_links(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").symlink_to("../other.json")
    with pytest.raises(WeightsError, match="adapter_config.json: is a link to"):
        PeftFolder(tmp_path / "adapter")


def special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/dev/stdin", "/dev/tty"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-1"
    for name in ("manifest.json", "weights.json", "config.json", "adapter_config.json", ".metadata", "a"):
        special(step / name, kind)
    special(tmp_path / "checkpoints" / "latest.json", kind)
    with pytest.raises(OSError):
        read_plain_file(step / "a")
    found = load_manifest_or_problem(step)
    assert isinstance(found, Problem) and "cannot be read" in found.rule
    assert step_named_by_latest_json(tmp_path / "checkpoints") is None
    assert isinstance(read_torch_dist_metadata(step), Problem)
    for read in (read_original_tensor_dtypes, read_config_json, PeftFolder):
        with pytest.raises(UserError):
            read(step)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_plain_file(tmp_path / "a", 1000)
    tracemalloc.start()
    try:
        assert read_plain_file(Path(__file__)) == Path(__file__).read_bytes()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("command", ["ls", "verify", "rm"])
@pytest.mark.parametrize("name", ["manifest.json", "engine/engine.json"])
def test_checkpoint_commands_end_at_a_pipe(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        (store.begin(step) / "engine").mkdir()
        store.finish(step, {}, {})
    special(store.folder(1) / name, "pipe")
    target = tmp_path if command == "ls" else store.folder(1)
    code = cli.main(["checkpoint", command, str(target)])
    said = capsys.readouterr()
    assert code == (2 if (command, name) == ("verify", "manifest.json") else 0)
    assert "Traceback" not in said.err and "step-1" in said.out + said.err or command == "ls"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_where_a_checkpoint_is_written_is_named(kind: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("x")
    store.root.mkdir()
    if kind == "link":
        store.saving(7).symlink_to(tmp_path / "elsewhere")
    else:
        store.saving(7).write_text("x")
    with pytest.raises(CheckpointError, match=rf"step-7.saving: is a {kind}"):
        store.begin(7)
    assert (tmp_path / "elsewhere" / "kept").is_file()
    for name in ("step-3.deleting", "step-4.saving"):
        (store.root / name).symlink_to(tmp_path / "elsewhere")
    store.begin(8)
    store.finish(8, {}, {})
    assert store.rotate(1) == [] and (tmp_path / "elsewhere" / "kept").is_file()
    store.folder(5).symlink_to(tmp_path / "elsewhere")
    store.remove([store.folder(5)])
    assert (tmp_path / "elsewhere" / "kept").is_file() and not store.folder(5).is_symlink()

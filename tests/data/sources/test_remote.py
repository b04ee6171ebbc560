"""Data sets at addresses: fsspec's file system in memory, and a server of S3's protocol (moto) where it and s3fs are
installed.

The server's tests: `pip install s3fs "moto[server]"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_document_splits
from megaswift.data.sources.remote import with_local_copy
from megaswift.data.store.write import main as cache
from megaswift.errors import ConfigError, DataError
from megaswift.run.checks.data import data_problems
from tests.data.makers import chat, tokenizer

KEY, SECRET = "key-of-the-bucket", "secret-of-the-bucket"


def lines(*texts: str) -> bytes:
    return "".join(json.dumps(chat(text, f"answer {text}")) + "\n" for text in texts).encode()


FILES = {"plain.jsonl": lines("a", "b", "c"), "parts/train.jsonl": lines("d"), "parts/more/x.jsonl": lines("e", "f")}


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """(the address of FILES, its file system)."""
    import fsspec

    if request.param == "memory":
        system = fsspec.filesystem("memory")
        system.store.clear()
        system.pipe({f"/bucket/{name}": content for name, content in FILES.items()})
        yield "memory://bucket", system
        return
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    if not system.exists("bucket"):  # servers of a process share their state
        system.mkdir("bucket")
    system.pipe({f"bucket/{name}": content for name, content in FILES.items()})
    fsspec.filesystem("s3").clear_instance_cache()
    yield "s3://bucket", system
    server.stop()


def texts(tmp_path: Path, *entries: str, **options: Any) -> list[str]:
    words = ["--model", "m", "--dataset_cache_dir", str(tmp_path / "cache"), "--dataset", *entries]
    cfg = load_config("sft", [*words, *(w for k, v in options.items() for w in (f"--{k}", v))], environ={})
    assert not data_problems(cfg)
    reader = tokenizer("qwen", "qwen2_5")
    docs, _ = load_document_splits(cfg.data, cfg.train, reader)
    return [reader.decode(docs.read(i)[0]).split("answer ")[1].split("<")[0] for i in range(len(docs))]


def test_files_folders_patterns_and_rows(tmp_path: Path, bucket: tuple[str, Any]) -> None:
    address, _ = bucket
    assert texts(tmp_path, f"{address}/plain.jsonl") == ["a", "b", "c"]
    assert texts(tmp_path, f"{address}/plain.jsonl#:2", f"{address}/parts") == ["a", "b", "e", "f", "d"]
    assert texts(tmp_path, f"{address}/parts:train") == ["d"]
    assert texts(tmp_path, f"{address}/parts/**/*.jsonl") == ["e", "f", "d"]
    assert texts(tmp_path, f"{address}/parts:train#:3") == ["d"] * 3


def test_a_copy_is_made_once_and_again_when_the_file_changes(
    tmp_path: Path, bucket: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    address, system = bucket
    first = with_local_copy(f"{address}/plain.jsonl", tmp_path, "--dataset")
    stamp = Path(first).stat().st_mtime_ns
    assert with_local_copy(f"{address}/plain.jsonl", tmp_path, "--dataset") == first
    assert Path(first).stat().st_mtime_ns == stamp and "copying 1 files" in capsys.readouterr().err
    system.pipe_file(f"{address.partition('://')[2]}/plain.jsonl", lines("x", "y", "z"))
    system.invalidate_cache()
    other = with_local_copy(f"{address}/plain.jsonl", tmp_path, "--dataset")
    assert other != first and Path(other).read_bytes() == lines("x", "y", "z") and Path(other).name == "plain.jsonl"


def test_streams_and_cached_data_sets(tmp_path: Path, bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    address, system = bucket
    monkeypatch.setenv("MEGASWIFT_CACHE", str(tmp_path / "streams"))
    words = ["--model", "m", "--streaming", "--max_steps", "3", "--dataset", f"{address}/plain.jsonl"]
    cfg = load_config("sft", words, environ={})
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry())
    assert source.next()[0].label_tokens and source.state_dict()["sources"] == [f"{address}/plain.jsonl"]
    words = [f"{address}/plain.jsonl", "--model", "m", "--output_dir", str(tmp_path / "out")]
    assert cache(words, lambda *_: tokenizer("qwen", "qwen2_5")) == 0
    system.put(str(tmp_path / "out"), f"{address.partition('://')[2]}/out", recursive=True)
    assert texts(tmp_path, f"{address}/out/train") == ["a", "b", "c"]


def test_what_cannot_be_read(tmp_path: Path, bucket: tuple[str, Any]) -> None:
    address, _ = bucket
    for entry in ("nothing.jsonl", "nothing/*.jsonl"):
        with pytest.raises(DataError, match=r"no (such file|files)(.|\n)*check bucket and path"):
            texts(tmp_path, f"{address}/{entry}")
    assert not list((tmp_path / "cache").glob("remote/*"))


def test_credentials_come_from_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = f"s3://{KEY}:{SECRET}@bucket/plain.jsonl"
    with pytest.raises(ConfigError, match="token in a URL") as refused:
        load_config("sft", ["--model", "m", "--dataset", entry], environ={})
    (problem,) = refused.value.problems
    assert "AWS_SECRET_ACCESS_KEY" in problem.fix
    assert SECRET not in str(problem) and KEY not in str(problem)
    with pytest.raises(DataError) as caught:
        with_local_copy(entry, tmp_path, "--dataset")
    assert SECRET not in str(caught.value)


def test_a_file_system_without_its_package(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"oss://bucket/d.jsonl: needs ossfs(.|\n)*pip install ossfs"):
        texts(tmp_path, "oss://bucket/d.jsonl")
    with pytest.raises(DataError, match="nowhere://bucket/d.jsonl: cannot be read"):
        texts(tmp_path, "nowhere://bucket/d.jsonl")


def test_a_denied_bucket_does_not_show_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(f"AccessDenied for {SECRET}")

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(DataError, match=r"cannot be read \(AccessDenied for \*\*\*\)"):
        texts(tmp_path, "memory://bucket/d.jsonl")

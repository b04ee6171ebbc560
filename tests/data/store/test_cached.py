"""Cached data sets: the batches of the rows themselves for every kind of task, on any ranks, resumed either way; a run
with other options is refused by their names.

Covers: megaswift/data/store/write.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.cli import main
from megaswift.config import SwiftConfig, load_config
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.model_tokenizer import tokenizer_or_processor_for
from megaswift.data.store.write import main as cache
from megaswift.data.store.write import words_of_cached_dataset
from megaswift.errors import DataError
from megaswift.export import main as export
from megaswift.models.options.model import ModelConfig
from megaswift.run.checks.data import data_problems
from tests.data.makers import chat, jsonl, tokenizer
from tests.data.of_config import prompt_splits

CHATS = [chat(f"hello {i}", "answer " * (1 + i % 5)) for i in range(23)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": CHATS,
    "pt": [{"text": "words " * (1 + i % 7)} for i in range(23)],
    "dpo": [{**row, "rejected_response": f"no {i}", "margin": i} for i, row in enumerate(CHATS)],
    "kto": [{**row, "label": i % 2} for i, row in enumerate(CHATS)],
    "grpo": [{**row, "solution": i} for i, row in enumerate(CHATS)],
}


def reader(model: ModelConfig, *_: object) -> Any:
    return tokenizer("llama" if model.model == "other" else "qwen", "qwen2_5")


def written(tmp_path: Path, task: str, *more: str) -> tuple[str, str]:
    """(the data file, the cached folder)."""
    file = jsonl(tmp_path / f"{task}.jsonl", ROWS[task])
    words = ["--model", "m", "--task", task, "--output_dir", str(tmp_path / "cached"), "--overwrite", "true", *more]
    data = [] if "--dataset" in more else [file]
    assert cache([*data, *words, "--dataset_cache_dir", str(tmp_path / "cache")], reader) == 0
    return file, str(tmp_path / "cached" / "train")


def configured(tmp_path: Path, task: str, *words: str) -> SwiftConfig:
    given = [*([] if "--model" in words else ["--model", "m"]), *words]
    given += [] if "--streaming" in words else ["--dataset_cache_dir", str(tmp_path / "cache")]
    return load_config(task, [*given, "--reward_funcs", "format"] if task == "grpo" else given, environ={})


def source(tmp_path: Path, task: str, data: str, *words: str, ranks: int = 1, rank: int = 0) -> Any:
    cfg = configured(tmp_path, task, "--dataset", *data.split(), *words)
    if task == "grpo":
        return prompt_splits(cfg, reader(cfg.model), 4)[0]
    geometry = LoaderGeometry(rank, ranks, 4 // ranks)
    return build_train_and_eval_sources(cfg.data, cfg.train, reader(cfg.model), geometry, task)[0]


def contents(batches: list[Any]) -> list[Any]:
    if not batches or not isinstance(batches[0].__dict__.get("input_ids"), torch.Tensor):
        return [(p.number, p.token_ids, p.content, p.columns) for p in batches]
    return [
        (b.input_ids.tolist(), b.loss_weights.tolist(), {k: v.tolist() for k, v in b.fields.items()}) for b in batches
    ]


def step(made: Any) -> list[Any]:
    """The contents of the next step's batches, or of a generation's prompts."""
    return contents(made.next() if hasattr(made, "next") else [*map(made.at, made.take())])


@pytest.mark.parametrize("task", ROWS)
def test_batches_are_those_of_the_rows(tmp_path: Path, task: str) -> None:
    """Without the rows; and a run goes on from rows to tokens, and back."""
    file, folder = written(tmp_path, task)
    rows = source(tmp_path, task, file)
    wanted = [step(rows) for _ in range(13)]
    state = json.loads(json.dumps(rows.state_dict()))
    after = [step(rows) for _ in range(3)]
    Path(file).rename(tmp_path / "gone.jsonl")
    cached = source(tmp_path, task, folder)
    assert [step(cached) for _ in range(13)] == wanted
    assert json.loads(json.dumps(cached.state_dict())) == state
    resumed = source(tmp_path, task, folder)
    resumed.load_state_dict(state)
    assert [step(resumed) for _ in range(3)] == after
    (tmp_path / "gone.jsonl").rename(file)
    again = source(tmp_path, task, file)
    again.load_state_dict(json.loads(json.dumps(cached.state_dict())))
    assert [step(again) for _ in range(3)] == after


def test_any_ranks_packing_length_and_split(tmp_path: Path) -> None:
    file, folder = written(tmp_path, "sft")
    for words in (["--packing", "--max_length", "90"], ["--split_dataset_ratio", "0.2"], ["--group_by_length"]):
        for rank in range(2):
            a, b = (source(tmp_path, "sft", data, *words, ranks=2, rank=rank) for data in (file, folder))
            assert [contents(a.next()) for _ in range(4)] == [contents(b.next()) for _ in range(4)]


def test_several_data_sets_draws_and_weights(tmp_path: Path) -> None:
    """A folder of two data sets is one entry; random rows are those of the run's seed when it was written."""
    other = jsonl(tmp_path / "other.jsonl", CHATS[:5])
    for count in (9, 30):  # fewer than there are, and all with seven of them again
        some = f"{tmp_path / 'sft.jsonl'}#{count}"
        file, folder = written(tmp_path, "sft", "--dataset", some, other, "--seed", "7")
        plain = source(tmp_path, "sft", f"{some} {other}", "--seed", "7")
        cached = source(tmp_path, "sft", folder, "--seed", "7")
        assert [contents(plain.next()) for _ in range(6)] == [contents(cached.next()) for _ in range(6)]
    mixed = source(
        tmp_path, "sft", f"{folder} {other}", "--interleave_prob", "3", "1", "--stopping_strategy", "all_exhausted"
    )
    assert mixed.data.docs.counted["rows"] == len(mixed.data.docs) and set(mixed.data.docs.store) == {0, 1, 2}


def refused(tmp_path: Path, task: str, folder: str, *words: str) -> str:
    with pytest.raises(DataError) as caught:
        source(tmp_path, task, folder, *words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("sft", ["--model", "other"], "another value of --model (its tokenizer) than this run has"),
        ("sft", ["--chat_template", "{% for m in messages %}{{ m.content }}</s>{% endfor %}"], "of --chat_template"),
        ("sft", ["--loss_scale", "last_round"], "of --loss_scale"),
        ("sft", ["--add_non_thinking_prefix", "false"], "of --add_non_thinking_prefix"),
        ("sft", ["--system", "Be brief."], "--system: None, but 'Be brief.' in this run"),
        ("sft", ["--model_name", "A"], "--model_name: [], but ['A'] in this run"),
        ("sft", ["--columns", "a=query"], "--columns: {}, but {'a': 'query'} in this run"),
        ("kto", [], "the task: 'sft', but 'kto' in this run"),
    ],
)
def test_other_tokens_are_refused_by_the_option_s_name(tmp_path: Path, task: str, words: list[str], said: str) -> None:
    _, folder = written(tmp_path, "sft")
    text = refused(tmp_path, task, folder, *words)
    assert text.count("was made with another value of") == 1 and said in text and "write it again" in text


def test_columns_that_were_renamed_need_not_be_named_again(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "d.jsonl", [{"q": "a", "a": "b"}] * 5)
    words = ["--model", "m", "--output_dir", str(tmp_path / "out"), "--columns", "q=query", "a=response"]
    assert cache([file, *words, "--dataset_cache_dir", str(tmp_path / "cache")], reader) == 0
    folder = str(tmp_path / "out" / "train")
    assert len(source(tmp_path, "sft", folder).next()) == 1
    assert len(source(tmp_path, "sft", folder, "--columns", "q=query", "a=response").next()) == 1


def test_a_damaged_folder_streams_and_what_is_there_already(tmp_path: Path) -> None:
    file, folder = written(tmp_path, "sft", "--val_dataset", str(tmp_path / "sft.jsonl"))
    assert "is not streamed" in refused(tmp_path, "sft", folder, "--streaming", "--max_steps", "1")
    words = [file, "--model", "m", "--output_dir"]
    with pytest.raises(DataError, match="already exists(.|\n)*already exists(.|\n)*--overwrite true"):
        cache([*words, str(tmp_path / "cached"), "--val_dataset", file], reader)
    (tmp_path / "mine" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="holds something else"):
        cache([*words, str(tmp_path / "mine"), "--overwrite", "true"], reader)
    (Path(folder) / "0" / "tokens.bin").unlink()
    assert "is damaged" in refused(tmp_path, "sft", folder)


def renamed_store(folder: Path, name: str) -> None:
    text = (folder / "cached_dataset.json").read_text()
    (folder / "cached_dataset.json").write_text(text.replace('"store": "0"', f'"store": {json.dumps(name)}'))


def with_row(folder: Path, row: int, place: int) -> None:
    offsets = np.load(folder / "0" / "rows.npy")
    offsets[row] = place
    np.save(folder / "0" / "rows.npy", offsets)


def special(path: Path, target: str) -> None:
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)


HARM: list[tuple[str, Callable[[Path], object]]] = [
    ("a store is no folder in it", lambda folder: renamed_store(folder, "../../cache")),
    ("a store is no folder in it", lambda folder: renamed_store(folder, "/etc")),
    ("rows.npy is not a file", lambda folder: special(folder / "0" / "rows.npy", "pipe")),
    ("tokens.bin is a link to /etc/passwd", lambda folder: special(folder / "0" / "tokens.bin", "/etc/passwd")),
    ("row 1 ends before it begins", lambda folder: with_row(folder, 2, -5)),
    ("ends before it begins", lambda folder: with_row(folder, 2, 10**9)),
    ("rows do not end with its", lambda folder: with_row(folder, -1, 10**9)),
    ("rows do not end with its", lambda folder: with_row(folder, 0, 1)),
    ("different numbers of rows", lambda folder: np.save(folder / "0" / "labels.npy", np.zeros(1, np.int64))),
    ("do not belong together", lambda folder: np.save(folder / "0" / "rows.npy", np.zeros((2, 2), np.int64))),
    ("is damaged", lambda folder: (folder / "0" / "rows.npy").write_bytes(b"\x93NUMPY")),
    ("is damaged", lambda folder: (folder / "cached_dataset.json").write_text("[" * 100_000)),
    ("is damaged", lambda folder: (folder / "cached_dataset.json").write_text('{"datasets": 7}')),
]


@pytest.mark.parametrize(("said", "harm"), HARM, ids=[str(i) for i in range(len(HARM))])
def test_a_strangers_folder_is_read_within_its_bounds(
    tmp_path: Path, said: str, harm: Callable[[Path], object]
) -> None:
    """Every row lies in the tokens, and every file in the folder."""
    _, folder = written(tmp_path, "sft")
    harm(Path(folder))
    assert said in refused(tmp_path, "sft", folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output_dir", "x"], "--model: is missing(.|\n)*"),
        (["--model", "m"], "--output_dir: is missing"),
        (["--model", "m", "--output_dir", "x", "--streaming", "--max_steps", "1"], "holds all rows"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        cache([jsonl(tmp_path / "a.jsonl", CHATS), *words], reader)
    with pytest.raises(DataError, match="--dataset: is missing"):
        cache(words, reader)


def test_ms_swift_s_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export --to_cached_dataset true`, then `--cached_dataset` beside `--dataset`, and evaluation data."""
    file = jsonl(tmp_path / "d.jsonl", CHATS)
    tokenizer("qwen", "qwen2_5").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    options = [
        "--model",
        str(tmp_path / "model"),
        "--dataset",
        f"{file}#:9",
        "--val_dataset",
        file,
        "--max_length",
        "64",
    ]
    assert export(["--to_cached_dataset", "true", *options, "--output_dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert f"{tmp_path}/out/train: 9 rows" in said.out and "--cached_val_dataset" in said.out
    assert "--max_length: without effect on tokens; for the training run" in said.err
    given = ["--cached_dataset", str(tmp_path / "out/train"), "--cached_val_dataset", str(tmp_path / "out/val")]
    cfg = configured(tmp_path, "sft", *given, "--dataset", file, "--model", options[1])
    assert cfg.data.dataset == (file, given[1]) and cfg.data.val_dataset == (given[3],) and not data_problems(cfg)
    assert configured(tmp_path, "sft", *given).data.dataset == (given[1],)
    reads = tokenizer_or_processor_for(cfg.model, cfg.data, cfg.task)
    some, evaluation = build_train_and_eval_sources(cfg.data, cfg.train, reads, LoaderGeometry())
    assert some.rows == 32 and evaluation is not None and len(evaluation.data) == 23
    assert words_of_cached_dataset(["--to-cached-dataset=false", "--model", "m"]) is None
    assert words_of_cached_dataset(["--to-cached-dataset", "--model=m"]) == ["--model", "m"]


def test_a_certificate_needs_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data show` says of a cached data set that its masks are not checked, and checks the others."""
    monkeypatch.setenv("MEGASWIFT_CACHE", str(tmp_path / "cache"))
    tokenizer("qwen", "qwen3").save_pretrained(tmp_path / "m")
    rows = jsonl(tmp_path / "d.jsonl", [chat("a", "b")] * 3)
    model = ["--model", str(tmp_path / "m")]
    assert main(["data", "cache", rows, *model, "--output_dir", str(tmp_path / "kept")]) == 0
    assert main(["data", "show", str(tmp_path / "kept" / "train"), rows, *model, "--samples", "0"]) == 0
    out = capsys.readouterr().out
    assert "loss mask certified: 3 rows" in out and f"{tmp_path}/kept/train is a cached data set" in out


NODE = """
import sys
from tests.data.store.test_cached import cache, reader
sys.exit(cache(sys.argv[1:], reader))
"""


def shared(tmp_path: Path) -> list[str]:
    file = jsonl(tmp_path / "rows.jsonl", CHATS)
    return [file, "--model", "m", "--output_dir", str(tmp_path / "out"), "--dataset_cache_dir", str(tmp_path / "cache")]


@pytest.mark.slow
def test_two_nodes_at_once(tmp_path: Path) -> None:
    """One writes, the other waits and takes it."""
    command = [sys.executable, "-c", NODE, *shared(tmp_path)]
    nodes = [
        subprocess.Popen(command, env={**os.environ, "NODE_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    said = sorted("written by another node" in node.communicate(timeout=300)[0] for node in nodes)
    assert said == [False, True] and [node.returncode for node in nodes] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "train"]
    assert source(tmp_path, "sft", str(tmp_path / "out" / "train")).stats["rows"] == len(CHATS)


def test_nodes_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The second node takes what the first wrote; in a later run the first writes again, and is told to say so."""
    words = shared(tmp_path)
    for rank, more, said in (
        ("0", [], "tokens for sft"),
        ("1", [], "written by another node"),
        ("0", ["--overwrite", "true"], "tokens for sft"),
        ("1", ["--overwrite", "true"], "written by another node"),
    ):
        monkeypatch.setenv("NODE_RANK", rank)
        assert cache([*words, *more], reader) == 0
        assert said in capsys.readouterr().out
    assert source(tmp_path, "sft", str(tmp_path / "out" / "train")).stats["rows"] == len(CHATS)
    with pytest.raises(DataError, match="already exists"):
        cache(words, reader)
    monkeypatch.setenv("NODE_RANK", "2")
    with pytest.raises(DataError, match="another value of --system"):
        cache([*words, "--system", "Be kind."], reader)
    other = jsonl(tmp_path / "other.jsonl", CHATS)
    with pytest.raises(DataError, match="another value of --dataset"):
        cache([other, *words[1:]], reader)


def test_a_writer_that_dies_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its folder is complete; the next one removes what it left."""
    _, folder = written(tmp_path, "sft")
    files = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("megaswift.data.store.cached.fsync_tree", die)
        written(tmp_path, "sft", "--system", "Be kind.")
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == files
    assert len(list(Path(folder).parent.glob("*.writing-*"))) == 1
    written(tmp_path, "sft", "--system", "Be kind.")
    assert sorted(path.name for path in Path(folder).parent.iterdir()) == [".lock", "train"]

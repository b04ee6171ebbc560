"""`megaswift data index` and `data show` of what it wrote: mistakes, replacement, several data sets in order.

Covers: megaswift/data/show/words.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.data.indexed.files import open_indexed_tokens
from megaswift.data.indexed.write import main as index
from megaswift.data.show.samples import main as show
from megaswift.errors import ConfigError, DataError
from tests.data.makers import tokenizer


def reader(*_: object) -> object:
    return tokenizer("qwen")


def words(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"hello {i}"}) + "\n" for i in range(3)))
    (tmp_path / "b.txt").write_text("two lines\nof text\n")
    return ["--model", "m", "--dataset_cache_dir", str(tmp_path / "cache"), *more]


def test_documents_end_with_the_end_of_text_in_the_order_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "out")
    data = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    given = words(tmp_path, "--columns", "body=text", "--output", prefix)
    assert index([*data, *given], reader) == 0
    tok, tokens = tokenizer("qwen"), open_indexed_tokens(prefix)
    found = [tokens.read(i, 0, int(n)).tolist() for i, n in enumerate(tokens.lengths)]
    texts = ["hello 0", "hello 1", "hello 2", "two lines", "of text"]
    assert found == [[*tok(t, add_special_tokens=False)["input_ids"], tok.eos_token_id] for t in texts]
    with pytest.raises(DataError, match=r"out.bin and out.idx already exist"):
        index([*data, *given], reader)
    assert index([*data[1:], *words(tmp_path, "--output", prefix, "--overwrite", "true")], reader) == 0
    assert len(open_indexed_tokens(prefix).lengths) == 2
    capsys.readouterr()
    assert show([prefix, "--task", "pt", "--model", "m", "--samples", "1", "--first", "1"], reader) == 0
    shown = capsys.readouterr().out
    assert "2 documents, 2 sequences" in shown and "--- sequence 1:" in shown and "sequence 0" not in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "--output: is missing"),
        (("--output", "no/such/out"), "its folder does not exist"),
        (("--output", "x", "--learning_rate", "1e-3"), "--learning_rate: would be ignored by data index"),
        (("--output", "x", "--max_length", "9"), "--max_length: would be ignored by data index"),
        (("--outptu", "x"), "did you mean output"),
    ],
)
def test_mistakes(more: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((DataError, ConfigError), match=said):
        index([str(tmp_path / "b.txt"), *words(tmp_path, *more)], reader)
    assert not list(tmp_path.glob("*.bin"))


def test_a_cut_off_run_leaves_no_index_beside_other_tokens(tmp_path: Path) -> None:
    """The index goes first and comes last."""
    from megaswift.data.indexed import files

    prefix = str(tmp_path / "out")
    assert index([str(tmp_path / "b.txt"), *words(tmp_path, "--output", prefix)], reader) == 0

    def cut() -> object:
        raise OSError("disk full")
        yield

    with pytest.raises(OSError):
        files.write_indexed_tokens(
            prefix,
            files.np.array([1]),
            cut(),
            files.smallest_token_type(9),  # type: ignore[arg-type]
        )
    with pytest.raises(DataError, match=r"out.idx: cannot be read"):
        open_indexed_tokens(prefix)

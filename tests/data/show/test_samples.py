"""`megaswift data show`: the mask in brackets and in color, histograms, the model's tokenizer, errors."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data import tokenization
from megaswift.data.build import load_document_splits
from megaswift.data.model_tokenizer import tokenizer_or_processor_for
from megaswift.data.show import report, samples
from megaswift.data.token_bytes import bytes_of_stored_token
from megaswift.errors import DataError, UserError
from tests.data.makers import chat, config, jsonl, template, tokenizer


def test_masks_in_brackets_and_in_colour() -> None:
    texts, mask = ["user", "⏎", "Par", "is", "<|im_end|>", "⏎"], [0, 0, 1, 1, 1, 0]
    tokens = [report.TokenText(text, weight) for text, weight in zip(texts, mask, strict=True)]
    assert report.loss_highlighted_text(tokens, color=False) == "user|⏎\n [Par|is|<|im_end|>] ⏎\n"
    assert f"{report.GREEN}Par|is|<|im_end|>{report.OFF}" in report.loss_highlighted_text(tokens, color=True)


@pytest.mark.parametrize("kind", ["qwen", "llama", "mistral"])
def test_a_character_that_is_split_over_tokens_is_shown_once(kind: str) -> None:
    """Byte-level BPE (with tokens that hold a space and a part of a character) and bytes of SentencePiece. The texts
    are those of the row, in order, and the numbers are those of all tokens."""
    tok = tokenizer(kind)
    text = "a 你好 née 🙂\nParis"
    ids = tok(text, add_special_tokens=False)["input_ids"]
    tokens = report.token_texts(tok, ids, [1.0] * len(ids))
    assert "".join(token.text for token in tokens).replace("⏎", "\n").replace(" ", "") == text.replace(" ", "")
    assert sum(token.tokens for token in tokens) == len(ids)
    split = {token.text.strip(): token.tokens for token in tokens if token.tokens > 1}
    assert {"你": 3, "好": 3}.items() <= split.items() and "你(3)" in report.loss_highlighted_text(tokens, color=False)


def test_tokens_with_parts_of_two_characters_are_shown_together() -> None:
    """SmolLM2 has such tokens: the end of one character and the beginning of the next."""
    stored = ["Ġä", "½łå", "¥", "½", "!"]  # " 你好!"

    class Tokenizer:
        def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
            return bytes_of_stored_token(stored[ids[0]]).decode(errors="replace")  # type: ignore[union-attr]

        def convert_ids_to_tokens(self, number: int) -> str:
            return stored[number]

    shown = report.token_texts(Tokenizer(), range(5), [1.0] * 5)
    assert shown == [report.TokenText(" 你好", 1.0, 4), report.TokenText("!", 1.0)]


def test_a_character_whose_tokens_differ_in_loss_or_that_is_cut_is_shown_as_bytes() -> None:
    tok = tokenizer("qwen")
    ids = tok("你x", add_special_tokens=False)["input_ids"]
    assert [t.text for t in report.token_texts(tok, ids, [0, 1, 1, 1])] == ["\\xe4", "\\xbd", "\\xa0", "x"]
    assert [t.text for t in report.token_texts(tok, ids[:2], [1, 1])] == ["\\xe4", "\\xbd"]
    broken = [ids[0], ids[3], ids[1]]
    assert [t.text for t in report.token_texts(tok, broken, [1, 1, 1])] == ["\\xe4", "x", "\\xbd"]
    real = tok("\ufffd", add_special_tokens=False)["input_ids"]
    assert report.token_texts(tok, real, [1] * len(real)) == [report.TokenText("\ufffd", 1, len(real))]


def test_long_runs_of_one_token_without_loss_are_one_text() -> None:
    image = report.TokenText("<image>", 0)
    trained = report.TokenText("x", 1)
    assert report.fold_repeats([image] * 3 + [trained] * 5) == [image] * 3 + [trained] * 5
    assert report.fold_repeats([trained, *[image] * 64]) == [trained, report.TokenText("<image> x 64", 0)]


def test_colour_only_on_a_terminal_and_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert report.use_color(Terminal()) and not report.use_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not report.use_color(Terminal())


def test_histogram_counts_everything_once() -> None:
    values = np.array([1, 1, 2, 30, 60])
    lines = report.block_lines(report.histogram_of(values, "lengths"), color=False)
    assert lines[0] == "lengths: 5 in total, 1 to 60, mean 18.8, median 2"
    assert [int(line.split()[-1]) for line in lines[1:]] == [3, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def folder(path: Path, template: str = "qwen2_5") -> str:
    tokenizer("qwen", template).save_pretrained(path)
    return str(path)


def rows(path: Path, count: int = 8) -> str:
    return jsonl(path, [chat(f"hello {i}", "Paris 🙂") for i in range(count)])


def shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> str:
    assert samples.main([*words, "--dataset_cache_dir", str(tmp_path / "cache")], tokenizer_or_processor_for) == 0
    return capsys.readouterr().out


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        samples.main(words, tokenizer_or_processor_for)
    return str(error.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(
        capsys,
        tmp_path,
        rows(tmp_path / "d.jsonl"),
        "--model",
        folder(tmp_path / "model"),
        "--samples",
        "2",
        "--first=1",
        "--max_length",
        "128",
    )
    assert "--- sample 1 (row 1)" in out and "--- sample 2" in out and "sample 3 " not in out and "sample 0 " not in out
    assert out.startswith("Tokens are separated by |; those that carry loss are [in brackets].\n---")
    assert out.split("[", 2)[2].partition("]")[0].replace("|", "").startswith("Paris")
    assert "|<|im_end|>] " in out
    assert (
        "8 rows," in out
        and "packed into" in out
        and "samples per packed" not in out
        and "\033" not in out
        and "evaluation:" not in out
    )


def test_an_output_directory_as_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    folder(run / "hf")
    (run / "hf" / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text("{}\n")
    assert "--- sample 0" in shown(capsys, tmp_path, rows(tmp_path / "d.jsonl"), "--model", str(run))


def test_a_hub_id_as_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache on disk, laid out as the client lays it out; and refused as training refuses it when it is
    not there."""
    commit = "0" * 40
    kept = tmp_path / "hub" / "models--some--model"
    folder(kept / "snapshots" / commit)
    (kept / "snapshots" / commit / "config.json").write_text('{"model_type": "qwen3"}')
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = rows(tmp_path / "d.jsonl")
    assert "--- sample 0" in shown(capsys, tmp_path, data, "--model", "some/model")
    assert "Hugging Face could not provide it" in refused(data, "--model", "some/other")


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_a_configuration_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """It holds a whole run; what it says of training is left aside, options and data sets after it count."""
    run = {
        "task": "sft",
        "model": folder(tmp_path / "m"),
        "dataset": [rows(tmp_path / "d.jsonl")],
        "learning_rate": 1e-5,
        "parallel": {"tp": 2},
        "max_length": 128,
    }
    (tmp_path / name).write_text(json.dumps(run))
    out = shown(capsys, tmp_path, str(tmp_path / name), "--split_dataset_ratio", "0.25", "--seed", "1")
    assert "packed into" in out and "sequences of 128:" in out and "6 in total" in out and "evaluation: 2 rows," in out
    assert "rows of 128:" not in shown(capsys, tmp_path, str(tmp_path / name), "--packing", "false")
    assert "3 rows," in shown(capsys, tmp_path, str(tmp_path / name), rows(tmp_path / "other.jsonl", 3))


def test_data_in_a_json_file_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "m")
    for value in ([chat("a", "b")], {"data": [chat("a", "b")]}, {"query": "a", "response": "b", "system": "c"}):
        (tmp_path / "d.json").write_text(json.dumps(value))
        assert "1 rows," in shown(capsys, tmp_path, str(tmp_path / "d.json"), "--model", model)
    (tmp_path / "d.json").write_text("{broken")
    assert "not JSON" in refused(str(tmp_path / "d.json"), "--model", model, "--dataset_cache_dir", str(tmp_path / "c"))


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    text = refused(
        rows(tmp_path / "d.jsonl"), "--model", "m", "--lr", "1e-5", "--tp", "2", "--shuffle", "true", "--data_seed", "3"
    )
    for part in (
        "--lr 1e-5: would be ignored",
        "--tp 2",
        "--shuffle true",
        "in file order",
        "--data_seed 3: would be ignored",
    ):
        assert part in text
    assert "--streaming true" in refused(str(tmp_path / "d.jsonl"), "--model", "m", "--streaming", "--max_steps", "3")


def test_help_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert samples.main(["--help"], tokenizer_or_processor_for) == 0
    assert "data show DATASET" in capsys.readouterr().out
    data, model = rows(tmp_path / "d.jsonl"), folder(tmp_path / "m")
    assert "--model DIR" in refused(data)
    assert "no such folder" in refused(data, "--model", str(tmp_path / "nowhere"))
    assert "integer" in refused(data, "--model", model, "--samples", "x")
    assert "--samples -1: must be an integer, 0 or more" in refused(data, "--model", model, "--samples", "-1")
    assert "did you mean samples?" in refused(data, "--model", model, "--smaples", "2")
    assert "there are 8 samples" in refused(
        data, "--model", model, "--first", "8", "--dataset_cache_dir", str(tmp_path / "c")
    )
    Path(model, "tokenizer.json").write_text("{")
    assert "cannot be read" in refused(data, "--model", model)
    Path(model, "tokenizer.json").unlink()
    Path(model, "tokenizer_config.json").unlink()
    Path(model, "config.json").write_text('{"model_type": "qwen3"}')
    assert "has no tokenizer" in refused(data, "--model", model)


def test_missing_files_name_a_neighbour_before_the_tokenizer_is_read(tmp_path: Path) -> None:
    rows(tmp_path / "train.jsonl")
    (tmp_path / "qwen3").mkdir()
    assert "did you mean train.jsonl?" in refused(str(tmp_path / "trian.jsonl"), "--model", str(tmp_path))
    assert f"look in {tmp_path}\n" in refused(str(tmp_path / "far" / "off.jsonl"), "--model", str(tmp_path)) + "\n"
    assert "did you mean qwen3?" in refused(str(tmp_path / "train.jsonl"), "--model", str(tmp_path / "qwen-3"))


def test_pairs_and_labeled_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {**chat("hello", "Paris"), "rejected_response": "you", "margin": 2}
    paired = (
        "--- pair 1 (row 1), margin 2",
        "chosen: ",
        "is|<|im_end|>]",
        "rejected: ",
        "you|<|im_end|>]",
        "3 pairs, 6 documents",
    )
    labeled = ("--- example 1 (row 1)", "undesirable: ", "is|<|im_end|>]", "3 examples, 0 of them desirable")
    for task, row, parts in (("dpo", pair, paired), ("kto", {**chat("hello", "Paris"), "label": False}, labeled)):
        cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [row] * 3))
        blocks = samples.preference_report(cfg.data, cfg.train, task, tokenizer("qwen", "qwen2_5"), range(1, 2))
        text = "\n".join(line for block in blocks for line in report.block_lines(block, color=False))
        for part in parts:
            assert part in text
        with pytest.raises(DataError, match="there are 3 (pairs|examples), numbered from 0"):
            samples.preference_report(cfg.data, cfg.train, task, tokenizer("qwen", "qwen2_5"), range(3, 4))


def test_the_certificate_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound data give exit code 0; a template that trains on its prompt 1; the page escapes what rows say."""
    data = jsonl(tmp_path / "d.jsonl", [chat("<script>alert(1)</script>", f"Paris & {i}") for i in range(300)])
    page = tmp_path / "report.html"
    words = [data, "--model", folder(tmp_path / "m"), "--max_length", "102", "--truncation_strategy", "right"]
    out = shown(capsys, tmp_path, *words, "--html", str(page))
    assert "loss mask certified: 300 rows, 300 answers: no token of a prompt carries loss" in out
    assert "tokens beyond --max_length of longer rows: 300 in total" in out
    text = page.read_text()
    assert "loss mask certified: 300 rows" in text and "tokens per sample" in text and '<span class="loss">' in text
    assert out.count("--- sample") == 3 and text.count("<section>") == 200
    markup, script = text.split("<script>")  # the only one, which the policy names by its hash
    digest = base64.b64encode(hashlib.sha256(script.partition("</script>")[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in markup
    assert re.findall(r"(?:src|href)=", text) == []
    words = [*words, "--dataset_cache_dir", str(tmp_path / "cache"), "--samples", "0"]
    faulty = template("qwen2_5_training")
    (tmp_path / "t.jinja").write_text(faulty)
    trained = [*words, "--chat_template", str(tmp_path / "t.jinja")]
    assert samples.main(trained, tokenizer_or_processor_for) == 1
    printed = capsys.readouterr()
    assert "NOT certified (300 rows)" in printed.out and f"{data}:1: token" in printed.out
    assert "in 64 of the first 64 rows tokens outside of the assistant's turns carry loss" in printed.err
    assert samples.main([*trained, "--certify", "none"], tokenizer_or_processor_for) == 0
    assert samples.main([*trained, "--certify=10"], tokenizer_or_processor_for) == 1
    assert "NOT certified (10 rows)" in capsys.readouterr().out
    assert "cannot be written" in refused(*words, "--html", str(tmp_path / "no" / "x.html"))


def test_training_warns_of_a_faulty_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each time that the data are read, also from the cache."""
    tok = tokenizer("qwen", "glm4moe")
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [chat("a", "b")] * 3))
    for _ in range(2):
        load_document_splits(cfg.data, cfg.train, tok)
        said = capsys.readouterr().err
        assert "in 3 of the first 3 rows the template writes no special token after an answer" in said
        assert f"{tmp_path}/d.jsonl:1: messages[1]" in said
    load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen3"))
    assert "first 3 rows" not in capsys.readouterr().err


@pytest.mark.process
def test_training_warns_while_workers_tokenize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs beside the workers; malformed rows come before its own error."""
    monkeypatch.setattr(tokenization, "WORKER_BYTES", 1)
    tok = tokenizer("qwen", "glm4moe")
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [chat("a" * 1000, "b")] * 200), dataset_num_proc=2)
    load_document_splits(cfg.data, cfg.train, tok)
    said = capsys.readouterr().err
    assert "in 64 of the first 64 rows the template writes no special token after an answer" in said

    def broken(*how: Any) -> Any:
        raise ValueError("the check failed")

    monkeypatch.setattr(tokenization, "certify_first_rows", broken)
    for rows, error, text in (
        ([chat("c" * 1000, "d")] * 200, ValueError, "check failed"),
        ([{"c": "d" * 1000}] * 200, DataError, "d.jsonl:1"),
    ):
        cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows), dataset_num_proc=2)
        with pytest.raises(error, match=text):
            load_document_splits(cfg.data, cfg.train, tok)

"""CSV files in GB18030 are read, and files in other encodings are not mistaken for Chinese."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.data.build import load_document_splits
from megaswift.data.sources import csv_encoding
from megaswift.data.sources.csv_encoding import encoding_of, is_chinese
from megaswift.data.sources.readers import READERS
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError
from tests.data.makers import config, tokenizer

CHINESE = (
    "问题,回答\n你好,你好！有什么可以帮你？\n"
    "什么是机器学习,机器学习是人工智能的一个分支，它让计算机从数据中学习规律。\n"
)
OTHERS = [
    ("question,réponse\nOù est la tour Eiffel ?,Elle est à Paris, près de la Seine, en été\n", "cp1252"),
    ("Frage,Antwort\nWas heißt größer?,Größer heißt größer als das Übliche\n", "cp1252"),
    ("вопрос,ответ\nкакая столица России,Столица России это Москва\n", "cp1251"),
    ("вопрос,ответ\nкакая столица России,Столица России это Москва\n", "koi8-r"),
    ("질문,답변\n한국의 수도는 어디입니까,대한민국의 수도는 서울입니다. 서울은 한강을 끼고 있는 도시이다.\n", "cp949"),
    ("質問,回答\nこんにちは,こんにちは。何かお手伝いできますか？\n日本の首都はどこですか,東京です。\n", "euc_jp"),
    ("質問,回答\nこんにちは,こんにちは。何かお手伝いできますか？\n日本の首都はどこですか,東京です。\n", "shift_jis"),
    ("問題,回答\n你好,有什麼可以幫你\n", "big5"),
    ("ερώτηση,απάντηση\nποια είναι η πρωτεύουσα,η Αθήνα\n", "cp1253"),
    (CHINESE, "utf-16"),
]


@pytest.mark.parametrize(
    "text", [CHINESE, "药品,剂量\n阿莫西林胶囊,每次零点五克\n头孢克肟颗粒,每日两次\n", "a,b\n🙂,北京是中国的首都\n"]
)
def test_chinese_is_known(text: str) -> None:
    assert is_chinese(text.encode("gb18030"))


@pytest.mark.parametrize(("text", "encoding"), OTHERS, ids=[encoding for _, encoding in OTHERS])
def test_other_encodings_are_not_chinese(text: str, encoding: str) -> None:
    assert not is_chinese(text.encode(encoding))


def test_utf_8_with_a_broken_byte_stays_utf_8(tmp_path: Path) -> None:
    """The row with the byte is an error; its neighbours are read."""
    file = tmp_path / "d.csv"
    file.write_bytes(CHINESE.encode() + b"\xb0\xa1,x\n" + "好,好\n".encode())
    assert encoding_of(file) == csv_encoding.UTF_8
    rows = [located.row for located in READERS["csv"](file, 0, 99, 1)]
    assert isinstance(rows[2], RowError) and "not UTF-8" in str(rows[2]) and rows[3] == {"问题": "好", "回答": "好"}


@pytest.mark.parametrize("before", ["", *("a,b\n" * 40 + "x" * n + "\n" for n in range(15))])
def test_the_first_chinese_line_may_be_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Blocks end within characters and lines; the last line is cut where the file is."""
    monkeypatch.setattr(csv_encoding, "BLOCK", 16)
    monkeypatch.setattr(csv_encoding, "LOOKED_AT", 64)
    file = tmp_path / "d.csv"
    file.write_bytes((before + "你好,你好有什么可以帮你\n" * 20).encode("gb18030"))
    assert encoding_of(file) == csv_encoding.GB18030
    file.write_bytes((before + "你好,你好有什么可以帮你\n" * 20).encode())
    assert encoding_of(file) == csv_encoding.UTF_8
    file.write_bytes("你好".encode()[:-1])
    assert encoding_of(file) == csv_encoding.UTF_8


def test_excel_s_csv_of_china_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are those of the same file in UTF-8; a line names the encoding; a byte of neither is an error."""
    file = tmp_path / "d.csv"
    read = {}
    tok = tokenizer("qwen", "qwen2_5")
    for name in ("utf-8-sig", "gb18030"):
        file.write_bytes(CHINESE.encode(name))
        cfg = config(tmp_path, str(file), columns={"问题": "query", "回答": "response"})
        docs, _ = load_document_splits(cfg.data, cfg.train, tok)
        read[name] = [docs.read(i)[0].tolist() for i in range(len(docs))]
        assert ("is read as GB18030" in capsys.readouterr().err) == (name == "gb18030")
    assert read["gb18030"] == read["utf-8-sig"] and len(read["gb18030"]) == 2
    file.write_bytes(CHINESE.encode("gb18030") + b"\xff\xff,x\n")
    with pytest.raises(DataError, match=r"is not UTF-8 .perhaps UTF-16.|not GB18030"):
        load_document_splits(cfg.data, cfg.train, tok)

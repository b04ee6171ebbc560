"""The encoding of a CSV file: UTF-8, or GB18030, in which Excel saves CSV files in China.

GB18030 gives almost any bytes a meaning, so a file is read so only where the result is Chinese beyond doubt; a wrong
guess would train on garbage.
"""

from __future__ import annotations

import codecs
from functools import cache
from pathlib import Path

UTF_8 = "utf-8-sig"
GB18030 = "gb18030"
BLOCK = 1 << 20
LOOKED_AT = 1 << 16
"""Bytes before and behind the first block that is not UTF-8 by which the encoding is judged too."""
COMMON = frozenset(
    "的一是不了在有人我他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可里后小么心多天而能好都然没日于起还发成事只作当想看文"
    "无开手十用主行方又如前所本见经头面公同三已老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部正名定女问力机给等几"
    "很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市眼体别处总才场师书比住员九笑性通目华报立"
    "马命张活难神数件安表原车白应路期叫死常提感金何更反合放做系计或司利受光王果亲界及今京务制解各任至清物台象记边共风战干接它许八特觉望直服毛林题建南度统"
    "色字请爱让认算论百吃义科怎元社术结六功指思非流每青管夫连远资队跟带花快条院变联言权往展该领传近留红治决周保达办运武半候七必城父强步完革深区即求品士转"
    "量空甚众技轻程告江语英基派满式李息写呢识极令黄德收脸钱党倒未持取设始版双历越史商千片容研像找友孩站广改议形委早房音火际则首单据导影失拿网香似斯专石若"
)
"""The most frequent characters of Chinese. Of ordinary texts they are 70 to 90%, of a list of drugs half."""
LEAST_COMMON = 0.35
"""Share of COMMON among the Chinese characters of a text. Korean and Japanese bytes read as Chinese have 0.1."""
LEAST_SIMPLE = 0.95
"""Share of characters of GB2312 among those that are not ASCII. Western European bytes read as Chinese have few."""


@cache
def _encoding(path: Path, size: int, modified: int) -> str:
    """The encoding; size and time of modification stand for the content."""
    sample = _around_first_invalid(path)
    return GB18030 if sample and is_chinese(sample) else UTF_8


def encoding_of(path: Path) -> str:
    """Return the encoding of a CSV file as it is now: GB18030 where it is not UTF-8 and surely Chinese, else UTF-8."""
    stat = path.stat()
    return _encoding(path, stat.st_size, stat.st_mtime_ns)


def is_chinese(raw: bytes) -> bool:
    """Return whether whole lines of bytes are Chinese text in GB18030."""
    try:
        text = raw.decode(GB18030)
    except UnicodeDecodeError:
        return False
    other = [c for c in text if not c.isascii() and c <= "\uffff"]  # without emoji
    han = [c for c in other if "一" <= c <= "鿿"]
    simple = sum(_in_gb2312(c) for c in other)
    return bool(han) and simple >= LEAST_SIMPLE * len(other) and sum(map(_is_common, han)) >= LEAST_COMMON * len(han)


def _is_common(character: str) -> bool:
    return character in COMMON


def _in_gb2312(character: str) -> bool:
    try:
        character.encode("gb2312")
    except UnicodeEncodeError:
        return False
    return True


def _around_first_invalid(path: Path) -> bytes:
    """The text around the first byte that is not UTF-8, up to the end of a line; empty where all are UTF-8.

    It begins a little earlier, because the first byte of a character may end the block before. What is before that is
    UTF-8, ASCII as a rule, so no character is cut there.
    """
    position = _first_invalid_block(path)
    if position is None:
        return b""
    with path.open("rb") as file:
        file.seek(max(0, position - LOOKED_AT))
        sample = file.read(BLOCK + 2 * LOOKED_AT)
        ends = not file.read(1)
    return sample if ends else sample[: sample.rfind(b"\n") + 1]


def _first_invalid_block(path: Path) -> int | None:
    """Return where the first block of BLOCK bytes begins that is not UTF-8; None where the whole file is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                return position
            if not block:
                return None
            position += len(block)

"""The bytes that a token stands for, where the vocabulary stores bytes: byte-level BPE and SentencePiece's <0x0A>."""

from __future__ import annotations

import re

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece's vocabularies write a byte."""


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the others follow from 256
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = byte_alphabet()


def bytes_of_stored_token(stored: str | bytes) -> bytes | None:
    """Return the bytes of a token as the vocabulary stores it; None where it stores no bytes."""
    if isinstance(stored, bytes):  # tokenizers that come with a model, over tiktoken
        return stored
    fallback = _FALLBACK_BYTE.fullmatch(stored)
    if fallback is not None:
        return bytes.fromhex(fallback[1])
    if all(character in _BYTES for character in stored):
        return bytes(_BYTES[character] for character in stored)
    return None

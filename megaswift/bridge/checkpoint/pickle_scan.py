"""The scan of a pickle's opcodes before it is unpickled, so that reading takes no memory or time out of
proportion to its size.

Owns that for the two kinds of pickle in a sharded checkpoint: its tables, and the description of a tensor. Which
classes may be named is the Unpickler's business.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Container, Iterable

BROKEN = (
    struct.error,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
)
"""What `check_pickle_opcode_limits`, and unpickling a damaged file, may raise besides UnpicklingError."""
_ARGUMENTS: dict[int, int] = {
    ord(name): length
    for names, length in (
        ("(012N)]}tlaeubsRQ\x81\x85\x86\x87\x88\x89\x93\x94\x8f\x90\x91", 0),
        ("Kqh\x80", 1),
        ("M", 2),
        ("Jj", 4),
        ("G", 8),
    )
    for name in names
}
"""Opcode -> bytes of its argument."""
_COUNTED = {ord("\x8c"): "<B", ord("U"): "<B", ord("C"): "<B", ord("\x8a"): "<B", ord("X"): "<I", ord("B"): "<I"}
"""Opcode -> how the length of its argument is written."""
_TEXTS = frozenset(map(ord, "\x8cUX"))
"""The opcodes among them that make a text."""
_LONG_PUT = ord("r")
_GLOBAL = ord("c")
_FRAME = 0x95
_STOP = ord(".")
LONGEST_NAME = 100
"""Bytes of a text that may be part of a class's name."""
_PLAIN = "plain"
_CONTAINER = ""


def check_pickle_opcode_limits(data: bytes, keys: Container[str] = ()) -> None:
    """Checks that unpickling takes no more time and memory than the size of the file explains.

    Values are followed by their kind alone. A tuple that holds the same tuple twice, which holds the same twice, and so
    on, is short in a file, and its hash takes a step for each path through it; so no container is hashed: the key of a
    dictionary and the element of a set is a text, a number, None, or an object of a class in `keys`.

    Args:
        data: The pickle.
        keys: Classes, as `module name`, whose objects are hashed in constant time.

    Raises:
        ValueError: An opcode that neither kind of pickle needs, an argument that is longer than the rest of the file,
            a container as a key, or a class that is changed.
    """
    values = _Kinds(keys)
    position = 0
    end = len(data)
    count = 0
    while position < end:
        # Read one opcode. `start` is where its argument begins.
        code = data[position]
        position += 1
        count += 1
        start = position
        if code == _STOP:
            return
        # Step over the argument, by how its length is given.
        if code in _ARGUMENTS:
            position += _ARGUMENTS[code]
        elif code in _COUNTED:
            size = struct.calcsize(_COUNTED[code])
            start += size
            position = start + struct.unpack_from(_COUNTED[code], data, position)[0]
        elif code == _LONG_PUT:
            if struct.unpack_from("<I", data, position)[0] > count:
                raise ValueError("a memo index that is out of range")
            position += 4
        elif code == _FRAME:
            position += 8
            if struct.unpack_from("<Q", data, position - 8)[0] > end - position:
                raise ValueError("it is truncated")
            continue
        elif code == _GLOBAL:
            position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
        else:
            name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), hex(code))
            raise ValueError(f"opcode {name} at byte {position - 1} is not allowed in a checkpoint")
        if position > end:
            break
        # Follow what the opcode does to the stack.
        values.follow(code, data, start, position)
    raise ValueError("it is truncated")


class _Kinds:
    """The stack of an unpickler, with the kind of each value in place of the value: `'TEXT` for a text, `plain` for
    what else is hashed in constant time, `module name` for a class or function, `module name()` for what it makes, and
    an empty text for any other."""

    def __init__(self, keys: Container[str]) -> None:
        self.keys = keys
        self.stack: list[str] = []
        self.marks: list[int] = []
        self.memo: dict[int, str] = {}

    def follow(self, code: int, data: bytes, start: int, end: int) -> None:
        """One opcode, whose argument is data[start:end]."""
        stack = self.stack
        # Texts, the memo and plain values.
        if code in _TEXTS:
            text = data[start:end].decode("utf-8", "replace") if end - start <= LONGEST_NAME else ""
            stack.append(f"'{text}")
        elif code in b"q\x94r":
            self.memo[len(self.memo) if code == 0x94 else int.from_bytes(data[start:end], "little")] = stack[-1]
        elif code in b"hj":
            stack.append(self.memo[int.from_bytes(data[start:end], "little")])
        elif code in b"KMJGCBN\x88\x89\x8a":
            stack.append(_PLAIN)
        # Marks, and containers built from what lies above a mark.
        elif code == ord("("):
            self.marks.append(len(stack))
        elif code in b")]}\x8f":
            stack.append(_CONTAINER)
        elif code in b"tl\x91":
            self._refuse_as_keys(self._above_mark() if code == 0x91 else ())
            self._drop_to_mark()
            stack.append(_CONTAINER)
        elif code in b"\x85\x86\x87":
            del stack[len(stack) - (code - 0x84) :]
            stack.append(_CONTAINER)
        elif code in b"eu\x90":
            above = self._above_mark()
            if code == ord("u"):
                self._refuse_as_keys(above[::2])
            elif code == 0x90:
                self._refuse_as_keys(above)
            self._drop_to_mark()
        # Single items, and moves of the stack itself.
        elif code == ord("s"):
            self._refuse_as_keys([stack[-2]])
            del stack[-2:]
        elif code in b"a0":
            stack.pop()
        elif code == ord("1"):
            self._drop_to_mark()
        elif code == ord("2"):
            stack.append(stack[-1])
        elif code == ord("Q"):
            stack[-1] = _CONTAINER
        else:
            # Everything else names or calls a class.
            self._call(code, data[start:end])

    def _call(self, code: int, argument: bytes) -> None:
        """Opcodes that name classes and make objects."""
        stack = self.stack
        if code == _GLOBAL:
            module, name, _ = argument.decode("utf-8", "replace").split("\n")
            stack.append(f"{module} {name}")
        elif code == 0x93:
            name = stack.pop()
            module = stack.pop()
            stack.append(f"{module[1:]} {name[1:]}")
        elif code in b"R\x81":
            stack.pop()
            stack[-1] = f"{stack[-1]}()" if " " in stack[-1] else _CONTAINER
        elif code == ord("b"):
            stack.pop()
            if not stack[-1].endswith("()"):
                raise ValueError("a state for what is no object")

    def _above_mark(self) -> list[str]:
        return self.stack[self.marks[-1] :]

    def _drop_to_mark(self) -> None:
        del self.stack[self.marks.pop() :]

    def _refuse_as_keys(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            if kind != _PLAIN and kind[:1] != "'" and kind.removesuffix("()") not in self.keys:
                raise ValueError("a key that is neither a text nor a number")

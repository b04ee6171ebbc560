"""The scan of a pickle's opcodes before it is unpickled, so that reading takes no memory or time out of
proportion to its size.

Owns that for the two kinds of pickle in a sharded checkpoint: its tables, and the description of a tensor. Which
classes may be named is the Unpickler's business.
"""

from __future__ import annotations

import pickletools
import struct

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
_LONG_PUT, _GLOBAL, _FRAME, _STOP = ord("r"), ord("c"), 0x95, ord(".")


def check_pickle_opcode_limits(data: bytes) -> None:
    """ValueError for an opcode that neither kind needs, or whose argument is longer than the rest of the file."""
    position, end, count = 0, len(data), 0
    while position < end:
        code, position, count = data[position], position + 1, count + 1
        if code == _STOP:
            return
        if code in _ARGUMENTS:
            position += _ARGUMENTS[code]
        elif code in _COUNTED:
            size = struct.calcsize(_COUNTED[code])
            position += size + struct.unpack_from(_COUNTED[code], data, position)[0]
        elif code == _LONG_PUT:
            if struct.unpack_from("<I", data, position)[0] > count:
                raise ValueError("a memo index that is out of range")
            position += 4
        elif code == _FRAME:
            position += 8
            if struct.unpack_from("<Q", data, position - 8)[0] > end - position:
                raise ValueError("it is truncated")
        elif code == _GLOBAL:
            position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
        else:
            name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), hex(code))
            raise ValueError(f"opcode {name} at byte {position - 1} is not allowed in a checkpoint")
    raise ValueError("it is truncated")

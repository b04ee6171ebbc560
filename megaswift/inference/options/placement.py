"""`--max_memory` and `--device_map`: text and files to plain values, checked without torch or a model.

Whether the modules of a file exist, and the devices of this machine, is looked at where the model is known
(`inference.device_placement`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megaswift.base.byte_size import byte_size_or_none
from megaswift.errors import Problem, missing_path_hint

Device = int | str
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"
EXAMPLE = '{"model.embed_tokens": 0, "model.layers.0": "cpu", ...}'
_DEVICE = re.compile(r"(?:cuda:|gpu:)?(\d+)|cpu|mps|disk|cuda")


def parse_placement_device(text: Any) -> Device | None:
    """A device as accelerate names it: a GPU's number, cpu, mps, disk; None for anything else. `cuda:1` is 1, `cuda` is
    0."""
    match = (
        _DEVICE.fullmatch(str(text).strip().lower())
        if isinstance(text, int | str) and not isinstance(text, bool)
        else None
    )
    if match is None:
        return None
    if match[1] is not None:
        return int(match[1])
    return 0 if match[0] == "cuda" else match[0]


def parse_max_memory(text: str) -> dict[Device, int] | Problem:
    """`0:20GiB,cpu:64GiB` (or =, or a JSON object) to bytes by device; a Problem where it is none."""
    label = f"--max_memory {text}"
    example = "--max_memory 0:20GiB,cpu:64GiB"
    try:
        pairs = (
            json.loads(text).items()
            if text.strip().startswith("{")
            else [re.split(r"[:=](?=[^:=]*$)", p) for p in text.split(",")]
        )
    except (ValueError, RecursionError) as error:
        return Problem(label, f"is not JSON: {error}", example)
    limits: dict[Device, int] = {}
    for pair in pairs:
        if len(pair) != 2:
            return Problem(label, f"{pair[0]!r} is not DEVICE:SIZE", example)
        device = parse_placement_device(pair[0])
        size = byte_size_or_none(str(pair[1]))
        if device is None or device == DISK:
            return Problem(
                label, f"{pair[0]!r} is not a device with a memory limit", "give GPUs by number, or cpu: " + example
            )
        if size is None:
            return Problem(label, f"{pair[1]!r} is not a valid size", example)
        if device in limits:
            return Problem(label, f"contains {pair[0]} twice", example)
        limits[device] = size
    return limits


def parse_device_map(text: str) -> str | dict[str, Device] | Problem:
    """A way to place (`auto`), a map of the whole model to one device, or the map of a file or a JSON text; a Problem
    where it is none."""
    if text in AUTOMATIC:
        return text
    label = f"--device_map {text}"
    one = parse_placement_device(text)
    if one == DISK:
        return Problem(label, "has no compute device", "--device_map cpu --max_memory cpu:1GiB --offload_folder DIR")
    if one is not None:
        return {"": one}
    return _of_json(text, label) if text.strip().startswith("{") else _of_file(Path(text), label)


def _of_file(path: Path, label: str) -> dict[str, Device] | Problem:
    if path.suffix.lower() != ".json":
        return Problem(
            label,
            f"is neither one of {', '.join(AUTOMATIC)}, a device, a JSON object, nor a .json file",
            "--device_map auto",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Problem(label, f"no such file; {missing_path_hint(path)}", f"write a JSON object: {EXAMPLE}")
    except (OSError, ValueError) as error:
        return Problem(label, f"cannot be read: {error}", f"write a JSON object: {EXAMPLE}")
    return _of_json(text, label)


def _of_json(text: str, label: str) -> dict[str, Device] | Problem:
    """The map of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Problem(label, f"cannot be read: {error}", f"write a JSON object: {EXAMPLE}")
    if not isinstance(value, dict) or not value:
        return Problem(label, "does not contain a JSON object of modules", EXAMPLE)
    devices = {name: parse_placement_device(device) for name, device in value.items()}
    wrong = [name for name, device in devices.items() if device is None]
    if wrong:
        return Problem(label, f"{wrong[0]}: {value[wrong[0]]!r} is not a device", "use a GPU's number, cpu or disk")
    device_map = {name: device for name, device in devices.items() if device is not None}
    if set(device_map.values()) == {DISK}:
        return Problem(label, "has no compute device", "place at least one module on a GPU or on cpu")
    return device_map

"""Assigns modules to devices: computed on a model without weights, checked, and printed as a table before loading.

The decision is accelerate's; the sizes it decides by are those that the weights will have, quantized ones included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megaswift.base.byte_size import bytes_text
from megaswift.engine.torch.layer_classes import decoder_layer_class_names
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.inference.options.placement import DISK, Device

DeviceMap = dict[str, Device]
CPU_SHARE = 0.9
"""The share of the machine's free memory that is used when the user names no limit: loading needs some in addition to
the weights."""
SHOWN = 4
_NUMBERED = re.compile(r"(.+)\.(\d+)")


@dataclass(frozen=True)
class ModuleSizes:
    """What each weight will take. A weight that two modules share counts with the first."""

    model: nn.Module
    """On the device `meta`."""
    bits: int | None = None
    """Bits per weight of linear layers."""

    def special(self) -> dict[str, Any]:
        """Weights that are quantized, and accelerate's name for what they become. bitsandbytes leaves the head as it
        is."""
        if self.bits is None:
            return {}
        from accelerate.utils import CustomDtype

        kind = CustomDtype.INT4 if self.bits == 4 else torch.int8
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return {
            f"{name}.weight": kind
            for name, m in self.model.named_modules()
            if isinstance(m, nn.Linear) and m is not head
        }

    def weights(self) -> Iterator[tuple[str, int, float]]:
        """(name, elements, bytes) of every parameter and buffer that is saved or not."""
        quantized = self.special()
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            each = self.bits / 8 if self.bits and name in quantized else tensor.element_size()
            yield name, tensor.numel(), tensor.numel() * each


def quantized_checkpoint_bits(config: Any) -> int | None:
    """Bits of the linear layers of a checkpoint that is quantized already; None: as its dtype says."""
    stored = getattr(config, "quantization_config", None) or {}
    quantization = stored if isinstance(stored, dict) else stored.to_dict()
    bits = quantization.get("bits")
    if bits:
        return bits if bits in (4, 8) else None
    if quantization.get("load_in_4bit"):
        return 4
    return 8 if quantization.get("load_in_8bit") else None


def decide_device_map(sizes: ModuleSizes, how: str, limits: Mapping[Device, int] | None) -> DeviceMap:
    """The map that accelerate makes: auto and balanced spread evenly, balanced_low_0 spares GPU 0, sequential fills one
    after the other."""
    from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map

    _check_devices([*limits] if limits else [], "--max_memory")
    memory = get_max_memory(dict(limits) if limits else None)
    if not limits and "cpu" in memory:
        memory["cpu"] = int(memory["cpu"] * CPU_SHARE)
    whole = sorted(decoder_layer_class_names(sizes.model))
    special = sizes.special()
    if how != "sequential":
        memory = get_balanced_memory(
            sizes.model, memory, no_split_module_classes=whole, special_dtypes=special, low_zero=how == "balanced_low_0"
        )
    try:
        return dict(infer_auto_device_map(sizes.model, memory, no_split_module_classes=whole, special_dtypes=special))
    except IndexError:  # accelerate 1.15, of a tied head's own bias where the model must be cut (BERT)
        raise ConfigError(
            Problem(
                f"--device_map {how}",
                "accelerate found no device map for this model, and it does not fit on one device",
                "use a larger --max_memory, or --device_map FILE.json",
            )
        ) from None


def expand_user_device_map(sizes: ModuleSizes, given: Mapping[str, Device], flag: str) -> DeviceMap:
    """A map of the user's as one that names every module once; ConfigError for names it gets wrong and modules it
    leaves out."""
    model = sizes.model
    _check_devices([d for d in given.values() if d != DISK], flag)
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    problems = [
        Problem(f"{flag}, {name}", "is not a module of this model", did_you_mean_hint(name, sorted(known)))
        for name in given
        if name not in known
    ]
    full: DeviceMap = {}
    left_out: list[str] = []
    if not problems:
        _spread("", model, given.get(""), given, (full, left_out))
    if left_out:
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        problems.append(
            Problem(
                flag,
                f"leaves out {', '.join(left_out[:SHOWN])}{more}",
                'give each a device, or write "": "cpu" for the rest',
            )
        )
    whole = decoder_layer_class_names(model)
    for name, module in model.named_modules():
        inside = {d for n, d in full.items() if n.startswith(name + ".")}
        if type(module).__name__ in whole and len(inside) > 1:
            rule = (
                f"is spread over {', '.join(map(str, sorted(inside, key=str)))}, but the outputs of its parts are added"
            )
            problems.append(Problem(f"{flag}, {name}", rule, "give the whole layer one device"))
    if problems:
        raise ConfigError(problems)
    return full


def _spread(
    name: str, module: nn.Module, device: Device | None, given: Mapping[str, Device], out: tuple[DeviceMap, list[str]]
) -> None:
    """Each entry of the result stands for a module whose parts have no entry of their own, so that no two overlap."""
    full, left_out = out
    prefix = f"{name}." if name else ""
    if not any(other.startswith(prefix) and other != name for other in given):
        if device is not None:
            full[name] = device
        elif next(module.parameters(), None) is not None:
            left_out.append(name)
        elif next(module.buffers(), None) is not None:  # rotary angles: few bytes, wanted where layers are computed
            full[name] = next(d for d in given.values() if d != DISK)
        return
    for child, part in module.named_children():
        _spread(prefix + child, part, given.get(prefix + child, device), given, out)
    for own, _ in module.named_parameters(recurse=False):
        where = given.get(prefix + own, device)
        if where is None:
            left_out.append(prefix + own)
        else:
            full[prefix + own] = where


def _check_devices(devices: Sequence[Device], flag: str) -> None:
    """GPUs that this machine does not have."""
    count = torch.cuda.device_count()
    missing = sorted({d for d in devices if isinstance(d, int) and d >= count})
    if missing:
        has = f"has {count} GPUs" if count else "has no GPU"
        raise ConfigError(Problem(f"{flag}, GPU {missing[0]}", f"this machine {has}", "use cpu, or an existing GPU"))


def execution_device(placed: Mapping[str, Device]) -> torch.device:
    """Where offloaded layers are computed and prompts go: the first device of the map that is not only a store."""
    for device in placed.values():
        if device not in ("cpu", DISK):
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cpu")


def check_offloaded_forward_pass(model: Any, device: torch.device, flag: str) -> None:
    """One token, with weights elsewhere: accelerate brings a module's when it is called, which JetMoe's experts never
    are."""
    try:
        with torch.inference_mode():
            model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        rule = (
            f"this model ({model.config.model_type}) uses weights outside their module's forward call, so they "
            "cannot be loaded on demand"
        )
        raise ConfigError(
            Problem(flag, rule, "use a larger --max_memory, so that all weights stay on compute devices")
        ) from None


@dataclass
class _Row:
    first: str
    last: str
    device: Device
    elements: int
    bytes: float

    def name(self) -> str:
        """`model.layers.0-11`."""
        if not self.first:
            return "(the whole model)"
        a = _NUMBERED.fullmatch(self.first)
        b = _NUMBERED.fullmatch(self.last)
        return self.first if self.first == self.last or a is None or b is None else f"{self.first}-{b[2]}"


def placement_table(sizes: ModuleSizes, placed: Mapping[str, Device]) -> str:
    """Ranges of modules with their device, parameters and bytes; then what each device holds."""
    rows: list[_Row] = []
    weights = list(sizes.weights())
    for name, device in placed.items():
        prefix = f"{name}." if name else ""
        own = [(n, b) for key, n, b in weights if key == name or key.startswith(prefix)]
        row = _Row(name, name, device, sum(n for n, _ in own), sum(b for _, b in own))
        last = rows[-1] if rows else None
        if last is not None and last.device == device and _follows(last.last, name):
            last.last = name
            last.elements = last.elements + row.elements
            last.bytes = last.bytes + row.bytes
        else:
            rows.append(row)
    lines = [("module", "device", "parameters", "bytes")]
    lines += [(r.name(), _device_name(r.device), f"{r.elements:,}", bytes_text(r.bytes)) for r in rows]
    devices = dict.fromkeys(placed.values())
    if len(devices) > 1:
        lines += [
            (
                "in all",
                _device_name(d),
                f"{sum(r.elements for r in rows if r.device == d):,}",
                bytes_text(sum(r.bytes for r in rows if r.device == d)),
            )
            for d in devices
        ]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines)


def _follows(last: str, name: str) -> bool:
    a = _NUMBERED.fullmatch(last)
    b = _NUMBERED.fullmatch(name)
    return a is not None and b is not None and a[1] == b[1] and int(a[2]) + 1 == int(b[2])


def _device_name(device: Device) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device

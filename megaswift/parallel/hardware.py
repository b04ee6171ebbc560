"""The table of GPUs: rates of products, memory and links by the makers' data sheets.

Owns the figures and their sources. The metrics take the rate of products from it, `megaswift bench comm` the links,
`megaswift plan` everything; a file of the user's overrides rows or adds some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, did_you_mean_hint

PCIE_4 = 32.0
PCIE_5 = 64.0
"""GB/s in one direction of 16 lanes."""


@dataclass(frozen=True)
class Shares:
    """The shares of a GPU's figures that a training step reaches. The values here are assumptions for GPUs without a
    fit."""

    products: float = 0.70
    """Of the peak: large matrix products."""
    attention: float = 0.50
    """Of the peak in bfloat16: flash attention."""
    link: float = 0.80
    """Of NVLink and of the network: collectives."""
    launch_us: float = 6.0
    """Microseconds of the host for each kernel."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates are dense and in one direction; the data sheets give links in both, and Blackwell's products with
    sparsity."""

    name: str
    pattern: str
    """What a device of this kind has in its name."""
    bf16_tflops: float | None
    link_gbs: float | None
    """GB/s to another GPU of the node: NVLink, else PCIe with 16 lanes. The NVLink bridge of PCIe cards joins pairs
    only, so their PCIe rate stands here."""
    fp8_tflops: float | None = None
    memory_gib: float | None = None
    """As torch reports it, which is a little less than the data sheet's GB."""
    hbm_gbs: float | None = None
    network_gbs: float | None = None
    """GB/s of the GPU's share of the network between nodes in the maker's own machine."""
    domain: int | None = None
    """GPUs that NVLink joins, where these are more than a node's."""
    hbm_share: float = 0.80
    """Share of `hbm_gbs` that kernels reach: an assumption, the same for all."""
    bf16: Shares = Shares()
    """Of steps in bfloat16 or float32."""
    fp8: Shares = Shares()
    """Of steps in FP8."""
    source: str = ""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability, of GPUs with FP8; None: not known."""
        return CAPABILITIES.get(self.name)

    @property
    def plannable(self) -> bool:
        """True if the row has every figure that a plan needs."""
        return None not in (self.bf16_tflops, self.link_gbs, self.memory_gib, self.hbm_gbs, self.network_gbs)


GENERATIONS = {
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200"), "hopper"),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "blackwell"),
}
"""GPUs with fitted shares -> their generation."""
HOPPERS = ("h100", "h100-pcie", "h100-nvl", "h200", "h800", "h800-pcie", "h20", "gh200")
CAPABILITIES = {
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090"), (8, 9)),
    **dict.fromkeys(HOPPERS, (9, 0)),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), (10, 0)),
}
"""GPUs with FP8 -> their compute capability, or the least of their generation."""
FITTED: dict[tuple[str, str], Shares] = {
    ("hopper", "fp8"): Shares(0.70, 0.30, 0.95, 3.0),
    ("blackwell", "bf16"): Shares(0.39, 0.44, 0.64, 8.5),
    ("blackwell", "fp8"): Shares(0.62, 0.30, 0.48, 15.0),
}
"""Generation and precision -> shares fitted to published steps by scripts/published_steps.py. There are published steps
of one model only for Hopper in bfloat16, and none for other generations."""


def _fitted(gpu: Gpu) -> Gpu:
    generation = GENERATIONS.get(gpu.name, "")
    bf16, fp8 = (FITTED.get((generation, precision), Shares()) for precision in ("bf16", "fp8"))
    return replace(gpu, bf16=bf16, fp8=fp8)


DGX_A100 = "NVIDIA A100 data sheet; DGX A100: one 200 Gb/s port for each GPU"
HOPPER = "NVIDIA data sheet; DGX H100 and H200: one 400 Gb/s port for each GPU"
EXPORT = "as published by resellers, not by NVIDIA; network as in DGX H100"
BLACKWELL = "NVIDIA data sheet, halved where it states sparsity; network of the DGX of this GPU"
DATA_SHEETS: tuple[Gpu, ...] = (
    Gpu("gb300", r"GB300", 2500.0, 900.0, 5000.0, 276.0, 8000.0, 100.0, domain=72, source=BLACKWELL),
    Gpu("gb200", r"GB200", 2500.0, 900.0, 5000.0, 184.0, 8000.0, 50.0, domain=72, source=BLACKWELL),
    Gpu("b300", r"B300", 2250.0, 900.0, 4500.0, 267.0, 8000.0, 100.0, source=BLACKWELL),
    Gpu("b200", r"B200", 2250.0, 900.0, 4500.0, 178.0, 7700.0, 50.0, source=BLACKWELL),
    Gpu("gh200", r"GH200", 989.4, 450.0, 1978.9),
    Gpu("h200", r"H200", 989.4, 450.0, 1978.9, 139.0, 4800.0, 50.0, source=HOPPER),
    Gpu("h100-pcie", r"H100.*PCIe", 756.0, PCIE_5, 1513.0),
    Gpu("h100-nvl", r"H100 NVL", 835.0, 300.0, 1671.0),
    Gpu("h100", r"H100", 989.4, 450.0, 1978.9, 79.0, 3350.0, 50.0, source=HOPPER),
    Gpu("h800-pcie", r"H800.*PCIe", 756.0, PCIE_5, 1513.0),
    Gpu("h800", r"H800", 989.4, 200.0, 1978.9, 79.0, 3350.0, 50.0, source=EXPORT),
    Gpu("h20", r"H20\b", 148.0, 450.0, 296.0, 95.0, 4000.0, 50.0, source=EXPORT),
    Gpu("a100-pcie", r"A100.*PCI[Ee]", 312.0, PCIE_4),
    Gpu("a800-pcie", r"A800.*PCI[Ee]", 312.0, PCIE_4),
    Gpu("a100", r"A100", 312.0, 300.0, None, 79.0, 2039.0, 25.0, source=DGX_A100),
    Gpu("a800", r"A800", 312.0, 200.0, None, 79.0, 2039.0, 25.0, source="as A100, with NVLink of 400 GB/s"),
    Gpu("l40s", r"L40S", 362.0, PCIE_4, 733.0),
    Gpu("l40", r"L40\b", 181.0, PCIE_4, 362.0),
    Gpu("l4", r"L4\b", 121.0, PCIE_4, 242.0),
    Gpu("a10g", r"A10G", 70.0, PCIE_4),
    Gpu("a10", r"A10\b", 125.0, PCIE_4),
    Gpu(
        "rtx4090",
        r"RTX 4090",
        165.2,
        PCIE_4,
        330.3,
        23.5,
        1008.0,
        1.5,
        source="NVIDIA Ada whitepaper; network: 100 Gb/s that eight cards share",
    ),
    Gpu("rtx3090", r"RTX 3090", 71.0, PCIE_4),
    Gpu("rtx5090", r"RTX 5090", None, PCIE_5),
    Gpu("l20", r"L20\b", None, PCIE_4),
    Gpu("v100", r"V100-SXM[23]", None, 150.0),
    Gpu("mi300x", r"MI300X", 1307.4, None),
    Gpu("mi250", r"MI250", 383.0, None),
)
GPUS = tuple(map(_fitted, DATA_SHEETS))
"""The first row whose pattern a device's name contains counts."""


def gpu_of_device(name: str) -> Gpu | None:
    """Returns the row of a device by the name that its driver reports."""
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, name)), None)


def planned_gpu(name: str, hardware: Path | None = None, option: str = "--gpu") -> Gpu:
    """Returns the row of that name, with a file's changes.

    Args:
        hardware: A YAML file: name -> figures that differ, or all figures of a GPU of the user's own.
        option: The option that names it; only `--gpu` has a file of figures beside it.

    Raises:
        ConfigError: No such row, or it lacks figures that a plan needs.
    """
    rows = {gpu.name: gpu for gpu in GPUS}
    if hardware is not None:
        rows |= {gpu.name: gpu for gpu in _changed_rows(hardware, rows)}
    known = [row for row in rows if rows[row].plannable]
    short = re.sub(r"[\s_]", "", name.lower().removeprefix("nvidia"))
    gpu = rows.get(short) or gpu_of_device(name)
    if gpu is None or not gpu.plannable:
        rule = (
            "is not in the table of GPUs" if gpu is None else "has no figures of products, memory or links in the table"
        )
        hint = did_you_mean_hint(short, known)
        fix = hint or f"one of {', '.join(known)}"
        if option == "--gpu":
            fix += " Else add it in a file: --hardware FILE" if hint else ", or add it in a file: --hardware FILE"
        raise ConfigError(Problem(f"{option} {name}", rule, fix))
    return gpu


def _changed_rows(file: Path, rows: Mapping[str, Gpu]) -> Iterator[Gpu]:
    import yaml

    what = f"--hardware {file}"
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(Problem(what, rule, "megaswift plan --show_hardware prints such a file")) from None
    if not isinstance(read, dict) or not all(isinstance(row, dict) for row in read.values()):
        raise ConfigError(Problem(what, "is no mapping of names to figures", "h100: {network_gbs: 25}"))
    for name, row in read.items():
        base = rows.get(name) or Gpu(name, re.escape(name), None, None)
        shares = {key: value for key, value in row.items() if key in ("bf16", "fp8") and isinstance(value, dict)}
        for key, value in shares.items():
            _check_fields(f"{what}: {name}: {key}", value, Shares)
        _check_fields(f"{what}: {name}", {key: row[key] for key in row.keys() - shares.keys()}, Gpu)
        yield replace(base, **row | {key: replace(getattr(base, key), **value) for key, value in shares.items()})


def _check_fields(what: str, row: Mapping[str, Any], kind: type) -> None:
    """Refuse keys and values that are no fields of `kind`."""
    names = sorted(f.name for f in fields(kind) if f.name != "name")
    for key, value in row.items():
        text = key in ("pattern", "source")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if key not in names:
            raise ConfigError(Problem(f"{what}: {key}", "is no field of a GPU", f"fields: {', '.join(names)}"))
        if key in ("bf16", "fp8") or not (number or value is None or (text and isinstance(value, str))):
            rule = "is no mapping of shares" if key in ("bf16", "fp8") else "is no positive number"
            raise ConfigError(
                Problem(f"{what}: {key}: {value}", rule, "megaswift plan --show_hardware prints such a file")
            )


def hardware_yaml() -> str:
    """Returns the rows that a plan can use as a file for `--hardware`."""
    import yaml

    rows: dict[str, Any] = {}
    for gpu in GPUS:
        if gpu.plannable:
            rows[gpu.name] = {k: v for k, v in asdict(gpu).items() if k != "name" and v is not None}
    return yaml.safe_dump(rows, sort_keys=False, width=120)

"""The table of GPUs.

Covers: megaswift/parallel/hardware.py.
"""

from __future__ import annotations

import pytest

from megaswift.errors import ConfigError
from megaswift.parallel.hardware import GPUS, gpu_of_device, planned_gpu


@pytest.mark.parametrize("name", ["h100", "H100", "NVIDIA H100 80GB HBM3", "rtx 4090", "GB200", "gb_200"])
def test_names_that_people_type(name: str) -> None:
    assert planned_gpu(name).name in ("h100", "rtx4090", "gb200")


def test_rows_are_complete_and_apart() -> None:
    """A figure that a plan needs has a source, and no row hides behind an earlier one."""
    for gpu in GPUS:
        assert not gpu.plannable or gpu.source, gpu.name
    samples = {"gb200": "NVIDIA GB200", "b200": "NVIDIA B200", "h20": "NVIDIA H20", "h200": "NVIDIA H200"}
    samples |= {"l40": "NVIDIA L40", "l40s": "NVIDIA L40S", "a10": "NVIDIA A10", "a100": "NVIDIA A100-SXM4-80GB"}
    for name, device in samples.items():
        found = gpu_of_device(device)
        assert found is not None and found.name == name
    with pytest.raises(ConfigError, match="is not in the table"):
        planned_gpu("h101x")

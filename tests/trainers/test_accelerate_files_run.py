"""Files of `accelerate config`, one of each kind, given to megaswift itself: two steps on two processes, to the export.

The first step's loss is Hugging Face's, the engine and the layout are the file's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.trainers.hooks.metrics import read_lines
from tests.launchers.test_other_launchers import reference
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

COMMON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
}
KINDS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "DDP": ({"distributed_type": "MULTI_GPU", "gpu_ids": "all"}, "megatron", "DP2 on 2 processes", 2),
    "FSDP": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
        "fsdp2",
        "DP2 on 2 processes",
        2,
    ),
    "DeepSpeed": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0}},
        "zero3",
        "DP2 on 2 processes",
        2,
    ),
    "Megatron-LM": (
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {"megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 2},
        },
        "megatron",
        "PP2 DP1 on 2 processes",
        2,
    ),
    "parallelism": (
        {"distributed_type": "NO", "parallelism_config": {"parallelism_config_tp_size": 2}},
        "megatron",
        "TP2 SP DP1 on 2 processes",
        1,
    ),
}
"""Section: engine, layout, and rows a step for each of a micro-batch: the first step is of eight."""
DEFAULT = "Megatron-LM"


@pytest.mark.process
@pytest.mark.parametrize("kind", [k if k == DEFAULT else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_to_the_export(kind: str, tmp_path: Path) -> None:
    content, engine, layout, rows = KINDS[kind]
    words = write_inputs(tmp_path, "1e-3")
    options = {name.lstrip("-"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    options["per_device_train_batch_size"] = str(8 // rows)
    (tmp_path / "run.json").write_text(json.dumps(options))
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(COMMON | content))
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    more = ("--shuffle", "false", "--max_steps", 2, "--report_to", "none")
    said = run(words, tmp_path / "out", "--accelerate_config", tmp_path / "accelerate.yaml", *more)
    assert layout in said and f"engine: {engine}" in (tmp_path / "out" / "config.yaml").read_text().replace("'", "")
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(reference(str(tmp_path / "run.json")), rel=1e-5) and len(lines) == 2
    assert reference(str(tmp_path / "run.json"), tmp_path / "out" / "hf") < lines[0]["loss"]

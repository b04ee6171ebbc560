"""A run whose experts' inputs are padded to their capacity goes as the run without, rows of any length and evaluations
between its steps.

Covers: megaswift/engine/megatron/layers/moe/capacity.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import Pool
from tests.trainers.inputs import write_inputs
from tests.trainers.run_ranks import Job

CAPACITY = ("--moe_expert_capacity_factor", "0.8")
PADDED = (*CAPACITY, "--moe_pad_expert_input_to_capacity", "true")


def write_experts(folder: Path) -> None:
    """Makes the model in `folder` one of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in dense.items() if k not in ("model_type", "architectures", "layer_types")}
    torch.manual_seed(4)
    config = Qwen3MoeConfig(**kept, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def write_rows_of_unequal_length(path: Path) -> Path:
    """As long as their number says."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(24):
            turns = [{"role": "user", "content": "a" * (2 + i)}, {"role": "assistant", "content": "bc" * (1 + i % 7)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.mark.process
@pytest.mark.parametrize(
    "rows_as",
    [
        "--packing false",
        pytest.param("--packing true", marks=pytest.mark.slow),
        pytest.param("--streaming true", marks=pytest.mark.slow),
        pytest.param("--streaming true --packing true", marks=pytest.mark.slow),
        pytest.param("--group_by_length true --pp 2", marks=pytest.mark.slow),
    ],
)
def test_as_without_padding(rows_as: str, pool: Pool, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, "1e-3")
    write_experts(Path(inputs[1]))
    rows = str(write_rows_of_unequal_length(tmp_path / "rows.jsonl"))
    words = ["--model", inputs[1], "--dataset", rows, "--val_dataset", rows, *inputs[4:]]
    words += ["--ep", "2", "--max_steps", "3", "--eval_steps", "1", "--logging_steps", "1", "--max_length", "64"]
    words += [*rows_as.split(), "--report_to", "none", "--save_strategy", "no", "--adam_epsilon", "1e-6"]
    curves = []
    for name, options in (("plain", CAPACITY), ("padded", PADDED)):
        job = Job([*words, *options, "--output_dir", str(tmp_path / name)])
        pool.run("tests.trainers.run_ranks:go", job, 4 if "--pp" in rows_as else 2, timeout=240)
        steps, evaluations = (read_lines(tmp_path / name / f"{kind}.jsonl") for kind in ("metrics", "eval"))
        of_steps = [line[key] for line in steps for key in ("loss", "grad_norm", "aux_loss")]
        curves.append(of_steps + [line["loss"] for line in evaluations])
    plain, padded = curves
    assert len(plain) == 3 * 4 and plain == pytest.approx(padded, rel=2e-5)

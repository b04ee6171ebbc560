"""Two steps with each whole DeepSpeed file that one process can train with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.compat.files.whole_deepspeed_files import WHOLE_FILES
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

DEFAULT = "numbers zero2"
HERE = [
    name if name == DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name, file in WHOLE_FILES.items()
    if file.world == 1
]


@pytest.mark.process
@pytest.mark.parametrize("name", HERE)
def test_two_steps(name: str, tmp_path: Path) -> None:
    """At the file's learning rate, to an export; a warmup that is longer than the run is left out."""
    file, words = WHOLE_FILES[name], write_inputs(tmp_path)
    if file.content["fp16"]["enabled"] is True and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed does not run float16 on this CPU")
    del words[words.index("--per_device_train_batch_size") : words.index("--per_device_train_batch_size") + 2]
    params = file.content["scheduler"]["params"]
    numbers = params["warmup_num_steps"] != "auto"
    if numbers:
        del words[words.index("--lr") : words.index("--lr") + 2]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file.content))
    out = tmp_path / "out"
    run(words, out, "--deepspeed", path, "--max_steps", 2, "--report_to", "none", ranks=1)
    lines = read_lines(out / "metrics.jsonl")
    assert len(lines) == 2 and (out / "hf" / "model.safetensors").is_file()
    assert ("loss_scale" in lines[0]) == (file.content["fp16"]["enabled"] is True)
    if numbers:
        assert [line["learning_rate"] for line in lines] == [params["warmup_max_lr"]] * 2

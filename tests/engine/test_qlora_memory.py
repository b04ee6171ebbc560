"""What a QLoRA engine needs beside what it holds: built and loaded in a process of its own, whose peak the kernel
tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
ALONE = """
import json, sys
from pathlib import Path
import megaswift.engine.megatron
from megaswift.config import SwiftConfig
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.run.engines import native_engine
from megaswift.families import family_of
from megaswift.parallel.layout import Layout

def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024

config = json.loads(sys.argv[1])
cfg = SwiftConfig(task="sft", train_type=sys.argv[2], torch_dtype="bfloat16", lora_rank=2)
context = ParallelContext(Layout.from_config(cfg.parallel, 1), timeout_s=60, seed=1)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
engine = native_engine(cfg, family_of(config).spec(config), context)
engine.random_init(0)
print(json.dumps([engine.report().weight_bytes, status("VmHWM") - before]))
"""


def alone(kind: str) -> tuple[int, int]:
    """(bytes of weights that the engine reports, growth of the process at its peak while it is built and loaded)."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(CONFIG), kind],
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held, peak = json.loads(done.stdout.splitlines()[-1])
    return held, peak


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="no /proc/self/clear_refs: the peak since then is Linux's to tell",
)
def test_the_unquantized_model_is_never_there() -> None:
    """Building and loading: below two thirds of the unquantized weights at the peak, process and all; a good quarter
    when done."""
    plain, _ = alone("lora")
    held, peak = alone("qlora")
    assert held < 0.3 * plain, (held, plain)
    assert held < peak < plain * 2 / 3, (held, peak, plain)

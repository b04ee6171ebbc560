"""LoRA of ms-swift and Megatron-Bridge, as PEFT loads it: the merged weights are those of Megatron's own product.

Covers: megaswift/bridge/foreign/adapters.py, megaswift/bridge/foreign/settings.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from megaswift.errors import CheckpointError
from tests.bridge.folders import make, tensors_of
from tests.bridge.foreign.adapter_writer import RANK, AdapterJob, BridgeJob, changes, values, write_options
from tests.bridge.foreign.megatron_writer import Job
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
ALPHA = 12.0


@pytest.fixture(scope="module", params=[False, True], ids=["swift", "bridge"])
def adapters(
    request: pytest.FixtureRequest, folders: Path, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Path, Path]:
    """(whether Megatron-Bridge's, Hugging Face folder, checkpoint)."""
    folder = make("dense", folders)
    root = tmp_path_factory.mktemp("adapters")
    hf = json.loads((folder / "config.json").read_text())
    job = AdapterJob(str(root / "iter_0000007"), request.param, values(hf, 3))
    pool.run("tests.bridge.foreign.adapter_writer:run", job, 2)
    write_options(root, request.param, ALPHA, 2)
    return request.param, folder, root


def test_peft_merges_what_megatron_adds(adapters: tuple[bool, Path, Path], tmp_path: Path) -> None:
    _, folder, root = adapters
    check_merged(folder, root, tmp_path)
    assert not (root / "called").exists()


@pytest.mark.slow
@pytest.mark.skipif("MEGASWIFT_BRIDGE" not in os.environ, reason="MEGASWIFT_BRIDGE is not set (CONTRIBUTING.md)")
@pytest.mark.parametrize("tp", [1, 2])
def test_lora_of_megatron_bridge_itself(tp: int, te_pool: Pool, folders: Path, tmp_path: Path) -> None:
    folder = make("dense", folders)
    hf = json.loads((folder / "config.json").read_text())
    model = Job(str(folder), str(tmp_path / "iter_0000007"), tp=tp, te=True)
    job = BridgeJob(os.environ["MEGASWIFT_BRIDGE"], model, values(hf, 3))
    te_pool.run("tests.bridge.foreign.adapter_writer:run_bridge", job, tp)
    write_options(tmp_path, True, ALPHA, tp)
    check_merged(folder, tmp_path, tmp_path)


def check_merged(folder: Path, root: Path, tmp_path: Path) -> None:
    """The adapters of `values`, merged by PEFT, change each weight by scale x B A."""
    out = megatron_to_hf(root, tmp_path / "adapter", MegatronToHfOptions(hf_config=folder))
    hf = json.loads((folder / "config.json").read_text())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).merge_and_unload()
    got = model.state_dict()
    before = tensors_of(folder)
    change = changes(hf, values(hf, 3), ALPHA / RANK)
    assert len(change) == 7 * 4
    for name, tensor in before.items():
        want = tensor + change[name] if name in change else tensor
        torch.testing.assert_close(got[name], want, rtol=0, atol=2e-5, msg=name)


def test_options_that_do_not_fit(adapters: tuple[bool, Path, Path], tmp_path: Path) -> None:
    bridge, folder, root = adapters
    options = MegatronToHfOptions(hf_config=folder)
    path = write_options(root, bridge, ALPHA, 4)
    try:
        if not bridge:
            with pytest.raises(CheckpointError, match="tensor_model_parallel_size 4, but tensor .* in 2 parts"):
                megatron_to_hf(root, tmp_path / "adapter", options)
        path.write_text("[1, 2")
        with pytest.raises(CheckpointError, match=f"{path.name}: cannot be read"):
            megatron_to_hf(root, tmp_path / "adapter", options)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"has adapters, but no {path.name}"):
            megatron_to_hf(root, tmp_path / "adapter", options)
    finally:
        write_options(root, bridge, ALPHA, 2)
    assert not (tmp_path / "adapter").exists()

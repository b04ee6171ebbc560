"""`megaswift convert verify`: every kind of difference is found, told, reported and an exit code; what is equal is
equal.

Covers: megaswift/bridge/convert/weight_comparison.py, megaswift/bridge/convert/logit_comparison.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaswift.bridge.convert import job
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.cli import main
from megaswift.commands.convert import convert_command
from megaswift.errors import UserError
from tests.bridge.folders import make, rewrite, set_config, tensors_of
from tests.bridge.quantize import gpt_oss, quantize_fp8
from tests.sources import ROOT

pytestmark = pytest.mark.wide

Fresh = Callable[[str], Path]
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """(exit code, what was printed, the report) of a comparison."""

    def call(*words: object) -> tuple[int, str, dict[str, Any]]:
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        capsys.readouterr()
        code = convert_command(["verify", *map(str, words), "--report", str(path)])
        return (
            code,
            capsys.readouterr().out,
            json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON")),
        )

    return call


def rows(report: dict[str, Any], good: tuple[str, ...] = ("equal",)) -> dict[str, dict[str, Any]]:
    """The tensors that are not."""
    return {row["name"]: row for row in report["tensors"] if row["status"] not in good}


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = tensors_of(folder)
    change(tensors)
    rewrite(folder, {n: t.contiguous() for n, t in tensors.items()})
    return folder


def flip(tensors: dict[str, Tensor]) -> None:
    """The last bit of one element."""
    tensors[UP].view(torch.int32)[-1, -1] ^= 1


def test_equal_in_other_files(verify: Any, folders: Path, fresh: Fresh) -> None:
    a, b = make("dense", folders), changed(fresh("dense"), lambda t: None)
    code, out, report = verify(a, b)
    theirs = tensors_of(a)
    assert code == 0 and report["equal"] and rows(report) == {} and f"{len(theirs)} tensors: {len(theirs)} equal" in out
    assert UP not in out and UP in verify(a, b, "--all")[1]
    assert {r["name"]: (r["sha256_a"], r["sha256_b"]) for r in report["tensors"]} == {
        n: (sha(t), sha(t)) for n, t in theirs.items()
    }


@pytest.mark.wide
@pytest.mark.parametrize(
    "case",
    [
        (flip, UP, "different", "different: 1 elements, max abs diff "),
        (lambda t: t[UP].__setitem__((0, 0), torch.nan), UP, "different", "max abs diff nan"),
        (lambda t: t[NORM].__setitem__(3, torch.inf), NORM, "different", "max abs diff inf"),
        (lambda t: t.update({UP: t[UP].double()}), UP, "dtype", "different dtype: 0 elements, max abs diff 0"),
        (lambda t: t.update({UP: t[UP].t()}), UP, "shape", "[96, 64] / [64, 96]"),
        (lambda t: t.pop(NORM), NORM, "missing", "missing in B"),
        (lambda t: t.update(more=torch.zeros(2)), "more", "extra", "extra: not in A"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(130)}), "lm_head.bias", "extra", "extra: not in A"),
    ],
    ids=["one bit", "nan", "inf", "dtype", "shape", "missing", "extra", "extra bias"],
)
def test_every_difference(
    case: tuple[Any, str, str, str], verify: Any, folders: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, name, status, told = case
    monkeypatch.setattr(job.split_region_into_blocks, "__defaults__", (1000,))
    a, b = make("dense", folders), changed(fresh("dense"), change)
    code, out, report = verify(a, b)
    found = rows(report)
    assert code == 1 and not report["equal"] and list(found) == [name] and found[name]["status"] == status
    assert [line for line in out.splitlines() if line.startswith(name) and told in line]
    ours, theirs = tensors_of(a), tensors_of(b)
    assert found[name]["sha256_a"] == (sha(ours[name]) if name in ours else None)
    assert found[name]["sha256_b"] == (sha(theirs[name]) if name in theirs else None)
    assert all(r["sha256_a"] == sha(ours[r["name"]]) for r in report["tensors"] if r["sha256_a"])
    back, _, turned = verify(b, a)
    assert back == 1 and rows(turned)[name]["status"] == {"missing": "extra", "extra": "missing"}.get(status, status)


def test_nan_equals_the_same_nan_and_zero_is_not_minus_zero(verify: Any, fresh: Fresh, tmp_path: Path) -> None:
    a = changed(fresh("dense"), lambda t: t[NORM].copy_(torch.full((64,), torch.nan)))
    assert verify(a, a)[0] == 0
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, value in ((one, 0.0), (other, -0.0)):
        folder.mkdir()
        save_file(
            {"x": torch.tensor([value, 1.0]), "scalar": torch.tensor(3), "none": torch.zeros(0, 4)},
            folder / "model.safetensors",
        )
    code, out, report = verify(one, other)
    assert code == 1 and rows(report)["x"]["different"] == 1 and rows(report)["x"]["max_abs_diff"] == 0
    assert "config.json: not compared" in out


def test_casting_both(verify: Any, fresh: Fresh, folders: Path) -> None:
    b = changed(fresh("dense"), lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    code, _, report = verify(make("dense", folders), b)
    assert code == 1 and {r["status"] for r in report["tensors"]} == {"dtype"}
    code, _, report = verify(make("dense", folders), b, "--dtype", "bf16")
    assert code == 0 and report["dtype"] == "bfloat16"
    assert {r["name"]: r["sha256_a"] for r in report["tensors"]} == {n: sha(t) for n, t in tensors_of(b).items()}


def test_what_may_lack_on_one_side(verify: Any, fresh: Fresh, folders: Path) -> None:
    head, embedding, rope = (
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    a, b = make("dense-tied", folders), fresh("dense-tied")
    changed(b, lambda t: t.update({head: t[embedding].clone(), rope: torch.ones(8)}))
    code, out, report = verify(a, b)
    assert code == 0 and set(rows(report)) == {head, rope} and "2 ignored" in out
    assert "stored duplicate of the tied embedding" in rows(report)[head]["why"]
    assert verify(b, a)[0] == 0
    changed(b, lambda t: t[head][0].add_(1))
    assert verify(a, b)[0] == 1


def test_settings_that_change_the_model(verify: Any, fresh: Fresh, folders: Path) -> None:
    b = fresh("dense")
    set_config(b, rms_norm_eps=1e-6, transformers_version="0")
    code, out, report = verify(make("dense", folders), b)
    assert code == 1 and "layernorm_epsilon is 1e-05 in A and 1e-06 in B" in out and rows(report) == {}
    assert [c["setting"] for c in report["config"]] == ["transformer.layernorm_epsilon"]
    set_config(b, secret_sauce=True)
    code, out, report = verify(make("dense", folders), b)
    assert code == 0 and "config.json: not compared" in out and report["config"] is None


def test_another_architecture(folders: Path, fresh: Fresh, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model_type 'llama': is a different architecture from 'qwen3'"):
        convert_command(["verify", str(make("dense", folders)), str(make("llama", folders))])
    b = fresh("dense")
    set_config(b, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(UserError, match="is a different architecture"):
        convert_command(["verify", str(make("dense", folders)), str(b)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompts", "x"], "--prompts: applies only with --logits"),
        (["--trust_remote_code"], "--trust_remote_code: applies only with --logits"),
        (["--logits", "--dtype", "bf16"], "--dtype: applies only to tensors"),
        (["--report", "no/such/folder/r.json"], "cannot be written there"),
        (["--logit"], "did you mean --logits?"),
        (["--logits", "--prompts", "no-such-file"], "--prompts no-such-file: cannot be read"),
    ],
)
def test_mistakes(words: list[str], told: str, folders: Path) -> None:
    folder = str(make("dense", folders))
    with pytest.raises(UserError) as error:
        convert_command(["verify", folder, folder, *words])
    assert told in str(error.value)


@pytest.mark.parametrize("variant", ["moe", "qwen2"])
def test_a_checkpoint(variant: str, verify: Any, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders, torch.bfloat16)
    checkpoint = hf_to_megatron(folder, tmp_path / "megatron", HfToMegatronOptions(layout={"tp": 2}))
    code, _, report = verify(folder, checkpoint)
    assert code == 0 and len(report["tensors"]) == len(tensors_of(folder))
    assert verify(checkpoint, folder)[0] == 0
    other = changed(Path(shutil.copytree(folder, tmp_path / "other")), lambda t: t[NORM].view(torch.int16)[5].add_(1))
    code, _, report = verify(checkpoint, other)
    assert code == 1 and list(rows(report)) == [NORM]


def test_an_fp8_folder_equals_its_dequantized_weights(verify: Any, fresh: Fresh, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = quantize_fp8(fresh("llama"), (16, 32))
    stored = load_file(folder / "model.safetensors")
    plain = {
        n: Fp8Dequantize(None)._dequantize_one(t, stored[f"{n}_scale_inv"], torch.bfloat16)
        if f"{n}_scale_inv" in stored
        else t
        for n, t in stored.items()
        if not n.endswith("_scale_inv")
    }
    other = tmp_path / "plain"
    other.mkdir()
    save_file(plain, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    set_config(other, quantization_config=None)
    assert verify(folder, other)[0] == 0
    checkpoint = hf_to_megatron(folder, tmp_path / "megatron")
    assert verify(checkpoint, other)[0] == 0
    code, out, _ = verify(folder, checkpoint, "--logits")
    assert code == 0, out
    assert verify(other, folder, "--logits")[0] == 0


def test_logits(verify: Any, folders: Path, tmp_path: Path) -> None:
    a, norm = make("moe", folders), tensors_of(make("moe", folders))[NORM]
    code, out, report = verify(a, a, "--logits")
    assert (
        code == 0
        and len(report["prompts"]) == 6
        and 0 < report["tolerance"] < 1e-4
        and "sdpa and eager attention" in out
    )
    assert report["tolerance"] == 5 * max(r["spread"] for r in report["prompts"])
    b = Path(shutil.copytree(a, tmp_path / "b"))
    changed(b, lambda t: t["model.layers.2.self_attn.v_proj.weight"].mul_(1.001))
    code, out, report = verify(a, b, "--logits")
    assert code == 1 and "DIFFERENT" in out and not report["equal"]
    shutil.copytree(a, tmp_path / "noise")
    changed(tmp_path / "noise", lambda t: t[NORM].copy_(norm.view(torch.int32).bitwise_xor(1).view(torch.float32)))
    code, out, report = verify(a, tmp_path / "noise", "--logits")
    assert code == 0 and max(r["max_abs_diff"] for r in report["prompts"]) > 0, out
    changed(b, lambda t: t[NORM].fill_(torch.nan))
    assert verify(a, b, "--logits")[0] == 1


def test_logits_of_a_checkpoint_on_own_prompts(verify: Any, folders: Path, tmp_path: Path) -> None:
    a, prompts = make("moe", folders), tmp_path / "prompts.txt"
    checkpoint = hf_to_megatron(a, tmp_path / "megatron")
    prompts.write_text("[1, 2, 3]\n\n[5]\n")
    code, _, report = verify(a, checkpoint, "--logits", "--prompts", prompts)
    assert code == 0 and [(r["prompt"], r["tokens"]) for r in report["prompts"]] == [
        ("prompts.txt:1", 3),
        ("prompts.txt:2", 1),
    ]
    assert all(r["max_abs_diff"] <= report["tolerance"] < 1e-4 < r["largest"] for r in report["prompts"])
    prompts.write_text("[1000]\n")
    with pytest.raises(UserError, match=r"prompts.txt:1: has token id 1000; the vocabulary has 130 tokens"):
        convert_command(["verify", str(a), str(a), "--logits", "--prompts", str(prompts)])


def test_logits_of_a_model_without_sdpa(verify: Any, tmp_path: Path) -> None:
    """gpt_oss has sinks, so only eager attention: its spread is that between float32 and float64."""
    folder = gpt_oss(tmp_path / "m")
    code, out, report = verify(folder, folder, "--logits")
    assert code == 0 and "float32 and float64" in out and 0 < report["tolerance"] < 1e-4
    assert [r["tokens"] for r in report["prompts"]] == [1, 7, 32, 64, 100, 24]  # no longer than the model's positions
    other = changed(Path(shutil.copytree(folder, tmp_path / "other")), lambda t: t[NORM].mul_(1.01))
    assert verify(folder, other, "--logits")[0] == 1


def test_logits_need_every_weight(fresh: Fresh, folders: Path) -> None:
    """transformers would draw what is missing at random, with a warning."""
    b = changed(fresh("dense"), lambda t: t.pop(NORM))
    with pytest.raises(UserError, match=r"transformers finds no weights for model.norm.weight"):
        convert_command(["verify", str(make("dense", folders)), str(b), "--logits"])


@pytest.mark.process
def test_the_script_and_its_exit_codes(
    fresh: Fresh, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make("dense", folders), changed(fresh("dense"), flip)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "converters/verify.py", str(a), str(b)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    for other, code, told in ((tmp_path / "nothing", 2, "does not exist"), (a, 0, "")):
        assert main(["convert", "verify", str(a), str(other)]) == code
        assert told in (said := capsys.readouterr().err) and "Traceback" not in said

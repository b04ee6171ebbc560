"""What infer, deploy and export take from the files of a run: base model, data, names of results.

Covers: megaswift/inference/options/run_files.py, megaswift/inference/options/checks.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift import deploy, export, infer
from megaswift.errors import ConfigError, UserError
from megaswift.options.files import CONFIG_HEADER

ROWS = '{"query": "1+2?", "response": "3"}\n'


def peft_folder(path: Path, base: str) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output directory of a LoRA run."""
    out = tmp_path / "run"
    peft_folder(out / "adapter", "/models/base")
    peft_folder(out / "checkpoints" / "step-4" / "adapter", "/models/base")
    (tmp_path / "rows.jsonl").write_text(ROWS * 8)
    (tmp_path / "val.jsonl").write_text(ROWS)
    values = {"model": "/models/base", "dataset": [str(tmp_path / "rows.jsonl")], "system": "be brief"}
    values["columns"] = {"q": "query"}
    text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items())
    (out / "config.yaml").write_text(f"{CONFIG_HEADER}\n{text}\ntask: sft\nval_dataset: {tmp_path / 'val.jsonl'}\n")
    return out


def sections(command: Any, *words: str) -> Any:
    return command.COMMAND.parse([*words]).sections


@pytest.mark.parametrize("path", ["", "adapter", "checkpoints/step-4", "checkpoints/step-4/adapter"])
def test_adapters_name_their_base_model(run: Path, path: str) -> None:
    parsed = infer.COMMAND.parse(["--adapters", str(run / path)])
    weights = parsed.sections["weights"]
    assert weights.model == "/models/base" and (Path(weights.adapters[0]) / "adapter_config.json").is_file()
    assert any("the base model of" in notice for notice in parsed.notices)
    assert sections(infer, "--adapters", str(run), "--model", "m")["weights"].model == "m"
    assert sections(deploy, "--adapters", str(run / path))["weights"].model == "/models/base"


def test_adapters_whose_folder_names_no_model_take_the_run_s(run: Path) -> None:
    (run / "adapter" / "adapter_config.json").write_text('{"r": 4}')
    assert sections(infer, "--adapters", str(run))["weights"].model == "/models/base"
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="does not name its base model"):
        infer.COMMAND.parse(["--adapters", str(run)])


def test_adapters_of_two_base_models(run: Path, tmp_path: Path) -> None:
    other = peft_folder(tmp_path / "other", "/models/another")
    with pytest.raises(ConfigError, match="was trained on /models/another"):
        infer.COMMAND.parse(["--adapters", str(run), str(other)])


def test_adapters_of_a_hub(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def snapshot_download(name: str, revision: Any, allow_patterns: Any) -> str:
        asked.append((name, revision))
        if name == "no/body":
            raise OSError("404")
        return str(run / "adapter")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = sections(infer, "--adapters", "some/lora")["weights"]
    assert (found.adapters, found.model) == ((str(run / "adapter"),), "/models/base")
    named = sections(deploy, "--adapters", "x=some/lora", "--model_revision", "v2")["weights"].named_adapters
    assert named == (("x", str(run / "adapter")),) and asked == [("some/lora", None)] * 2
    with pytest.raises(UserError, match="--adapters no/body: no such local folder, and Hugging Face could not"):
        export.COMMAND.parse(["--adapters", "no/body", "--merge_lora", "true"])


def test_the_data_of_the_run(run: Path, tmp_path: Path) -> None:
    found = sections(infer, "--adapters", str(run), "--load_data_args", "true")
    assert found["file"].dataset == (str(tmp_path / "val.jsonl"),) and found["file"].columns == {"q": "query"}
    assert found["conversation"].system == "be brief"
    own = sections(infer, "--adapters", str(run), "--load_data_args", "--system", "be long")
    assert own["conversation"].system == "be long"
    with pytest.raises(ConfigError, match="finds no config.yaml of a run"):
        infer.COMMAND.parse(["--model", str(tmp_path), "--load_data_args", "true"])


def test_the_agent_template_of_the_run(run: Path, tmp_path: Path) -> None:
    """Where it is text and the command gives none; a format of the chat template's own needs no option."""
    config, plain = run / "config.yaml", (run / "config.yaml").read_text()
    for text, want in (("react_en", "react_en"), ("hermes", None), ("[a", None)):
        config.write_text(f"{plain}agent_template: {text}\n")
        for command in (infer, deploy):
            parsed = command.COMMAND.parse(["--adapters", str(run)])
            assert parsed.sections["conversation"].agent_template == want
            assert any(f"--agent_template {want}: as the run has it" in line for line in parsed.notices) == bool(want)
    config.write_text(f"{plain}agent_template: qwen_zh\n")
    own = ("--adapters", str(run), "--agent_template", "react_zh")
    assert sections(deploy, *own)["conversation"].agent_template == "react_zh"
    vllm = deploy.COMMAND.parse(["--adapters", str(run), "--infer_backend", "vllm"])
    assert vllm.sections["conversation"].agent_template is None
    assert any("--agent_template qwen_zh of the run" in line and "has no effect" in line for line in vllm.notices)
    with pytest.raises(ConfigError, match="--agent_template react_zh: would be ignored: vLLM's server does not"):
        deploy.COMMAND.parse([*own, "--infer_backend", "vllm"])
    assert any("react_zh has no effect: a conversation" in line for line in infer.COMMAND.parse([*own]).notices)
    rows = sections(infer, *own, "--dataset", str(tmp_path / "rows.jsonl"))
    assert rows["conversation"].agent_template == "react_zh"


def test_results_have_a_name_of_their_own(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--adapters", str(run), "--val_dataset", "val.jsonl")
    assert sections(infer, *words)["file"].result_path == "infer_result/run/val.jsonl"
    Path("infer_result/run").mkdir(parents=True)
    Path("infer_result/run/val.jsonl").touch()
    assert sections(infer, *words)["file"].result_path == "infer_result/run/val-2.jsonl"
    assert sections(infer, *words, "rows.jsonl")["file"].result_path == "infer_result/run/val-and-1.jsonl"
    words = ("--adapters", str(run / "checkpoints" / "step-4"), "--val_dataset", "val.jsonl", "--stream", "true")
    assert sections(infer, *words)["file"].result_path == "infer_result/run-step-4/val.jsonl"
    assert any("--stream true has no effect" in notice for notice in infer.COMMAND.parse([*words]).notices)


def test_several_adapters(run: Path, tmp_path: Path) -> None:
    """infer adds them up; deploy serves each by a name."""
    other = peft_folder(tmp_path / "other", "/models/base")
    assert sections(infer, "--adapters", f"a={run}", str(other))["weights"].named_adapters == (
        ("", str(run / "adapter")),
        ("", str(other)),
    )
    served = sections(deploy, "--adapters", str(run), str(other))["weights"].named_adapters
    assert served == (("run", str(run / "adapter")), ("other", str(other)))
    assert sections(deploy, "--adapters", f"a={other}")["weights"].named_adapters == (("a", str(other)),)
    with pytest.raises(ConfigError, match="is given twice"):
        deploy.COMMAND.parse(["--adapters", f"a={other}", f"a={run}"])
    with pytest.raises(ConfigError, match="cannot merge adapters that requests select"):
        deploy.COMMAND.parse(["--adapters", f"a={other}", "--merge_lora", "true"])


@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        ("--merge_lora true", "merged"),
        ("--merge_lora true --quant_bits 4 --quant_method bnb", "bnb-int4"),
        ("--merge_lora true --to_mcore true", "mcore"),
    ],
)
def test_exports_have_a_name_of_their_own(run: Path, words: str, suffix: str) -> None:
    found = sections(export, "--adapters", str(run), *words.split())
    assert found["export"].output_dir == f"{run / 'adapter'}-{suffix}"
    assert sections(export, "--model", "Org/Name", "--quant", "8")["export"].output_dir == "Name-bnb-int8"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--model m --to_hf true", "--to_hf true: needs a Megatron checkpoint"),
        ("--model m --to_hf true --to_mcore true", "conflicts with --to_mcore"),
        ("--model m --merge_lora false --quant 4 --test_convert_precision true", "applies only to a conversion"),
        ("--adapters {run} --to_mcore true", "there is nothing to convert"),
        ("--model m --to_mcore true --mcore_model x", "is already a Megatron checkpoint"),
        ("--model m --quant 8 --bnb_4bit_quant_type fp4", "applies only to --quantization_bit 4"),
        ("--model m --quant_method bnb --to_mcore true", "applies only to runs with --quantization_bit"),
    ],
)
def test_exports_that_contradict_themselves(run: Path, words: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        export.COMMAND.parse([*words.format(run=run).split(), "--output_dir", "new"])
    assert rule in str(caught.value)


def test_processes_come_from_the_environment(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    rows = ("--val_dataset", str(tmp_path / "val.jsonl"))
    assert sections(infer, "--model", "m", *rows)["launch"].nproc_per_node == 4
    assert sections(infer, "--model", "m", *rows, "--nproc_per_node", "2")["launch"].nproc_per_node == 2
    with pytest.raises(ConfigError, match="NPROC_PER_NODE=4: divides the rows of a prompt file"):
        infer.COMMAND.parse(["--model", "m"])
    told = export.COMMAND.parse(["--model", "m", "--to_mcore", "true", "--output_dir", "new"]).notices
    assert any("nproc_per_node 4 has no effect: one process converts" in notice for notice in told)
    told = deploy.COMMAND.parse(["--model", "m"]).notices
    assert any("NPROC_PER_NODE=4 has no effect: a server is one process" in notice for notice in told)

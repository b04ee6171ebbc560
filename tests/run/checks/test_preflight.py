"""What is refused before a process group exists: all of it at once, and without torch."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaswift.commands.training import further_problems_of_refused_config
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import CheckpointError, ConfigError, UserError
from megaswift.families import family_of
from megaswift.models.published.dense import PHI_4
from megaswift.models.published.moe import QWEN1_5_MOE_A2_7B
from megaswift.models.published.sizes import MODELS
from megaswift.run.checks.preflight import flex_dispatcher_problems, preflight, token_limit_problems
from tests.trainers.inputs import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def problems(cfg: SwiftConfig, world_size: int) -> list[str]:
    """What the checks say; empty when the run may start."""
    try:
        preflight(cfg, world_size)
    except UserError as error:
        return [str(p) for p in error.problems]
    return []


def test_a_good_run_passes_and_leaves_no_trace(model: Path, tmp_path: Path) -> None:
    assert (
        problems(SwiftConfig(task="sft", model=str(model), dataset="d", tp=2, output_dir=str(tmp_path / "out")), 4)
        == []
    )
    assert list(tmp_path.iterdir()) == []


def test_problems_of_every_kind_are_told_together(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    cfg = SwiftConfig(
        task="sft",
        model=str(model),
        dataset=["a.jsonl", "d", "b.jsonl"],
        val_dataset="c.jsonl",
        tp=8,
        pp=1,
        output_dir=str(tmp_path / "out"),
        report_to=["wandb"],
        chat_template="no/such/file.jinja",
    )
    text = "\n".join(problems(cfg, 8))
    for part in (
        "tp 8",
        "file.jinja: is neither a file nor a template",
        "contains another run",
        "wandb is not installed",
        "--dataset a.jsonl: no such file",
        "--dataset b.jsonl: no such file",
        "--val_dataset c.jsonl: no such file",
    ):
        assert part in text
    assert "--dataset d:" not in text  # an id of a hub, perhaps


def test_what_a_cpu_alone_cannot_do(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = SwiftConfig(
        task="sft", model=str(model), dataset="d", output_dir=str(tmp_path / "out"), optimizer_cpu_offload=True
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert ["--optimizer_cpu_offload true: there is no CUDA device" in text for text in problems(cfg, 1)] == [True]
    words = {"model": str(model), "dataset": "d", "output_dir": str(tmp_path / "out"), "torch_dtype": "fp16"}
    half = SwiftConfig(task="sft", engine="zero2", **words)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: False)
    assert ["DeepSpeed supports float16 on CPUs with AVX512-FP16 only" in text for text in problems(half, 1)] == [True]
    for engine in ("megatron", "ddp", "fsdp2"):
        assert problems(SwiftConfig(task="sft", engine=engine, **words), 1) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert problems(cfg, 1) == problems(half, 1) == []


def test_the_backend_is_the_device_s(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"task": "sft", "model": str(model), "dataset": "d", "output_dir": str(tmp_path / "out")}
    for cuda, backend, said in ((False, "nccl", True), (False, "gloo", False), (True, "nccl", False)):
        monkeypatch.setattr("torch.cuda.is_available", lambda cuda=cuda: cuda)
        assert problems(SwiftConfig(distributed_backend=backend, **words), 1) == []
        assert ("--ddp_backend nccl has no effect" in capsys.readouterr().err) == said
    assert ["GPUs communicate through NCCL" in p for p in problems(SwiftConfig(ddp_backend="gloo", **words), 1)] == [
        True
    ]


def test_a_template_below_home_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    cfg = SwiftConfig(
        task="sft", model=str(model), dataset="d", chat_template="~/t.jinja", output_dir=str(tmp_path / "out")
    )
    assert problems(cfg, 1) == []


def test_adapters_that_have_no_place_are_named_before_anything_starts(model: Path, tmp_path: Path) -> None:
    cfg = SwiftConfig(
        task="sft",
        model=str(model),
        dataset="d",
        output_dir=str(tmp_path / "out"),
        train_type="lora",
        target_modules=["q_proj", "k_porj", "q_proj,v_proj", "embed_tokens", "(v_proj"],
        modules_to_save=["lm_heads", "output_layer"],
    )
    text = "\n".join(problems(cfg, 1))
    for part in (
        "--target_modules k_porj: matches no linear layer",
        "did you mean k_proj?",
        "of this model\n    try: --target_modules q_proj v_proj;",
        "--target_modules embed_tokens: is not a separate linear layer",
        "--target_modules (v_proj: is not a regular expression",
        "--modules_to_save lm_heads: matches no module",
    ):
        assert part in text
    assert "q_proj:" not in text and "output_layer" not in text
    assert "--adapters nowhere: no such folder" in "\n".join(
        problems(
            SwiftConfig(
                task="sft",
                model=str(model),
                dataset="d",
                output_dir=str(tmp_path / "out"),
                train_type="lora",
                adapters="nowhere",
            ),
            1,
        )
    )


def test_four_bits_that_do_not_fit_are_told_before_anything_starts(model: Path, tmp_path: Path) -> None:
    cfg = SwiftConfig(
        task="sft",
        model=str(model),
        dataset="d",
        output_dir=str(tmp_path / "out"),
        train_type="qlora",
        modules_to_save=["lm_head", "o_proj"],
    )
    text = "\n".join(problems(cfg, 1))
    assert (
        "which is not a multiple of 64, the NF4 block size" in text
        and "--modules_to_save model.layers.0.self_attn.o_proj: is stored in NF4" in text
    )
    assert "lm_head" not in text


@pytest.mark.parametrize(
    ("remove", "words"),
    [
        ("*.safetensors", "has no *.safetensors"),
        ("tokenizer*", "has no tokenizer"),
        ("config.json", "has no config.json"),
    ],
)
def test_a_model_folder_that_lacks_something(tmp_path: Path, remove: str, words: str) -> None:
    folder = write_model(tmp_path / "model")
    for path in folder.glob(remove):
        path.unlink()
    assert words in "\n".join(
        problems(SwiftConfig(task="sft", model=str(folder), dataset="d", output_dir=str(tmp_path / "out")), 1)
    )


def test_random_weights_need_no_safetensors(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert (
        problems(
            SwiftConfig(task="pt", model=str(folder), dataset="d", random_init=True, output_dir=str(tmp_path / "out")),
            1,
        )
        == []
    )


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    cfg = SwiftConfig(task="sft", model=str(folder), dataset="d", output_dir=str(tmp_path / "out"))
    assert "lacks 1 of 2 shards: model-00002-of-00002.safetensors" in problems(cfg, 1)[0]


@pytest.mark.parametrize(
    ("name", "words"), [("./nowhere", "no such folder"), ("nowhere", "no such folder"), ("config.json", "is a file")]
)
def test_a_path_that_is_no_model(model: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(model)
    assert words in problems(SwiftConfig(task="sft", model=name, dataset="d"), 1)[0]


def test_an_output_directory_is_its_export_and_a_checkpoint_has_its_model_beside_it(
    model: Path, tmp_path: Path
) -> None:
    from megaswift.folders.source import locate_model

    run = tmp_path / "run"
    write_model(run / "hf")
    (run / "metrics.jsonl").write_text("{}")
    assert locate_model(SwiftConfig(model=str(run)).model) == run / "hf"
    step = run / "checkpoints" / "step-2"
    step.mkdir(parents=True)
    (step / "engine").mkdir()
    (step / "engine" / ".metadata").write_bytes(b"")
    cfg = SwiftConfig(task="sft", model=str(step), dataset="d", output_dir=str(tmp_path / "o"))
    assert f"is a checkpoint without {step / 'model' / 'config.json'}" in problems(cfg, 1)[0]
    write_model(step / "model")
    assert locate_model(SwiftConfig(model=str(step)).model, verify=False) == step / "model"
    with pytest.raises(CheckpointError, match=r"manifest.json: is missing"):
        locate_model(SwiftConfig(model=str(step)).model)


def test_it_imports_no_torch() -> None:
    code = (
        "import sys, megaswift.run.training; print(sorted(m for m in ('torch', 'megatron', 'transformers') if m "
        "in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


def test_options_for_experts_are_refused_for_a_dense_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    cfg = SwiftConfig(
        task="sft",
        model=str(folder),
        dataset="d",
        output_dir=str(tmp_path / "out"),
        moe_z_loss_coeff=0.1,
        recompute_granularity="selective",
        recompute_modules=("core_attn", "moe", "layernorm"),
    )
    text = "\n".join(problems(cfg, 1))
    assert (
        "--moe_z_loss_coeff 0.1: applies only to MoE models" in text
        and "--recompute_modules moe: applies only to MoE models" in text
    )
    assert "--recompute_modules layernorm: Transformer Engine fuses" in text


def test_experts_are_not_captured_in_cuda_graphs(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    shutil.copytree(write_model(tmp_path / "model"), folder)
    (folder / "config.json").write_text(json.dumps(QWEN1_5_MOE_A2_7B))
    cfg = SwiftConfig(
        task="sft", model=str(folder), dataset="d", output_dir=str(tmp_path / "out"), cuda_graph_impl="local"
    )
    text = "\n".join(problems(cfg, 1))
    assert "is not supported for models with experts" in text and "there is no CUDA device" in text


def test_experts_are_not_padded_beyond_all_tokens(tmp_path: Path) -> None:
    """60 experts, of which a token goes to 4: at 15 each has every token of a micro-batch."""
    folder = tmp_path / "moe"
    shutil.copytree(write_model(tmp_path / "model"), folder)
    (folder / "config.json").write_text(json.dumps(QWEN1_5_MOE_A2_7B))
    cfg = SwiftConfig(task="sft", model=str(folder), dataset="d", output_dir=str(tmp_path / "out"))
    padded = cfg.replace(moe_pad_expert_input_to_capacity=True, moe_expert_capacity_factor=15.5)
    (problem,) = [text for text in problems(padded, 1) if "capacity" in text]
    assert "--moe_expert_capacity_factor 15.5" in problem and "--moe_expert_capacity_factor 15 or less" in problem
    assert not any("capacity" in text for text in problems(padded.replace(moe_expert_capacity_factor=15.0), 1))
    unpadded = padded.replace(moe_pad_expert_input_to_capacity=False)
    assert not any("capacity" in text for text in problems(unpadded, 1))


def test_a_written_configuration_passes_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    cfg = SwiftConfig(
        task="sft", model=str(folder), dataset="d", output_dir=str(tmp_path / "out"), cp=2, optimizer="sgd"
    )
    assert problems(cfg, 2) == []
    assert problems(SwiftConfig.from_dict(cfg.to_dict()), 2) == []


@pytest.mark.parametrize(
    "fields",
    [
        {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
        },
        {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ],
    ids=lambda fields: fields["rope_scaling"]["type"],
)
def test_longer_sequences_than_the_frequencies_are_for(model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """transformers takes other frequencies for a batch with a longer sequence."""
    folder = tmp_path / "phi3"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(json.dumps({**PHI_4, **fields}))
    told = problems(
        SwiftConfig(task="sft", model=str(folder), dataset="d", max_length=65, output_dir=str(tmp_path / "out")), 1
    )
    assert len(told) == 1 and "--max_length 65: exceeds 64" in told[0] and "--max_length 64" in told[0]
    assert f"this model's {fields['rope_scaling']['type']} RoPE" in told[0]
    assert (
        problems(
            SwiftConfig(task="sft", model=str(folder), dataset="d", max_length=64, output_dir=str(tmp_path / "out")), 1
        )
        == []
    )


def test_what_options_say_together_is_told_with_layout_and_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    words = ["--dataset", str(tmp_path / "none.jsonl"), "--tp", "3", "--output_dir", str(tmp_path / "out")]

    def told(*more: str) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            load_config("sft", [*words, *more], complete=True, environ={}, beyond=further_problems_of_refused_config)
        return [p.what for p in refused.value.problems]

    data = f"--dataset {tmp_path / 'none.jsonl'}"
    both = ("--model", str(model), "--nproc_per_node", "8")
    assert told(*both, "--warmup_steps", "5", "--warmup_ratio", "0.1") == [
        "--warmup_ratio 0.1",
        "--tp 3",
        "--tp 3",
        "--tp 3",
        data,
    ]
    assert told("--nproc_per_node", "8") == ["--model", data]  # nothing to say of a layout
    assert told(*both, "--warmup_stesp", "5") == ["--warmup_stesp 5"]  # who knows what the rest would be
    assert told(*both, "--warmup_steps", "five") == ["--warmup_steps five"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "backend", "rule"),
    [
        (None, "deepep", "needs the package deep_ep"),
        (("buffer.py",), "deepep", ""),
        (("buffer.py",), "hybridep", "has no HybridEPBuffer"),
        (("buffer.py", "hybrid_ep_buffer.py"), "hybridep", ""),
    ],
)
def test_the_library_of_the_flexible_dispatcher(
    files: tuple[str, ...] | None, backend: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if files is not None:
        (tmp_path / "deep_ep").mkdir()
        for name in ("__init__.py", *files):
            (tmp_path / "deep_ep" / name).touch()
        monkeypatch.syspath_prepend(tmp_path)
    model = SwiftConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend).model
    found = flex_dispatcher_problems(model)
    assert rule in str(found) and bool(found) == bool(rule)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "auxiliary losses are means over a micro-batch"),
        ({"moe_aux_loss_coeff": 0.0}, ""),
        ({"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1}, "auxiliary losses are means over a micro-batch"),
    ],
)
def test_micro_batches_by_tokens_do_not_change_the_loss_of_routers(options: dict[str, float], rule: str) -> None:
    config = MODELS["qwen3-30b-a3b"][0]
    cfg = SwiftConfig(max_tokens_per_batch=4096, **options)
    found = token_limit_problems(cfg, family_of(config).spec(config))
    assert rule in str(found) and bool(found) == bool(rule)

"""Options of one engine with another, and the spellings that mean an engine.

Covers: megaswift/run/checks/engine_choice.py.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import OPTIONS
from megaswift.engine.options.engine_checks import (
    ENGINE_CLASHES,
    FSDP_ONLY,
    capabilities_of,
    requested_engine,
)
from megaswift.errors import ConfigError
from megaswift.families import FAMILIES, ModelSpec, family_of
from megaswift.models.any_model import spec_from_size_fields
from megaswift.options.option import one_of
from megaswift.run.checks import engine_choice
from megaswift.run.checks.engine_choice import MachineFacts, approximate_parameter_count, choose_engine, resolve_engine
from tests.config.refusals import problems
from tests.config.test_sections import NEEDS, other_value
from tests.parity.models import VARIANTS, config
from tests.sources import ROOT
from tests.trainers.inputs import write_model

NATIVE = one_of("megatron", "auto")


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if o.only_with.get("engine") == NATIVE])
def test_options_of_the_native_engine(name: str) -> None:
    value = other_value(name)
    if name in ("sequence_parallel", "tp_comm_overlap"):  # without tensor parallelism it has no effect on any engine
        assert name not in SwiftConfig(engine="ddp", **{name: value}).given
        return
    with pytest.raises(ConfigError) as error:
        SwiftConfig(engine="ddp", **{name: value})
    parent = "precision_aware_optimizer" if name == "store_param_remainders" else "tp_comm_overlap"
    rule = f"applies only to --{parent} true" if value is False else "applies only to --engine megatron"
    assert any(name in p.what and rule in p.rule for p in error.value.problems)
    assert not [p for p in _told(name, value) if "applies only to --engine" in p]


def _told(name: str, value: object) -> list[str]:
    try:
        SwiftConfig(engine="auto", **{name: value}, **NEEDS.get(name, {}))
    except ConfigError as error:
        return [str(p) for p in error.problems]
    return []


@pytest.mark.parametrize("name", FSDP_ONLY)
def test_options_of_fsdp(name: str) -> None:
    value = other_value(name)
    assert SwiftConfig(engine="fsdp2", **{name: value}).value(name) == (
        tuple(value) if isinstance(value, list) else value
    )
    with pytest.raises(ConfigError, match="applies only to --engine fsdp2"):
        SwiftConfig(engine="ddp", **{name: value})


CLASHING = [
    "--deepspeed zero3 --engine ddp",
    "--use_fsdp true --engine ddp",
    "--fsdp full_shard,shard_grad_op",
    "--use_fsdp true --min_num_params 9 --fsdp_transformer_layer_cls_to_wrap L",
    "--engine ddp --recompute_granularity selective",
    "--engine ddp --save_safetensors false",
    "--save_safetensors false --save_only_model true",
    "--engine ddp --freeze_llm true",
]


TYPED_AS = {"export_hf": "save_safetensors", "fsdp_min_num_params": "min_num_params"}
"""Options of these rules that have another name in what was given."""


def test_contradictions() -> None:
    assert len(CLASHING) == len(ENGINE_CLASHES)
    for words, clash in zip(CLASHING, ENGINE_CLASHES, strict=True):
        found = problems(words)
        assert len(found) == 1 and TYPED_AS.get(clash.options[0], clash.options[0]) in found[0], found


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "megatron"),
        ({"use_fsdp": True}, "fsdp2"),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp2"),
        ({"engine": "fsdp"}, "fsdp2"),
        ({"deepspeed": "zero3"}, "zero3"),
        ({"deepspeed": str(ROOT / "configs/deepspeed/zero3_offload.json")}, "zero3_offload"),
        ({"engine": "native"}, "megatron"),
    ],
)
def test_spellings(options: dict[str, object], kind: str) -> None:
    cfg = SwiftConfig(**options)
    assert requested_engine(cfg) == kind
    assert resolve_engine(cfg, 2).engine.engine == kind


@pytest.mark.parametrize(
    ("word", "kind"), [("auto", "auto"), ("ddp", "ddp"), ("deepspeed", "zero2"), ("fsdp", "fsdp2")]
)
def test_distributed_strategy_in_a_file(word: str, kind: str, tmp_path: Path) -> None:
    """As other toolkits write it, in their section."""
    (tmp_path / "run.yaml").write_text(f"training:\n  distributed_strategy: {word}\n  max_steps: 3\n")
    cfg = load_config("sft", [str(tmp_path / "run.yaml")])
    assert requested_engine(cfg) == kind and cfg.train.max_steps == 3
    assert requested_engine(load_config("sft", ["--distributed_strategy", word])) == kind
    with pytest.raises(ConfigError, match=r"run.yaml:2 distributed_strategy: zero9"):
        (tmp_path / "run.yaml").write_text("training:\n  distributed_strategy: zero9\n")
        load_config("sft", [str(tmp_path / "run.yaml")])


def test_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    assert resolve_engine(SwiftConfig(model=model, engine="auto"), 2).engine.engine == "ddp"
    assert "megaswift: engine ddp: 0.02 M parameters, whole on each device\n" in capsys.readouterr().err
    assert (
        resolve_engine(SwiftConfig(model=model, engine="auto"), 2, tell=False).engine.engine == "ddp"
        and not capsys.readouterr().err
    )
    assert resolve_engine(SwiftConfig(model=model, engine="auto", tp=2), 2).engine.engine == "megatron"


def test_auto_takes_no_engine_that_refuses_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "choose_engine", lambda *_: ("zero2", "its size"))
    model = str(write_model(tmp_path / "m"))
    assert resolve_engine(SwiftConfig(model=model, engine="auto"), 2).engine.engine == "zero2"
    assert resolve_engine(SwiftConfig(model=model, engine="auto", optimizer="sgd"), 2).engine.engine == "fsdp2"


SIZES = {  # layers, width, MLP; the published sizes of Qwen3 0.6 B, 4 B and 8 B, of Llama 3 70 B
    "0.6": (28, 1024, 3072),
    "4": (36, 2560, 9728),
    "8": (36, 4096, 12288),
    "70": (80, 8192, 28672),
}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha=5 needs a torch engine"),
        ({"use_liger": True}, "use_liger=True needs a torch engine"),
        ({"optimizer": "adafactor"}, "optimizer='adafactor' needs a torch engine"),
        ({"train_type": "vera"}, "train_type='vera' needs a torch engine"),
        ({"train_type": "lora", "quantization_bit": 4}, "quantization_bit=4 needs a torch engine"),
        ({"freeze_vit": True}, "freeze_vit=True needs a torch engine"),
    ],
)
def test_an_option_of_torch_engines_without_an_engine(
    options: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default gives way with a line that says why; a named engine and a layout do not."""
    model = str(write_model(tmp_path))
    assert resolve_engine(SwiftConfig(model=model, **options), 2).engine.engine == "ddp"
    assert f"engine ddp: {reason}; " in capsys.readouterr().err
    for fixed in ({"engine": "megatron"}, {"tp": 2}):
        with pytest.raises(ConfigError):
            SwiftConfig(model=model, **fixed, **options)


def test_a_model_of_torch_engines_without_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path)
    plain = SwiftConfig(model=str(folder))
    assert resolve_engine(plain, 2).engine.engine == "megatron"
    described = json.loads((folder / "config.json").read_text())
    quantized = described | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (folder / "config.json").write_text(json.dumps(quantized))
    assert resolve_engine(plain, 2).engine.engine == "ddp"
    assert "engine ddp: the native engine does not read gptq weights; " in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "cohere2"}))
    assert resolve_engine(plain, 2).engine.engine == "ddp"
    assert "the native engine does not support model_type cohere2; " in capsys.readouterr().err
    assert resolve_engine(SwiftConfig(model=str(folder), engine="megatron"), 2).engine.engine == "megatron"
    assert resolve_engine(SwiftConfig(model=str(tmp_path / "none")), 2).engine.engine == "megatron", "preflight says it"


def dense(name: str) -> ModelSpec:
    """A model of no family of about so many billions of parameters."""
    layers, width, inner = SIZES[name]
    spec = spec_from_size_fields(
        {
            "model_type": "new",
            "vocab_size": 128_000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": width // 32,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": inner,
        }
    )
    assert approximate_parameter_count(spec) / 1e9 == pytest.approx(float(name), rel=0.25)
    return spec


def experts(layers: int) -> ModelSpec:
    """Qwen3-30B-A3B's layers, 48 there."""
    raw = {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
    }
    return family_of(raw).spec(raw)


CHOICES = [
    # model, a model-parallel axis, processes, DeepSpeed; what is taken, and what the reason says
    (dense("0.6"), True, 8, True, "megatron", "a model-parallel axis is set"),
    (dense("70"), True, 1, False, "megatron", "a model-parallel axis is set"),
    (experts(48), False, 8, True, "megatron", "30.5 B parameters in 128 experts per layer"),
    (experts(4), False, 8, True, "zero2", "3.11 B parameters: gradients and optimizer states sharded"),
    (dense("0.6"), False, 8, True, "ddp", "B parameters, whole on each device"),
    (dense("4"), False, 8, True, "zero2", "B parameters: gradients and optimizer states sharded"),
    (dense("8"), False, 8, True, "fsdp2", "B parameters: weights sharded, too"),
    (dense("70"), False, 8, True, "fsdp2", "B parameters: weights sharded, too"),
    (dense("4"), False, 8, False, "fsdp2", "and deepspeed is not installed"),
    (dense("70"), False, 8, False, "fsdp2", "B parameters"),
    (dense("0.6"), False, 8, False, "ddp", "B parameters"),
    (dense("4"), False, 1, True, "ddp", "on a single process"),
    (dense("70"), False, 1, False, "ddp", "on a single process"),
]
MEMORY = [
    # model, GiB per process, adapters only; what is taken, and what the reason says
    (dense("0.6"), 8, False, "zero2", "ddp would need about 7 GiB of 8 GiB per process"),
    (dense("0.6"), 2, False, "fsdp2", "ddp would need about 7 GiB of 2 GiB per process"),
    (dense("0.6"), 4, True, "ddp", "whole on each device"),
    (dense("4"), 80, False, "zero2", "gradients and optimizer states sharded"),
    (dense("4"), 16, False, "fsdp2", "zero2 would need about"),
    (dense("70"), 16, False, "fsdp2", "weights sharded, too"),
]


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: f"{row[4]}-{row[2]}")
def test_auto_by_axes_size_and_machine(
    row: tuple[ModelSpec, bool, int, bool, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, axes, world, deepspeed, engine, reason = row
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if deepspeed else None)
    taken, why = choose_engine(spec, axes, MachineFacts(world, 1e15))
    assert taken == engine and reason in why, why


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row[3]}-{row[1]}")
def test_auto_by_memory(row: tuple[ModelSpec, int, bool, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, room, adapters, engine, reason = row
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    taken, why = choose_engine(spec, False, MachineFacts(8, room * 2**30, not adapters))
    assert taken == engine and reason in why, why


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_are_near(variant: str) -> None:
    """The estimate from sizes alone, beside the exact count of the family's table."""
    from megaswift.bridge.plan import WeightPlan

    raw = json.loads(config(variant).to_json_string(use_diff=False))
    assert raw["model_type"] in FAMILIES
    spec = family_of(raw).spec(raw)
    assert approximate_parameter_count(spec) == pytest.approx(WeightPlan(family_of(raw), spec).parameters, rel=0.35)


def test_capabilities_follow_the_engine() -> None:
    """Megatron-Core has all but vision, an engine on transformers' model has vision alone."""
    for engine, native in (("megatron", True), ("ddp", False), ("fsdp2", False), ("zero3", False)):
        able = asdict(capabilities_of(load_config("sft", ["--engine", engine], environ={})))
        assert able == {name: native != (name == "vision") for name in able}, engine


@pytest.mark.parametrize("name", ["ddp_backend", "distributed_backend", "dist_backend"])
@pytest.mark.parametrize("backend", ["mpi", "ccl", "hccl"])
def test_backends_that_are_missing(name: str, backend: str) -> None:
    assert SwiftConfig(**{name: "gloo"}).engine.ddp_backend == "gloo"
    with pytest.raises(ConfigError) as error:
        SwiftConfig(**{name: backend})
    assert "must be one of nccl | gloo" in str(error.value) and "megaswift does not" in str(error.value)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("{config_path: FILE}", "zero1"),
        ("{config_path: FILE, stage: 1}", "zero1"),
        ("{stage: 3}", "zero3"),
        ("{zero_optimization: {stage: 2}}", "zero2"),
    ],
)
def test_a_section_deepspeed(section: str, kind: str, tmp_path: Path) -> None:
    file, run = tmp_path / "ds.json", tmp_path / "run.yaml"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    run.write_text(f"model: m\ndataset: d\ndeepspeed: {section.replace('FILE', str(file))}\n")
    assert requested_engine(load_config("sft", [str(run)], environ={})) == kind
    run.write_text(f"model: m\ndataset: d\ndeepspeed: {{config_path: {file}, stage: 2}}\n")
    with pytest.raises(ConfigError, match="conflicts with"):
        load_config("sft", [str(run)], environ={})
    run.write_text("model: m\ndataset: d\ndeepspeed: {stage: 4}\n")
    with pytest.raises(ConfigError, match="stage=4: must be one of"):
        load_config("sft", [str(run)], environ={})


def test_deepspeed_s_own_arguments(tmp_path: Path) -> None:
    """`deepspeed --hostfile ... SCRIPT --deepspeed --deepspeed_config=FILE`: its launcher adds the rank."""
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    words = ["--local_rank=0", "--model", "m", "--dataset", "d", "--deepspeed", f"--deepspeed_config={file}"]
    assert requested_engine(load_config("sft", words, environ={})) == "zero1"
    with pytest.raises(ConfigError, match="--deepspeed: has no value"):
        load_config("sft", ["--deepspeed"], environ={})


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--deepspeed zero2", "use --engine megatron without --deepspeed, or leave it out"),
        ("--use_fsdp true", "use --engine megatron without the options of FSDP, or leave it out"),
        ("--engine ddp", "--engine megatron, or leave it out"),
    ],
)
def test_the_way_to_the_native_engine_is_whole(words: str, fix: str) -> None:
    """What is told to be left out would be refused beside the engine."""
    with pytest.raises(ConfigError) as error:
        load_config("sft", ["--model", "m", "--dataset", "d", "--pp", "2", *words.split()], environ={})
    assert [p.fix for p in error.value.problems] == [fix]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--tp 2 --use_liger true", "--engine ddp without --tensor_parallel_size, or leave it out"),
        ("--tp 2 --torch_compile true", "--engine ddp without --tensor_parallel_size, or leave it out"),
        ("--tp 2 --torch_compile true --engine ddp", "--engine megatron without --torch_compile, or leave it out"),
        (
            "--tp 2 --pp 2 --optimizer adafactor",
            "--engine ddp without --tensor_parallel_size and --pipeline_parallel_size, or --optimizer adam",
        ),
    ],
)
def test_options_of_two_engines_are_one_conflict_with_both_ways_out(words: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sft", ["--model", "m", "--dataset", "d", *words.split()], environ={})
    assert [p.fix for p in error.value.problems] == [fix]

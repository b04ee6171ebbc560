"""Another toolkit's options in megaswift's terms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaswift.compat.translation import RENAMED, SWITCHES
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.errors import ConfigError

GIVEN = ["--model", "m", "--dataset", "d.jsonl"]


def test_tables_name_options_and_hide_none() -> None:
    assert {*RENAMED.values(), *(name for name, _ in SWITCHES.values())} <= set(OPTIONS)
    assert not {*RENAMED, *SWITCHES} & set(NAMES)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--bf16 true", "torch_dtype", "bfloat16"),
        ("--bf16", "torch_dtype", "bfloat16"),
        ("--fp16 true --bf16 false", "torch_dtype", "float16"),
        ("--bf16=False", "torch_dtype", "float32"),
        ("--bf16 false --fp16 false", "torch_dtype", "float32"),
        ("--fp16 false", "torch_dtype", "auto"),
        ("--bf16 false --torch_dtype bfloat16", "torch_dtype", "bfloat16"),
        ("--mixed_precision bf16", "torch_dtype", "bfloat16"),
        ("--mixed_precision no", "torch_dtype", "float32"),
        ("--sequence_parallel_size 4", "context_parallel_size", 4),
        ("--gradient_clipping 0.5", "max_grad_norm", 0.5),
        ("--clip_grad_norm 0.5", "max_grad_norm", 0.5),
        ("--task_type CAUSAL_LM", "train_type", "full"),
        ("--epochs 3", "num_train_epochs", 3),
        ("--load_in_4bit true --train_type lora", "quantization_bit", 4),
        ("--load_in_4bit false", "quantization_bit", None),
        ("--use_lora", "train_type", "lora"),
        ("--flash_attn true", "attn_impl", "flash"),
        ("--resume true", "resume_from_checkpoint", "latest"),
        ("--resume false", "resume_from_checkpoint", None),
        ("--eval_strategy no --eval_steps 50 --val_dataset v.jsonl", "eval_steps", None),
        ("--eval_strategy steps --eval_steps 50 --val_dataset v.jsonl", "eval_steps", 50),
        ("--evaluation_strategy no --eval_steps 50 --val_dataset v.jsonl", "eval_steps", None),
        ("--fsdp fsdp2", "use_fsdp", True),
        ("--train_sampling_strategy group_by_length", "group_by_length", True),
        ("--train_sampling_strategy sequential", "shuffle", False),
        ("--save_strategy no --save_steps 50", "save_steps", None),
        ("--no_save_optim true", "save_only_model", True),
        ("--save_only_model true", "save_only_model", True),
        ('--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2.0,"lr_end":1e-7}', "lr_power", 2.0),
        ('--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2.0,"lr_end":1e-7}', "min_lr", 1e-7),
        ('--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1}', "min_lr_ratio", 0.1),
        ('--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr":1e-6}', "min_lr", 1e-6),
        ('--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs {"num_decay_steps":9}', "wsd_decay_steps", 9),
        ('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":0.5}', "lr_num_cycles", 1),
        ("--lr_decay_iters 90 --lr_warmup_iters 10", "lr_decay_iters", 90),
        ("--lr_decay_samples 900 --global_batch_size 10", "lr_decay_iters", 90),
        ("--resume_from_checkpoint true", "resume_from_checkpoint", "latest"),
        ("--resume_from_checkpoint false", "resume_from_checkpoint", None),
        ("--resume_from_checkpoint OUT/checkpoints/step-2", "resume_from_checkpoint", "OUT/checkpoints/step-2"),
        ("--save_safetensors false", "export_hf", False),
        ("--experiment_name run-7", "run_name", "run-7"),
        ("--dataset_streaming --max_steps 3", "streaming", True),
        ("--dataset_streaming false", "streaming", False),
    ],
)
def test_what_they_mean(words: str, name: str, value: Any) -> None:
    assert load_config("sft", [*GIVEN, *words.split()], environ={}).value(name) == value


@pytest.mark.parametrize(
    ("words", "urls"),
    [
        ("--vllm_server_host 10.0.0.7", ("http://10.0.0.7:8000",)),
        ("--vllm_server_host 10.0.0.7 --vllm_server_port 9000", ("http://10.0.0.7:9000",)),
        ("--vllm_server_host=a,b --vllm_server_port=1,2", ("http://a:1", "http://b:2")),
    ],
)
def test_a_server_s_host_and_port(words: str, urls: tuple[str, ...]) -> None:
    base = ["--reward_funcs", "length", "--vllm_mode", "server", "--use_vllm", "true", "--rollout_sync_folder", "s"]
    cfg = load_config("grpo", [*GIVEN, *base, *words.split()], environ={})
    assert cfg.rollout.rollout_server_url == urls and cfg.rollout.rollout_backend == "vllm_server"


def test_levels_of_sleep() -> None:
    base = ["--reward_funcs", "length", "--use_vllm", "true", "--vllm_mode", "colocate", "--sleep_level"]
    assert load_config("grpo", [*GIVEN, *base, "1"], environ={}).rollout.rollout_sleep
    assert not load_config("grpo", [*GIVEN, *base, "0"], environ={}).rollout.rollout_sleep


def test_a_file_s_precision(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("fp16: false\nbf16: true\n")
    assert load_config("sft", [str(file), *GIVEN], environ={}).model.torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("words", "model", "adapters"),
    [
        ("--resume_from_checkpoint {0} --resume_only_model true", "{0}", None),
        ("--load {0} --finetune --no-load-optim --no-load-rng", "{0}", None),
        ("--resume_from_checkpoint {0} --resume_only_model true --ignore_data_skip true", "{0}", None),
        ("--resume_from_checkpoint {1} --resume_only_model true --train_type lora", "m", "{1}/adapter"),
        ("--resume_from_checkpoint {1}/adapter --resume_only_model true --train_type lora", "m", "{1}/adapter"),
        ("--resume_from_checkpoint {1} --resume_only_model true --train_type lora --adapters a", "m", "{1}/adapter"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_checkpoint_as_weights_to_start_from(
    words: str, model: str, adapters: str | None, in_file: bool, tmp_path: Path
) -> None:
    """As `--model` in place of the one that is named, or as `--adapters`; a line says where the data begin."""
    full, lora = (tmp_path / name for name in ("full", "lora"))
    full.mkdir()
    (lora / "adapter").mkdir(parents=True)
    (lora / "adapter" / "adapter_config.json").touch()
    given = [*GIVEN, *words.format(full, lora).split()]
    if in_file:
        pairs = re.findall(r"--(\S+) ?((?!--)\S+)?", " ".join(given))
        file = tmp_path / "run.yaml"
        file.write_text("".join(f"{name}: {value or 'true'}\n" for name, value in pairs))
        given = [str(file)]
    cfg = load_config("sft", given, environ={})
    assert (cfg.checkpoint.resume_from_checkpoint, cfg.model.model) == (None, model.format(full, lora))
    assert cfg.lora.adapters == (None if adapters is None else adapters.format(full, lora))
    assert "finetune" in words or any("at the first step and row of data" in n for n in cfg.notices)


@pytest.mark.parametrize("where", ["latest", "true"])
def test_the_newest_checkpoint_is_named_to_start_from_its_weights(where: str) -> None:
    with pytest.raises(ConfigError, match="--resume_only_model true: conflicts with"):
        load_config("sft", [*GIVEN, "--resume_from_checkpoint", where, "--resume_only_model", "true"], environ={})
    cfg = load_config("sft", [*GIVEN, "--resume_from_checkpoint", where, "--resume_only_model", "false"], environ={})
    assert cfg.checkpoint.resume_from_checkpoint == "latest"


def test_yaml_s_no(tmp_path: Path) -> None:
    """YAML reads `no` as false."""
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: no\neval_strategy: no\neval_steps: 5\nsave_strategy: no\nsave_steps: 5\n")
    cfg = load_config("sft", [str(file), *GIVEN, "--val_dataset", "v.jsonl"], environ={})
    assert (cfg.model.torch_dtype, cfg.evaluation.eval_steps, cfg.checkpoint.save_steps) == ("float32", None, None)


def test_a_written_configuration_stays_as_it_is(tmp_path: Path) -> None:
    """An empty entry of resume_from_checkpoint is no `true`."""
    file = tmp_path / "config.yaml"
    for words in ([], ["--resume_from_checkpoint", "true"], ["--save_steps", "0.1", "--min_lr_ratio", "0.1"]):
        cfg = load_config("sft", [*GIVEN, *words], environ={})
        file.write_text(cfg.to_yaml())
        assert load_config("sft", [str(file)], environ={}).to_dict() == cfg.to_dict()
    file.write_text("model: m\ndataset: d\nresume_from_checkpoint:\n")
    assert load_config("sft", [str(file)], environ={}).checkpoint.resume_from_checkpoint is None
    file.write_text("model: m\ndataset: d\nresume_from_checkpoint: true\n")
    assert load_config("sft", [str(file)], environ={}).checkpoint.resume_from_checkpoint == "latest"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--save_safetensors false --engine ddp", "torch engines write safetensors only"),
        ("--save-safetensors false --train_type lora", "are written as safetensors"),
        ("--save_safetensors false --save_only_model true", "are written as safetensors"),
    ],
)
def test_safetensors_are_left_out_on_the_native_engine_only(words: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_config("sft", [*GIVEN, *words.split()], environ={})


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_mappings_of_a_file(tmp_path: Path, suffix: str) -> None:
    """One value each, no sections; a key that is not known is named."""
    file = tmp_path / f"run.{suffix}"
    entries = {
        "dataloader": {"num_workers": 2, "batch_size": 4, "pin_memory": True},
        "lr_scheduler_kwargs": {"min_lr": 1e-6},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    file.write_text(json.dumps(entries))
    cfg = load_config("sft", [str(file), *GIVEN], environ={})
    assert (cfg.data.dataloader_num_workers, cfg.train.per_device_train_batch_size, cfg.schedule.min_lr) == (2, 4, 1e-6)
    file.write_text(json.dumps({"dataloader": {"colour": 1}, "lr_scheduler_kwargs": {"colour": 1}}))
    with pytest.raises(ConfigError) as error:
        load_config("sft", [str(file), *GIVEN], environ={})
    first, second = error.value.problems
    assert "dataloader: colour: 1" in first.what and "num_workers" in first.fix
    assert '{"colour": 1}' in second.what and "num_decay_steps" in second.fix


def test_a_mapping_as_rope_scaling(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rope_scaling:\n  type: yarn\n  factor: 4.0\n")
    cfg = load_config("sft", [str(file), *GIVEN], environ={})
    assert cfg.model.rope_scaling == '{"type": "yarn", "factor": 4.0}'


def test_two_precisions_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="conflicts with"):
        load_config("sft", [*GIVEN, "--bf16", "true", "--fp16", "true"], environ={})


@pytest.mark.parametrize(("task", "needed"), [("grpo", "--reward_funcs length"), ("gkd", "--teacher_model t")])
def test_long_completions_get_room_for_prompts(task: str, needed: str) -> None:
    given = [*GIVEN, *needed.split(), "--max_completion_length", "4096"]
    cfg = load_config(task, given, environ={})
    assert cfg.data.max_length == 4096 + 2048 and any("room for prompts" in n for n in cfg.notices)
    cfg = load_config(task, [*given, "--max_length", "1024"], environ={})
    assert cfg.data.max_length == 4096 + 1024 and any("is read as the limit of prompts" in n for n in cfg.notices)
    assert load_config(task, [*given, "--max_length", "5000"], environ={}).data.max_length == 5000


def test_options_of_vllm_are_answered_where_a_task_samples() -> None:
    words = [*GIVEN, "--teacher_model", "t", "--vllm_server_pass_dataset", "true"]
    with pytest.raises(ConfigError) as caught:
        load_config("gkd", words, environ={})
    assert "samples nothing" not in str(caught.value)
    with pytest.raises(ConfigError, match="samples nothing"):
        load_config("sft", [*GIVEN, *words[-2:]], environ={})


@pytest.mark.parametrize("stage", ["dpo", "kto", "pt", "rm", "ppo", "sft"])
def test_a_stage_is_the_task(stage: str) -> None:
    """As LLaMA-Factory's files name it."""
    extra = ["--reward_model", "r"] if stage == "ppo" else []
    batch = ["--per_device_train_batch_size", "4"]
    assert load_config(None, [*GIVEN, "--stage", stage, *extra, *batch], environ={}).task == stage


def test_an_option_without_effect_may_hold_names_with_values(tmp_path: Path) -> None:
    """`gradient_checkpointing_kwargs: {use_reentrant: false}` is no section, in YAML or JSON."""
    for name in ("run.yaml", "run.json"):
        (tmp_path / name).write_text('{"model": "m", "dataset": "d", "gradient_checkpointing_kwargs": {"a": false}}')
        assert "gradient_checkpointing_kwargs" in " ".join(
            load_config("sft", [str(tmp_path / name)], environ={}).notices
        )


@pytest.mark.parametrize(
    ("name", "option"),
    [("freeze_vision_tower", "freeze_vit"), ("enable_liger_kernel", "use_liger"), ("dataset_streaming", "streaming")],
)
def test_an_empty_entry_switches_nothing_on(name: str, option: str, tmp_path: Path) -> None:
    """Of an option under another toolkit's name, as of one under its own."""
    results = []
    for spelling in (name, option):
        (tmp_path / "run.yaml").write_text(f"model: m\ndataset: d\n{spelling}:\n")
        try:
            results.append(load_config("sft", [str(tmp_path / "run.yaml")], environ={}).value(option))
        except ConfigError as error:
            results.append(str(error).replace(spelling, option))
    assert results[0] == results[1] and results[0] is not True


def test_a_warmup_of_a_constant_schedule_is_a_share_of_lr_decay_iters() -> None:
    words = [*GIVEN, "--lr_scheduler_type", "constant", "--lr_decay_iters", "1000", "--warmup_ratio", "0.1"]
    assert load_config("sft", words, environ={}).schedule.lr_decay_iters == 1000


def test_one_key_of_accelerate_in_an_options_file(tmp_path: Path) -> None:
    """The file stays one of options, and the key is what is wrong with it."""
    (tmp_path / "run.yaml").write_text("model: m\ndataset: d\ndistributed_type: MULTI_GPU\n")
    with pytest.raises(ConfigError) as caught:
        load_config("sft", [str(tmp_path / "run.yaml")], environ={})
    assert "distributed_type" in str(caught.value) and "model: m would be ignored" not in str(caught.value)


def test_a_folder_of_data_sets(tmp_path: Path) -> None:
    """LLaMA-Factory's folder of entries, beside their names; by itself a folder of data files."""
    assert load_config("sft", ["--model", "m", "--dataset_dir", "d"], environ={}).data.dataset == ("d",)
    (tmp_path / "run.yaml").write_text("model: m\ntrain_data: identity\ndataset_dir: data\n")
    for words in ([*GIVEN, "--dataset_dir", "data"], [str(tmp_path / "run.yaml")]):
        with pytest.raises(ConfigError, match="not entries of LLaMA-Factory's dataset_info.json"):
            load_config("sft", words, environ={})


def test_a_file_without_sharding_beside_use_fsdp(tmp_path: Path) -> None:
    """NO_SHARD is DDP, as a word and in a file."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_sharding_strategy": "NO_SHARD"}')
    for words in (["--fsdp", "no_shard"], ["--fsdp_config", str(tmp_path / "fsdp.json")]):
        assert load_config("sft", [*GIVEN, "--use_fsdp", "true", *words], environ={}).engine.engine == "ddp"


def test_options_of_a_teacher() -> None:
    words = [
        "--teacher_deepspeed",
        "zero3_offload",
        "--loss_top_k",
        "8",
        "--loss_add_tail",
        "true",
        "--teacher_tag_key",
        "dataset",
    ]
    given = ["--model", "m", "--teacher_model", "t", "--deepspeed", "zero3", "--dataset", "d.jsonl", *words]
    cfg = load_config("gkd", given, environ={})
    assert cfg.distillation.gkd_logits_topk == 8
    assert "its weights stay on the devices" in " ".join(cfg.notices)

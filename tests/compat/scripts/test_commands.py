"""Commands of other toolkits in megaswift's options: the file means what the command meant there.

Covers: megaswift/compat/scripts/migrated_run.py, megaswift/compat/scripts/meanings.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.errors import ConfigError
from tests.compat.scripts.translated import loaded, translated

COMMANDS = {
    "ms-swift, adapters": (
        "sft",
        "swift sft",
        "--model some/model --tuner_type lora --dataset a.jsonl#500 b.jsonl --torch_dtype bfloat16 "
        "--num_train_epochs 1 "
        "--per_device_train_batch_size 2 --learning_rate 2e-4 --lora_rank 4 --lora_alpha 8 --lora_dropout 0.1 "
        "--target_modules all-linear --gradient_accumulation_steps 8 --save_steps 50 --logging_steps 2 "
        "--max_length 512 "
        "--warmup_ratio 0.05 --output_dir out --use_hf true --strict true --ddp_timeout 60 "
        "--gradient_checkpointing false --load_from_cache_file true --save_safetensors true --add_version false",
    ),
    "ms-swift on Megatron": (
        "sft",
        "megatron sft",
        "--model some/model --save_safetensors true --dataset a.jsonl --tensor_model_parallel_size 2 "
        "--sequence_parallel true --micro_batch_size 2 --global_batch_size 16 --recompute_granularity full "
        "--recompute_method uniform --recompute_num_layers 1 --num_train_epochs 2 --finetune true "
        "--cross_entropy_loss_fusion true --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 --max_length 2048 "
        "--save_steps 100 --logging_steps 1 --moe_aux_loss_coeff 0.01 --dataloader_num_workers 2 --loss_scale default "
        "--strict true --use_hf true --ddp_timeout 60 --output_dir out --add_version false",
    ),
    "ms-swift, preferences": (
        "dpo",
        "swift rlhf",
        "--rlhf_type dpo --model some/model --tuner_type full --dataset a.jsonl --beta 0.2 --rpo_alpha 0.1 --loss_type "
        "sigmoid --max_length 1024 --gradient_accumulation_steps 4 --num_train_epochs 1 --gradient_checkpointing true "
        "--save_steps 9 --logging_steps 1 --strict true --use_hf true --packing false --ddp_timeout 60 "
        "--output_dir out --add_version false",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_where_nothing_is_left_open_the_file_is_the_command_typed_here(name: str, tmp_path: Path) -> None:
    """The same words as options of megaswift are the other way to the configuration."""
    task, program, words = COMMANDS[name]
    run = translated(f"NPROC_PER_NODE=4 {program} {words}", tmp_path)
    assert run.open == [] and not any(o.of_default for o in run.options.values())
    typed = load_config(None if "rlhf" in program else task, words.split(), environ={})
    file = loaded(run, tmp_path)
    assert file.task == typed.task == task and run.launch == {"nproc_per_node": "4"}
    assert {n for n in OPTIONS if file.value(n) != typed.value(n)} == set()
    assert not [n for n in file.notices if "is an option name of" in n]


def test_defaults_of_ms_swift_are_written_out(tmp_path: Path) -> None:
    run = translated("NPROC_PER_NODE=2 swift sft --model m/n --tuner_type lora --dataset d.jsonl", tmp_path)
    c = loaded(run, tmp_path)
    assert c.value("num_train_epochs") == 3 and c.value("recompute_granularity") == "full"
    assert c.value("gradient_accumulation_steps") == 8, "16 rows over 2 processes"
    assert (c.value("lora_dropout"), c.value("save_steps"), c.value("logging_steps")) == (0.05, 500, 5)
    assert c.value("strict") is False and c.value("use_hf") is False
    assert [line.split(":")[0] for line in run.open] == ["max_length is not given"]
    here = "at the end; every 30 minutes in a run of over an hour"
    assert run.options["save_steps"].comment == f"default of ms-swift: 500; here: {here}"


@pytest.mark.parametrize(
    ("command", "adds"),
    [
        ("swift sft --output_dir out", True),
        ("megatron sft --save out", True),
        ("swift sft --output_dir out --add_version false", False),
    ],
)
def test_each_run_of_an_ms_swift_script_has_a_folder_of_its_own(command: str, adds: bool, tmp_path: Path) -> None:
    """Also below a folder that the script names: a second run is not refused."""
    c = loaded(translated(f"{command} --model m --dataset d.jsonl", tmp_path), tmp_path)
    assert (c.value("output_dir"), c.value("add_version")) == ("out", adds)


def test_the_length_of_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    run = translated(f"swift sft --model {tmp_path} --dataset d.jsonl --tuner_type full", tmp_path)
    assert run.open == [] and loaded(run, tmp_path).value("max_length") == 4096
    assert "use_hf" not in run.options, "no hub is asked for a folder"


def test_the_length_of_reinforcement_learning_is_the_prompt_s(tmp_path: Path) -> None:
    words = "--rlhf_type grpo --model m --dataset d --reward_funcs format --num_generations 4 --max_length 1000"
    run = translated(f"swift rlhf {words} --max_completion_length 300", tmp_path)
    c = loaded(run, tmp_path)
    assert c.value("max_length") == 1300 and "1000" in run.options["max_length"].comment
    assert (c.value("beta"), c.value("loss_type"), c.value("temperature")) == (0.04, ("grpo",), 0.9)
    assert loaded(translated(f"swift rlhf {words}", tmp_path), tmp_path).value("max_length") == 1512


def test_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    words = {
        "--interleave_prob": "0.5",
        "--load_from_cache_file": "true",
        "--model": "$MODEL",
        "--dataset": "d.jsonl",
        "--cross_entropy_loss_fusion": "false",
        "--learning_rate": "fast",
        "--eval_steps": "3",
        "--no_such_option": "1",
        "--torch_dtype": "bf16",
        "--sleep_level": "1",
    }
    run = translated("swift sft " + " ".join(f"{n} {v}" for n, v in words.items()), tmp_path)
    loaded(run, tmp_path)
    for name in words:
        own = NAMES.get(name[2:], name[2:])
        places = [own in run.options, *(name in x or f"{own}: " in x for x in (*run.open, *run.left_out))]
        assert sum(places) >= 1, name
    assert any("$MODEL" in line and "does not set" in line for line in run.open)
    assert any(line.startswith("--learning_rate fast: must be a number") for line in run.open)
    assert any("--no_such_option 1" in line and "megaswift sft --help" in line for line in run.open)
    assert any(line.startswith("--eval_steps 3: needs evaluation data") for line in run.left_out)


def test_what_the_rules_refuse_is_a_question_and_the_rest_loads(tmp_path: Path) -> None:
    run = translated(
        "swift sft --model m --dataset d --tuner_type full --lora_rank 4 --streaming true --packing true", tmp_path
    )
    c = loaded(run, tmp_path)
    assert "lora_rank" not in run.options and any("--lora_rank 4: would be ignored" in line for line in run.open)
    assert any("max_steps is required" in line for line in run.open) and c.value("packing") is True


@pytest.mark.parametrize("spelling", ["--save_safetensors false", "--save-safetensors False"])
def test_files_that_no_engine_writes_are_asked_as_the_loader_asks(spelling: str, tmp_path: Path) -> None:
    """`export_hf: false` alone would be accepted: it asks for fewer files, not for pickled ones."""
    words = f"--model m --dataset d --tuner_type full {spelling} --deepspeed zero2"
    with pytest.raises(ConfigError) as refused:
        load_config("sft", words.split(), environ={})
    (problem,) = refused.value.problems
    run = translated(f"swift sft {words}", tmp_path)
    assert "export_hf" not in run.options and loaded(run, tmp_path).value("export_hf") is True
    assert any(line.startswith(f"{spelling}: ") and problem.rule in line for line in run.open)
    run = translated(f"megatron sft --model m --dataset d {spelling}", tmp_path)
    assert loaded(run, tmp_path).value("export_hf") is False and not any("safetensors" in line for line in run.open)


def test_a_task_that_is_not_here(tmp_path: Path) -> None:
    run = translated("swift rlhf --rlhf_type ppo_v2 --model m --dataset d", tmp_path)
    assert run.task is None and "megaswift ppo" in run.open[0]


def test_switches_with_no(tmp_path: Path) -> None:
    run = translated("trl sft --model_name_or_path m --dataset_name d --no_gradient_checkpointing --no_bf16", tmp_path)
    assert loaded(run, tmp_path).value("recompute_granularity") is None
    assert "gradient_checkpointing" not in " ".join(o.name for o in run.options.values())


def test_megatron_lm(tmp_path: Path) -> None:
    script = """
GPUS=4
ARGS=(--nproc_per_node $GPUS --nnodes 2 --node_rank $RANK --master_addr $HOST --master_port 6000)
MODEL=(--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024)
torchrun ${ARGS[@]} pretrain_gpt.py ${MODEL[@]} --micro-batch-size 4 --global-batch-size 64 --lr 1.5e-4 \\
    --train-iters 500 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --fp16 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-path data/meg_text_document \\
    --tokenizer-type GPT2BPETokenizer --save out --log-interval 10 --save-interval 100 --eval-iters 10
"""
    run = translated(script, tmp_path)
    c = loaded(run, tmp_path)
    assert (c.task, c.value("max_length"), c.value("max_steps"), c.value("learning_rate")) == ("pt", 1024, 500, 1.5e-4)
    assert (c.value("tensor_parallel_size"), c.value("pipeline_parallel_size")) == (2, 2)
    assert c.value("torch_dtype") == "float16" and c.value("packing") and c.value("truncation_strategy") == "split"
    assert (c.value("adam_beta2"), c.value("weight_decay"), c.value("sequence_parallel")) == (0.999, 0.1, False)
    assert run.launch["nnodes"] == "2" and run.launch["node_rank"] == "$RANK" and run.launch["nproc_per_node"] == "4"
    text = "\n".join(run.open)
    assert "data/meg_text_document" not in text and "--num-layers" not in text
    assert c.value("dataset") == ("data/meg_text_document",)
    sizes = {"num_layers": "12", "hidden_size": "512", "num_attention_heads": "8", "max_position_embeddings": "1024"}
    assert c.value("megatron_architecture") == sizes


def test_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n")
    words = (
        f"--stage dpo --model_name_or_path m --do_train --finetuning_type lora --lora_rank 4 --lora_target all "
        f"--pref_beta 0.3 --pref_loss hinge --dataset {tmp_path / 'd.jsonl'} --cutoff_len 700 --bf16 true "
        "--preprocessing_num_workers 3 --output_dir o --gradient_accumulation_steps 2 "
        "--disable_gradient_checkpointing true"
    )
    run = translated(f"llamafactory-cli train {words}", tmp_path)
    c = loaded(run, tmp_path)
    assert (c.task, c.value("beta"), c.value("loss_type"), c.value("max_length")) == ("dpo", 0.3, ("hinge",), 700)
    assert (c.value("lora_alpha"), c.value("learning_rate"), c.value("lr_scheduler_type")) == (8, 5e-5, "linear")
    assert c.value("recompute_granularity") is None and c.value("target_modules") == ("all-linear",)
    assert c.value("dataset_num_proc") == 3 and run.open == []
    run = translated(f"llamafactory-cli train {words.replace('hinge', 'simpo')}", tmp_path)
    assert run.task == "simpo"
    run = translated("llamafactory-cli train --stage sft --model_name_or_path m --dataset identity", tmp_path)
    assert any("dataset_info.json" in line for line in run.open)


# ---- TRL's own parser as the oracle

TRL_COMMANDS = {
    "sft": "--model_name_or_path m --dataset_name d --output_dir o --num_train_epochs 2 --warmup_steps 0.1",
    "dpo": "--model_name_or_path m --dataset_name d --beta 0.3 --per_device_train_batch_size 2 --max_length 300",
    "grpo": "--model_name_or_path m --dataset_name d --reward_funcs f.py:f --num_generations 4 --use_vllm true "
    "--vllm_mode colocate --learning_rate 1e-5 --lr_scheduler_type cosine --max_completion_length 128",
    "kto": "--model_name_or_path m --dataset_name d --use_peft --lora_r 32 --lora_alpha 16 --weight_decay 0.05",
    "reward": "--model_name_or_path m --dataset_name d --max_grad_norm 0.5 --adam_beta2 0.9 --use_peft",
}
SPELLED = {"recompute_granularity": {True: "full", False: None}, "report_to": {"none": ()}}
WITHOUT_MEANING = {
    "optimizer": "adamw_torch_fused is Adam",
    "gradient_accumulation_steps": "unset: 1, or what a generation needs",
    "per_device_eval_batch_size": "the loss of an evaluation is a mean over its tokens",
    "rollout_server_timeout": "how long a server is waited for",
    "log_completions": "what is written beside the run",
    "dataset_num_proc": "how many processes tokenize",
    "torch_dtype": "TRL keeps float32 weights under bfloat16's autocast; here the engine keeps them",
    "galore_target_modules": "of GaLore only",
    "torch_compile_backend": "of torch.compile only",
    "reward_funcs": "not an option of the configuration there",
    "rollout_backend": "two options there",
    "importance_sampling_clip_max": "deprecated there for the other name, which is compared",
    "importance_sampling_correction": "unset here: on where a sampler of its own needs it",
    "use_bias_correction_kl": "unset here: on where a sampler of its own needs it",
    "num_generations": "unset here",
    "generation_batch_size": "unset here: a step's completions, as there",
    "steps_per_generation": "unset here: a step's micro-batches, as there",
    "fsdp": "none in both",
    "model": "in the script's arguments",
    "output_dir": "each has its own",
    "model_revision": "main",
    "attn_impl": "each library's own choice",
}


@pytest.mark.parametrize("command", TRL_COMMANDS)
def test_a_migrated_run_has_trl_s_values(command: str, tmp_path: Path) -> None:
    """Every field of TRL's own configuration of this command line that is an option here."""
    import transformers
    import trl

    classes = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "grpo": trl.GRPOConfig, "kto": trl.KTOConfig}
    own = classes.get(command, trl.RewardConfig)
    words = [*TRL_COMMANDS[command].split()]
    theirs_words = [*words, *(["--output_dir", str(tmp_path)] if "--output_dir" not in words else []), "--use_cpu"]
    if command == "grpo":
        at = theirs_words.index("--reward_funcs")
        del theirs_words[at : at + 2]
    parser = transformers.HfArgumentParser((trl.ScriptArguments, own, trl.ModelConfig))
    _, theirs, model = parser.parse_args_into_dataclasses(theirs_words)
    run = translated(f"trl {command} " + " ".join(words), tmp_path)
    c = loaded(run, tmp_path)
    compared = 0
    for record in (theirs, model):
        for field in dataclasses.fields(record):
            name = NAMES.get(field.name)
            adapters = name is not None and OPTIONS[name].section in ("lora", "quantization", "peft")
            if name is None or name in WITHOUT_MEANING or (adapters and c.value("train_type") == "full"):
                continue
            value = getattr(record, field.name)
            if _same(name, value, c.value(name)):
                compared += 1
            else:
                assert value is None or not OPTIONS[name].belongs_to(c.task) or _derived(name, c), (name, value)
    assert compared > 20
    if "warmup_steps" in " ".join(words):
        assert c.value("warmup_ratio") == 0.1


def _same(name: str, theirs: Any, ours: Any) -> bool:
    expected = SPELLED.get(name, {}).get(theirs, theirs) if isinstance(theirs, str | bool) else theirs
    expected = getattr(expected, "value", expected)
    if isinstance(ours, tuple) and not isinstance(expected, tuple):
        expected = tuple(expected) if isinstance(expected, list) else (expected,)
    return bool(expected == ours)


def _derived(name: str, c: Any) -> bool:
    """Left to a default that other options decide, the same in both."""
    neutral = {"loss_type": ((),), "beta": (None,), "max_steps": (None,), "warmup_steps": (0, None), "packing": (None,)}
    neutral |= {"eval_strategy": (None,), "save_strategy": (None,)}  # eval_steps and save_steps decide
    neutral["padding_free"] = (None, False)  # the loss is the same
    neutral["hub_strategy"] = ("end",)  # nothing is uploaded
    return c.value(name) in neutral.get(name, ()) and name not in c.given

"""The command line goes over the file: what contradicts it there is dropped with a notice.

Covers: megaswift/config/precedence.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.config.precedence import SAME_THING
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.engine.options.engine_checks import filled_deepspeed_config
from megaswift.errors import ConfigError


def run(folder: Path, text: str, words: str, task: str = "sft") -> SwiftConfig:
    (folder / "run.yaml").write_text(text)
    return load_config(task, [str(folder / "run.yaml"), *words.split()], environ={})


def refused(folder: Path, text: str, words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run(folder, text, words)
    return str(caught.value)


DROPPED = [
    ("num_train_epochs: 3\n", "--max_steps 1", ["num_train_epochs"]),
    ("max_steps: 9\n", "--num_train_epochs 2", ["max_steps"]),  # the idle one is the newer
    ("warmup_steps: 9\n", "--warmup_ratio 0.1", ["warmup_steps"]),
    ("split_dataset_ratio: 0.1\n", "--val_dataset v", ["split_dataset_ratio"]),
    ("val_dataset: v\n", "--split_dataset_ratio 0.1", ["val_dataset"]),
    ("val_dataset: v\neval_steps: 5\n", "--val_dataset none", ["eval_steps"]),
    ("engine: fsdp2\n", "--deepspeed zero2", ["engine"]),
    ("engine: fsdp2\nfsdp: full_shard\n", "--engine ddp", ["fsdp"]),
    ("tp: 2\npp: 2\n", "--engine ddp", ["tensor_parallel_size", "pipeline_parallel_size"]),
    ("train_type: lora\nlora_rank: 4\n", "--train_type full", ["lora_rank"]),
    ("gbs: 64\n", "--gradient_accumulation_steps 2", ["global_batch_size"]),
    ("gradient_accumulation_steps: 2\n", "--gbs 64", ["gradient_accumulation_steps"]),
    ("save_steps: 5\nsave_total_limit: 2\n", "--save_strategy no", ["save_steps", "save_total_limit"]),
    ("merge_lora: true\ntrain_type: lora\n", "--export_hf false", ["merge_lora"]),
    ("warmup_steps: 50\n", "--max_steps 3", ["warmup_steps"]),
    ("lr_warmup_init: 1e-6\nwarmup_steps: 3\n", "--lr_warmup_init_ratio 0.1", ["lr_warmup_init"]),
    ("min_lr_ratio: 0.1\n", "--min_lr 1e-6", ["min_lr_ratio"]),
    ("lr_scheduler_type: wsd\nwsd_decay_steps: 2\n", "--wsd_decay_ratio 0.2", ["wsd_decay_steps"]),
    ("val_dataset: v\neval_strategy: epoch\n", "--eval_steps 5", ["eval_strategy"]),
    ("save_strategy: no\n", "--save_steps 5", ["save_strategy"]),
    ("export_hf: false\n", "--push_to_hub true", ["export_hf"]),
    ("add_version: true\n", "--overwrite_output_dir true", ["add_version"]),
    ("group_by_length: true\n", "--shuffle false", ["group_by_length"]),
    ("engine: ddp\n", "--fsdp full_shard", ["engine"]),
    ("engine: fsdp2\nfsdp: auto_wrap\n", "--deepspeed zero3", ["engine", "fsdp"]),
    ("use_fsdp: true\n", "--engine ddp", ["use_fsdp"]),
    (
        "engine: fsdp2\nfsdp_min_num_params: 9\n",
        "--fsdp_transformer_layer_cls_to_wrap L",
        ["fsdp_min_num_params"],
    ),
    ("nproc_per_node: 2\n", "--num_workers 2 --launcher ray", ["nproc_per_node"]),
    ("pp: 2\nfirst_stage_layers: 1\n", "--pipeline_layout E|t*2|L", ["first_stage_layers"]),
    ("moe_grouped_gemm: false\n", "--moe_grouped_gemm_impl transformer_engine", ["moe_grouped_gemm"]),
    (
        "engine: ddp\ntorch_compile: true\ntorch_compile_mode: reduce-overhead\n",
        "--torch_compile_backend eager",
        ["torch_compile_mode"],
    ),
    ("engine: ddp\ntrain_type: boft\nboft_block_size: 4\n", "--boft_block_num 2", ["boft_block_size"]),
]


@pytest.mark.parametrize("text, words, dropped", DROPPED, ids=[words for _, words, _ in DROPPED])
def test_the_file_s_option_goes(tmp_path: Path, text: str, words: str, dropped: list[str]) -> None:
    cfg = run(tmp_path, text, words)
    told = [notice for notice in cfg.notices if "not used" in notice]
    assert not cfg.given & set(dropped) and len(told) == len(dropped)
    assert all("run.yaml:" in notice and "is not used because of --" in notice for notice in told), told
    derived = {"add_version"}  # from the other options
    assert all(cfg.value(name) == OPTIONS[name].default for name in dropped if name not in derived)


def test_every_group_of_options_that_state_one_thing_has_a_case(tmp_path: Path) -> None:
    """The batch of a generation is of another task; it stands below."""
    pairs = [
        (NAMES[w.split()[0]], NAMES[line.split(":")[0]])
        for text, words, _ in DROPPED
        for w in words.split("--")[1:]
        for line in text.splitlines()
    ]
    without = [group for group in SAME_THING if not any(a != b and {a, b} <= {*group} for a, b in pairs)]
    assert without == [("generation_batch_size", "steps_per_generation")]
    cfg = run(tmp_path, "num_generations: 2\ngeneration_batch_size: 8\n", "--steps_per_generation 2", "grpo")
    assert cfg.rl.generation_batch_size is None and cfg.rl.steps_per_generation == 2


def test_what_the_file_says_beside_it_stays(tmp_path: Path) -> None:
    cfg = run(tmp_path, "num_train_epochs: 3\nlr: 1e-4\nwarmup_ratio: 0.1\n", "--max_steps 1")
    assert cfg.optim.learning_rate == 1e-4 and cfg.schedule.warmup_ratio == 0.1 and cfg.train.max_steps == 1


@pytest.mark.parametrize(
    "text, words, part",
    [
        (
            "train_type: lora\n",
            "--random_init true",
            "--random_init true: adapters on random weights",
        ),  # another run without it
        ("engine: ddp\n", "--tp 2", "--tp 2: would be ignored: applies only to --engine megatron"),
        ("train_type: full\nlora_rank: 2\n", "--lr 1e-4", "lora_rank: 2: would be ignored"),  # both the file's
        ("gbs: 7\n", "--micro_batch_size 2", "gbs: 7: is not a multiple"),
        ("optimizer: muon\n", "--deepspeed zero3", "optimizer: muon: ZeRO supports only adam"),
        ("packing: true\n", "--cuda_graph_impl local", "--cuda_graph_impl local"),  # neither says what the other does
        ("", "--train_type full --lora_rank 2", "--lora_rank 2: would be ignored"),
    ],
)
def test_what_is_refused_still(tmp_path: Path, text: str, words: str, part: str) -> None:
    assert part in refused(tmp_path, text, words)


def test_none_takes_a_file_s_number_back(tmp_path: Path) -> None:
    cfg = run(
        tmp_path, "num_train_epochs: 3\nlora_rank: 4\ntrain_type: lora\nlr: 3\n", "--num_train_epochs none --lr None"
    )
    assert (cfg.train.num_train_epochs, cfg.optim.learning_rate) == (1, 1e-4)
    assert cfg.given == {"train_type", "lora_rank"} and not [n for n in cfg.notices if "epochs" in n]
    assert run(tmp_path, "num_train_epochs: 3\n", "--num_train_epochs none --max_steps 2").train.max_steps == 2
    assert "must be true or false" in refused(tmp_path, "shuffle: true\n", "--shuffle none")


def test_python_s_options_go_over_a_configuration() -> None:
    cfg = SwiftConfig(num_train_epochs=3, lr=0.5).replace(max_steps=2)
    assert cfg.train.max_steps == 2 and "num_train_epochs" not in cfg.given and len(cfg.notices) == 1


def test_adapters_have_a_learning_rate_of_their_own() -> None:
    for words, rate in (
        ("", 1e-5),
        ("--train_type lora", 1e-4),
        ("--tuner_type dora", 1e-4),
        ("--train_type qlora", 1e-4),
    ):
        assert load_config("sft", words.split(), environ={}).optim.learning_rate == rate
    cfg = load_config("sft", ["--train_type", "boft", "--engine", "ddp"], environ={})
    assert cfg.optim.learning_rate == 1e-4 and cfg.replace(train_type="full", engine="ddp").optim.learning_rate == 1e-5
    assert load_config("sft", ["--train_type", "lora", "--lr", "1e-5"], environ={}).optim.learning_rate == 1e-5
    (notice,) = load_config("sft", ["--train_type", "lora"], environ={}).notices
    assert notice == "learning_rate 0.0001, the default with train_type lora (full: 1e-05)"


def test_a_notice_about_a_deepspeed_file_s_batch_does_not_contradict_its_refusal(tmp_path: Path) -> None:
    """The file's batch is compared with the run's, so a notice that it is not used would be wrong."""
    (tmp_path / "zero2.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"deepspeed: {tmp_path / 'zero2.json'}\nper_device_train_batch_size: 4\n")
    for words in (["--gradient_accumulation_steps", "8"], []):
        if not words:
            file.write_text(file.read_text() + "gradient_accumulation_steps: 8\n")
        config = load_config("sft", [str(file), *words], environ={})
        assert config.train.gradient_accumulation_steps == 8
        assert not [notice for notice in config.notices if "train_batch_size" in notice]
        refused = filled_deepspeed_config(config, 4, "float32", 64).problems
        assert [p.what.split('"')[1] for p in refused] == ["train_batch_size"] and "uses 128" in refused[0].rule
        assert filled_deepspeed_config(config, 1, "float32", 64).problems == ()

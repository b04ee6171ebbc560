"""Every option of a script is in the file that `megaswift migrate` writes, or named in its comments; the file loads.

Covers: megaswift/compat/scripts/shell_syntax.py, megaswift/compat/scripts/shell_words.py,
megaswift/compat/scripts/commands.py.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from megaswift.commands.migrate import main
from megaswift.compat.translation import RENAMED
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS

DOCUMENTED = json.loads((Path(__file__).parents[1] / "names/documented_names.json").read_text())
STARTS = {
    "swift sft": "ms-swift",
    "NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo": "ms-swift",
    "megatron sft": "Megatron-SWIFT",
    "torchrun --standalone --nproc_per_node 8 --rdzv_id 7 swift/cli/sft.py": "ms-swift",
    "accelerate launch --num_processes 4 --multi_gpu --mixed_precision bf16 trl/scripts/sft.py": "ms-swift",
    "deepspeed --num_gpus 2 --master_port 29501 train.py --model_name_or_path m/n": "ms-swift",
    "torchrun --nnodes 1 --master_port 6000 pretrain_gpt.py --micro-batch-size 1 --lr 1e-4": "Megatron-LM",
}
"""How a command begins, and whose options follow."""
BREAKS = (
    " \\\n    ",
    " \\  # {}\n    ",
    " \\ # {} 注释\n  ",
    " \\# {}\n  ",
    "\\ # {}\n  ",
    " \\   \n  ",
    " \\\r\n  ",
    " \\\n  # {}\n  ",
    " ",
    "\n  ",
    " \\\n\n  ",
)
"""What stands between two options. The last two lack a backslash."""
REMARKS = ("tensor parallel: 8", "--lr 5 was worse", 'it\'s "fine"', "x; y | z && w", "$(date) `id`")


def value_of(name: str, seed: random.Random) -> list[str]:
    known = OPTIONS.get(NAMES.get(RENAMED.get(name, name), ""))
    if known is None:
        return seed.choice([[], ["true"], ["3"], ["some/path"], ["a", "b"], ["$UNKNOWN"], ["'a b'"]])
    if known.details.get("choices"):
        return [str(seed.choice(list(known.details["choices"])))]
    by_kind = {"bool": [[], ["true"], ["false"]], "int": [["2"], ["$N"]], "float": [["0.1"], ["1e-5"]]}
    return seed.choice(by_kind.get(known.kind, [["some/path"], ["2"], ["auto"], ['"x y"']]))


def script(seed: random.Random, start: str) -> tuple[str, list[str]]:
    """A script of one command, and the options in it."""
    names = seed.sample(sorted(DOCUMENTED[STARTS[start]]), seed.randint(1, 60))
    names += seed.sample(names, min(len(names), 2))  # an option that is given twice
    text = f"#!/bin/bash\nexport N=4\n{start}"
    for name in names:
        flag = f"--{name.replace('_', '-')}" if seed.random() < 0.2 else f"--{name}"
        words = [flag, *value_of(name, seed)]
        if len(words) == 2 and seed.random() < 0.2:
            words = [f"{flag}={words[1]}"]
        text += seed.choice(BREAKS).replace("{}", seed.choice(REMARKS)) + " ".join(words)
    text += seed.choice(["\n", " \\  # end\n", " 2>&1 | tee train.log\n", " \\\n  > log &\nwait\n", ""])
    typed = re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", start)
    return text, [*(word.replace("-", "_") for word in typed), *names]


def lost(names: list[str], file: str) -> list[str]:
    """The options that a text names neither as they were typed nor as megaswift calls them."""
    words = {word.replace("-", "_") for word in re.findall(r"[\w-]+", file)}
    words |= {"num_processes"} if "NPROC_PER_NODE" in words else set()  # accelerate's name of it
    words |= {"rlhf_type"} if "task" in words else set()  # ms-swift's name of it
    words |= {word.strip("_") for word in words} | {word.lower() for word in words}
    return [name for name in names if not {name, NAMES.get(RENAMED.get(name, name))} & words]


@pytest.mark.wide
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("number", range(12))
def test_each_option_of_a_random_script_is_in_its_file(start: str, number: int, tmp_path: Path) -> None:
    text, names = script(random.Random(f"{start} {number}"), start)
    source, target = tmp_path / "train.sh", tmp_path / "run.yaml"
    source.write_text(text, newline="")
    assert main([str(source), "--output", str(target)]) in (0, 3)
    assert lost(names, target.read_text()) == [], text
    load_config(None, [str(target)], environ={})


GUIDE = """\
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    --tensor-model-parallel-size 8 \\      # TP
    --pipeline-model-parallel-size 4 \\    # PP 流水线并行
    --num-layers 80 \\ # layers
    --hidden-size 8192 \\
    --ffn-hidden-size 28672 \\ # wide
    --micro-batch-size 1 \\\t# per GPU
    --global-batch-size 1024 \\  # all of them
    --lr 1.5e-4 \\# rate
    --bf16   # last
"""
"""A command as guides print it: a comment behind each backslash."""


def test_a_comment_behind_each_backslash_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text(GUIDE)
    main([str(tmp_path / "pre.sh"), "--output", str(tmp_path / "run.yaml")])
    text = (tmp_path / "run.yaml").read_text()
    for line in (
        "tensor_parallel_size: 8",
        "pipeline_parallel_size: 4",
        "per_device_train_batch_size: 1",
        "global_batch_size: 1024",
        "learning_rate: 0.00015",
        "torch_dtype: bfloat16",
    ):
        assert line in text
    assert "hidden_size: '8192'" in text and "left no trace" not in text
    assert "num-layers" in text and "流水线" not in text and "unexpected argument" not in text


def test_options_of_a_launcher_that_the_script_does_not_set(tmp_path: Path) -> None:
    """Any program behind them is recognized, and the file says what it lacks."""
    (tmp_path / "pre.sh").write_text("torchrun $DISTRIBUTED_ARGS ${MORE} pretrain_gpt.py --seq-length 4096 --bf16\n")
    assert main([str(tmp_path / "pre.sh"), "--output", str(tmp_path / "run.yaml")]) == 3
    text = (tmp_path / "run.yaml").read_text()
    assert "(Megatron-LM)" in text and "max_length: 4096" in text and "torch_dtype: bfloat16" in text
    assert "$DISTRIBUTED_ARGS, $MORE: not set in the script" in text


def test_a_missing_backslash_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("swift sft --model m/n \\\n\n  --dataset d.jsonl\n  --lora_rank 4\n")
    assert main([str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml")]) == 3
    text = (tmp_path / "run.yaml").read_text()
    assert "--lora_rank 4" in text and "no backslash before line 3, 4, which begins with an option" in text


def test_an_option_given_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("swift sft --model m/n --dataset d.jsonl --lr 1e-4 --learning_rate 2e-5\n")
    main([str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml")])
    text = (tmp_path / "run.yaml").read_text()
    assert "learning_rate: 2.0e-05" in text and "- --lr 1e-4: --learning_rate 2e-5 comes later" in text


def test_a_foreign_checkpoint_is_converted_first(tmp_path: Path) -> None:
    """`megaswift convert megatron-to-hf` reads checkpoints of both."""
    for start in ("pretrain_gpt.py --micro-batch-size 1 --lr 1e-4", "megatron sft --model m/n"):
        (tmp_path / "run.sh").write_text(f"{'torchrun ' * start.startswith('pre')}{start} --load /checkpoint\n")
        main([str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml"), "--overwrite"])
        text = (tmp_path / "run.yaml").read_text()
        line = next(line for line in text.splitlines() if "--load /checkpoint" in line)
        assert "megaswift convert megatron-to-hf DIR MODEL --hf_config HF" in line
        assert "resume_from_checkpoint" not in text


def test_workers_of_megatron_s_loader_are_not_ray_s(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "megatron sft --model m/n --dataset d.jsonl --num_workers 8 --load_safetensors true\n"
    )
    main([str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml")])
    text = (tmp_path / "run.yaml").read_text()
    assert "dataloader_num_workers: 8" in text and not re.search(r"^num_workers", text, re.M)
    assert "load_safetensors" in text and "is not an option" not in text


def test_a_command_without_counterpart_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("swift sft --model m/n --dataset d.jsonl\nswift web-ui --lang zh\n")
    assert main([str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml")]) == 3
    assert "run.sh:2: not translated: ms-swift web-ui: is not a command here" in capsys.readouterr().err

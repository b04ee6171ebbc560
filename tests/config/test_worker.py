"""What workers of torchrun, accelerate and DeepSpeed's launcher are recognised by, and the word that the last adds."""

from __future__ import annotations

import pytest

from megaswift.config import load
from megaswift.config.worker import accelerate_engines, accelerate_notices, is_worker, started, without_local_rank
from megaswift.errors import ConfigError

IDENTITY = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHRUN = IDENTITY | {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "5", "TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "OMP_NUM_THREADS": "1"}
DEEPSPEED = IDENTITY | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "4"}
"""As the three set them: torch 2.13, accelerate 1.15, DeepSpeed 0.19.8."""
ALONE = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""`accelerate launch --cpu --num_processes 2`."""


@pytest.mark.parametrize("environ", [TORCHRUN, ACCELERATE, DEEPSPEED])
def test_workers_of_three_launchers(environ: dict[str, str]) -> None:
    assert is_worker(environ) and started("nproc_per_node", environ) == 4 and started("nnodes", environ) == 2
    assert load("sft", [], environ={**environ, "NPROC_PER_NODE": "7"}).launch.nproc_per_node is None
    assert not accelerate_engines(environ) and not accelerate_notices(environ, alone=True, dtype_said=False)


@pytest.mark.parametrize("environ", [{}, ALONE, {"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}])
def test_what_is_no_worker(environ: dict[str, str]) -> None:
    assert not is_worker(environ) and started("nproc_per_node", environ) is started("nnodes", environ) is None


@pytest.mark.parametrize("said", ["--local_rank=1", "--local-rank=1", "--local_rank 1", "--local-rank 1", "--local_rank -1"])
def test_the_launcher_s_word_is_taken_wherever_it_stands(said: str) -> None:
    rest = ["run.yaml", "--lr", "1e-4"]
    for words in ([*said.split(), *rest], [*rest, *said.split()]):
        assert without_local_rank(words, DEEPSPEED) == rest
    assert without_local_rank(rest, {}) == without_local_rank(["--local_rank", "0", *rest], {}) == rest


@pytest.mark.parametrize("said, environ, part", [
    (["--local_rank=2"], DEEPSPEED, "--local_rank 2: the launcher has set LOCAL_RANK=1"),
    (["--local-rank", "3"], {}, "--local-rank 3: no launcher started this process"),
    (["--local_rank", "0"], DEEPSPEED, "--local_rank 0: the launcher has set"),
    (["--local_rank"], DEEPSPEED, "--local_rank: the launcher has set"),
])
def test_a_local_rank_that_is_another(said: list[str], environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        without_local_rank(["run.yaml", *said], environ)
    assert part in str(caught.value)


@pytest.mark.parametrize("name, flag", [("DEEPSPEED", "deepspeed"), ("FSDP", "fsdp"), ("MEGATRON_LM", "megatron_lm")])
def test_engines_asked_of_accelerate(name: str, flag: str) -> None:
    (problem,) = accelerate_engines(ACCELERATE | {f"ACCELERATE_USE_{name}": "true"})
    assert problem.what == f"accelerate launch --use_{flag}" and "--multi_gpu" in problem.fix
    assert not accelerate_engines(ACCELERATE | {f"ACCELERATE_USE_{name}": "false"})


def test_accelerate_s_words_without_effect_are_said() -> None:
    (one,) = accelerate_notices(ALONE, alone=True, dtype_said=False)
    assert "accelerate started one process" in one
    assert not accelerate_notices(ALONE, alone=False, dtype_said=False) and not accelerate_notices({"MASTER_PORT": "1"}, True, False)
    (half,) = accelerate_notices(ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"}, alone=True, dtype_said=False)
    assert "--mixed_precision bf16 has no effect" in half
    assert not accelerate_notices(ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"}, alone=True, dtype_said=True)

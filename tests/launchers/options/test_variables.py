"""What workers of torchrun, accelerate and DeepSpeed's launcher are recognized by, and the word that the last adds."""

from __future__ import annotations

import pytest

from megaswift.compat.files.accelerate_launch import options_from_accelerate_environment
from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.launchers.options.variables import (
    is_launched_worker,
    nested_launcher_problems,
    nproc_or_nnodes_started_by_launcher,
    without_local_rank,
)

IDENTITY = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHRUN = IDENTITY | {
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RUN_ID": "none",
}
ACCELERATE = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "OMP_NUM_THREADS": "1"}
DEEPSPEED = IDENTITY | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "4"}
"""As the three set them: torch 2.13, accelerate 1.15, DeepSpeed 0.19.8."""
ALONE = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "no",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""`accelerate launch --cpu --num_processes 2`."""


@pytest.mark.parametrize("environ", [TORCHRUN, ACCELERATE, DEEPSPEED])
def test_workers_of_three_launchers(environ: dict[str, str]) -> None:
    assert (
        is_launched_worker(environ)
        and nproc_or_nnodes_started_by_launcher("nproc_per_node", environ) == 4
        and nproc_or_nnodes_started_by_launcher("nnodes", environ) == 2
    )
    assert load_config("sft", [], environ={**environ, "NPROC_PER_NODE": "7"}).launch.nproc_per_node is None
    assert (
        not options_from_accelerate_environment(environ).givens
        and not options_from_accelerate_environment(environ).problems
        and not nested_launcher_problems("torchrun", environ)
    )
    assert nested_launcher_problems("ray", environ) and not nested_launcher_problems(
        "ray", environ | {"MEGASWIFT_LAUNCHER": "ray"}
    )


@pytest.mark.parametrize("environ", [{}, ALONE, {"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}])
def test_what_is_no_worker(environ: dict[str, str]) -> None:
    assert (
        not is_launched_worker(environ)
        and nproc_or_nnodes_started_by_launcher("nproc_per_node", environ)
        is nproc_or_nnodes_started_by_launcher("nnodes", environ)
        is None
    )


@pytest.mark.parametrize(
    "said", ["--local_rank=1", "--local-rank=1", "--local_rank 1", "--local-rank 1", "--local_rank -1"]
)
def test_the_launcher_s_word_is_taken_wherever_it_stands(said: str) -> None:
    rest = ["run.yaml", "--lr", "1e-4"]
    for words in ([*said.split(), *rest], [*rest, *said.split()]):
        assert without_local_rank(words, DEEPSPEED) == rest
    assert without_local_rank(rest, {}) == without_local_rank(["--local_rank", "0", *rest], {}) == rest


@pytest.mark.parametrize(
    "said, environ, part",
    [
        (["--local_rank=2"], DEEPSPEED, "--local_rank 2: the launcher has set LOCAL_RANK=1"),
        (["--local-rank", "3"], {}, "--local-rank 3: no launcher started this process"),
        (["--local_rank", "0"], DEEPSPEED, "--local_rank 0: the launcher has set"),
        (["--local_rank"], DEEPSPEED, "--local_rank: the launcher has set"),
    ],
)
def test_a_local_rank_that_is_another(said: list[str], environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        without_local_rank(["run.yaml", *said], environ)
    assert part in str(caught.value)

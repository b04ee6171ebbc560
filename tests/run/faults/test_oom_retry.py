"""The smaller micro-batch, and when there is another attempt. Whole runs: test_fault_tolerance_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import EXIT_OOM_RETRY, UserError
from megaswift.launchers.options.variables import OOM_RETRY, RESTARTS
from megaswift.run.faults import oom_retry


@pytest.mark.parametrize(
    ("given", "dp", "expected"),
    [
        ({"per_device_train_batch_size": 4, "global_batch_size": 16}, 2, (2, 16)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 2, (2, 24)),
        ({"per_device_train_batch_size": 6}, 2, (3, 12)),
        ({"per_device_train_batch_size": 5, "global_batch_size": 10}, 1, (2, 10)),
        ({"per_device_train_batch_size": 9}, 1, (3, 9)),
        ({"per_device_train_batch_size": 7}, 1, (1, 7)),
        ({"per_device_train_batch_size": 1, "global_batch_size": 8}, 1, None),
    ],
)
def test_the_global_batch_stays(given: dict[str, int], dp: int, expected: tuple[int, int] | None) -> None:
    smaller = oom_retry.smaller_microbatch(SwiftConfig(task="sft", model="m", dataset=["d"], **given), dp)
    found = smaller and (smaller.train.per_device_train_batch_size, smaller.train.global_batch_size)
    assert found == expected


def test_the_next_attempt_reads_what_this_one_wrote(tmp_path: Path) -> None:
    cfg = SwiftConfig(task="sft", model="m", dataset=["d"], output_dir=str(tmp_path), per_device_train_batch_size=4)
    error = UserError("out of memory", "try")
    assert oom_retry.retry_after(error, cfg, 2, {}) is error, "nothing starts the processes again"
    assert oom_retry.retry_after(error, cfg.replace(oom_retry=False), 2, {OOM_RETRY: "1"}) is error
    retry = oom_retry.retry_after(error, cfg, 2, {OOM_RETRY: "1"})
    assert retry.exit_code == EXIT_OOM_RETRY
    assert json.loads((tmp_path / oom_retry.FILE).read_text()) == {
        "per_device_train_batch_size": 2,
        "max_tokens_per_batch": None,
        "global_batch_size": 8,
        "attempt": 0,
    }
    assert oom_retry.retry_after(error, cfg, 2, {OOM_RETRY: "1"}).exit_code == EXIT_OOM_RETRY, "of another rank"
    assert oom_retry.retry_after(error, cfg, 2, {OOM_RETRY: "1", RESTARTS: "1"}) is error, "once"
    assert oom_retry.config_of_retry(cfg, 2, {}) == cfg
    again = oom_retry.config_of_retry(cfg, 2, {RESTARTS: "1"})
    assert (again.train.per_device_train_batch_size, again.train.global_batch_size) == (2, 8)
    oom_retry.forget_earlier_retry(cfg, tmp_path, {RESTARTS: "1"})
    assert (tmp_path / oom_retry.FILE).is_file()
    oom_retry.forget_earlier_retry(cfg, tmp_path, {})
    assert oom_retry.config_of_retry(cfg, 2, {RESTARTS: "1"}) == cfg


def test_until_it_fits(tmp_path: Path) -> None:
    """`--auto_find_batch_size`: 8, 4, 2, 1, each attempt with the micro-batch of the one before, then the error."""
    given = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    asked = SwiftConfig(task="sft", model="m", dataset=["d"], output_dir=str(tmp_path), **given)
    error = UserError("out of memory", "try")
    found = []
    for attempt in range(4):
        environ = {OOM_RETRY: "1", RESTARTS: str(attempt)}
        cfg = oom_retry.config_of_retry(asked, 2, environ)
        found.append((cfg.train.per_device_train_batch_size, cfg.train.global_batch_size or 16))
        retry = oom_retry.retry_after(error, cfg, 2, environ)
    assert found == [(8, 16), (4, 16), (2, 16), (1, 16)] and retry is error


def test_a_resumed_run_keeps_what_was_found(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 8, "global_batch_size": 48, "auto_find_batch_size": True}
    asked = SwiftConfig(task="sft", model="m", dataset=["d"], output_dir=str(tmp_path), **given)
    oom_retry.retry_after(UserError("out of memory", "try"), asked, 2, {OOM_RETRY: "1"})
    resumed = asked.replace(resume_from_checkpoint="latest")
    oom_retry.forget_earlier_retry(resumed, tmp_path, {})

    def kept(cfg: SwiftConfig, dp: int) -> tuple[int, int | None]:
        train = oom_retry.config_of_retry(cfg, dp, {}).train
        return train.per_device_train_batch_size, train.global_batch_size

    assert kept(resumed, 2) == (4, 48)
    assert kept(resumed.replace(per_device_train_batch_size=2), 2) == (2, 48), "already smaller"
    assert kept(resumed.replace(per_device_train_batch_size=6), 4) == (4, 48)
    assert kept(resumed.replace(per_device_train_batch_size=6), 8) == (3, 48), "the largest that divides a rank's rows"
    assert kept(asked, 2) == (8, 48), "not resumed"
    assert kept(resumed.replace(auto_find_batch_size=False), 2) == (8, 48)
    oom_retry.forget_earlier_retry(asked, tmp_path, {})
    assert kept(resumed, 2) == (8, 48)


def test_a_limit_of_tokens_is_halved_to_a_whole_row(tmp_path: Path) -> None:
    given = {"max_length": 100, "max_tokens_per_batch": 350, "global_batch_size": 8, "auto_find_batch_size": True}
    asked = SwiftConfig(task="sft", model="m", dataset=["d"], output_dir=str(tmp_path), **given)
    error = UserError("out of memory", "try")
    found = []
    for attempt in range(3):
        environ = {OOM_RETRY: "1", RESTARTS: str(attempt)}
        cfg = oom_retry.config_of_retry(asked, 2, environ)
        found.append(cfg.data.max_tokens_per_batch)
        retry = oom_retry.retry_after(error, cfg, 2, environ)
    assert found == [350, 175, 100] and retry is error
    assert oom_retry.config_of_retry(asked, 2, {RESTARTS: "1"}).train == asked.train


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, False),
        ({OOM_RETRY: "1"}, True),
    ],
)
def test_who_starts_the_processes_again(environ: dict[str, str], expected: bool) -> None:
    assert oom_retry.is_started_again(environ) == expected

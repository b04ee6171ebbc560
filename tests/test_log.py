"""Words of messages, and what libraries may not put on the screen."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from importlib.metadata import version
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
from packaging.version import Version

from megaswift import log
from megaswift.log import NO_CUDA, NO_GPU, NO_KERNEL, NOTES_TO_CALLERS, LogFile, count_text, quiet_libraries


def test_an_amount_is_said_in_the_singular_where_it_reads_one() -> None:
    assert [
        count_text(1, "row"),
        count_text(2000, "row"),
        count_text(0, "row"),
        count_text(1, "process"),
        count_text(2, "process"),
    ] == [
        "1 row",
        "2,000 rows",
        "0 rows",
        "1 process",
        "2 processes",
    ]
    assert [count_text(0.99999, "epoch", ".4g"), count_text(0.5, "epoch", ".4g")] == ["1 epoch", "0.5 epochs"]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """The records that reach the root logger."""
    handler = BufferingHandler(100)
    logging.getLogger().addHandler(handler)
    yield handler.buffer
    logging.getLogger().removeHandler(handler)


def test_bitsandbytes_missing_kernel_is_not_told_and_everything_else_is(records: list[logging.LogRecord]) -> None:
    """The installed release still has this record, of this logger; others of the same logger pass."""
    spec = importlib.util.find_spec("bitsandbytes")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "backends" / "cpu" / "ops.py").read_text(encoding="utf-8")
    (message,) = re.findall(r'"(Failed to load CPU gemm_4bit_forward[^"]*)"', source)
    assert "logger = logging.getLogger(__name__)" in source
    quiet_libraries()
    quiet_libraries()
    logger = logging.getLogger(NO_KERNEL[0])
    logger.warning(message, ImportError("kernels"))
    logger.warning("something else: %s", 1)
    logger.warning(ValueError("an object as the message"))
    logging.getLogger("bitsandbytes").warning(message, ImportError("kernels"))
    assert [r.getMessage()[:14] for r in records] == ["something else", "an object as t", "Failed to load"]
    assert len(logger.filters) == 1


def test_deepspeed_line_about_a_machine_without_a_gpu_is_not_told(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's logger writes to standard output, which has results only. The release still has this record."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed")
    folder = Path(spec.origin).parent
    source = (folder / "accelerator" / "real_accelerator.py").read_text(encoding="utf-8")
    assert f'accel_logger.warning(\n                    "{NO_GPU[1]}.' in source
    assert f'create_logger(name="{NO_GPU[0]}"' in (folder / "utils" / "logging.py").read_text(encoding="utf-8")
    quiet_libraries()
    logger = logging.getLogger(NO_GPU[0])
    monkeypatch.setattr(logger, "propagate", True)  # DeepSpeed switches it off
    logger.warning(f"{NO_GPU[1]}. If you have GPU or other accelerator, we were unable to detect it.")
    logger.warning("something else")
    assert {r.getMessage() for r in records} == {"something else"}


@pytest.mark.parametrize(("name", "message"), NOTES_TO_CALLERS)
def test_megatron_core_notes_to_its_callers_are_not_told(
    name: str, message: str, records: list[logging.LogRecord]
) -> None:
    """Release 0.19 has these records; other records of the same loggers pass."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    site = Path(next(iter(spec.submodule_search_locations))).parent
    source = (site / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert message in source or Version(version("megatron-core")) < Version("0.19")
    quiet_libraries()
    logger = logging.getLogger(name)
    logger.warning(f"{message} and so on")
    logger.warning("something else")
    assert [r.getMessage() for r in records] == ["something else"]


def test_torch_line_about_a_machine_without_a_gpu_is_not_told(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release still has this record."""
    spec = importlib.util.find_spec(NO_CUDA[0])
    assert spec is not None and spec.origin is not None
    (message,) = re.findall(rf'logger.warning\("({NO_CUDA[1]}[^"]*)"', Path(spec.origin).read_text(encoding="utf-8"))
    quiet_libraries()
    logger = logging.getLogger(NO_CUDA[0])
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # torch switches it off
    logger.warning(message, "/usr/local/cuda")
    logger.warning("something else")
    assert [r.getMessage() for r in records] == ["something else"]


def test_the_log_file_has_every_message_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those before it was opened first; a second start goes on at the end; other ranks write nothing."""
    monkeypatch.setattr(log, "LOG_FILE", LogFile())
    path = tmp_path / "train.log"
    log.info("early\nof two lines")
    log.LOG_FILE.open(path)
    log.warn("late")
    log.print_result("made")
    log.LOG_FILE.close()
    monkeypatch.setenv("RANK", "1")
    log.info("of another rank")
    monkeypatch.setenv("RANK", "0")
    log.LOG_FILE.open(path)
    log.info("resumed")
    lines = path.read_text().splitlines()
    printed = capsys.readouterr()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[20:] for line in lines] == [
        "megaswift: early",
        "of two lines",
        "megaswift: warning: late",
        "megaswift: made",
        "megaswift: resumed",
    ]
    assert sorted(line[20:] for line in lines) == sorted((printed.err + printed.out).splitlines())
    for _ in range(log.EARLY_LINES + 5):
        log.LOG_FILE.close()
        log.LOG_FILE.write("x")
    assert len(log.LOG_FILE.early) == log.EARLY_LINES

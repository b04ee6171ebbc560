"""Environment variables of ms-swift that are not read."""

from __future__ import annotations

import contextlib

import pytest

from megaswift.cli import main
from megaswift.compat.variables import unread_variables_notices

NAMES = (
    "MAX_PIXELS MIN_PIXELS VIDEO_MAX_PIXELS VIDEO_MIN_PIXELS VIDEO_TOTAL_PIXELS IMAGE_MAX_TOKEN_NUM "
    "IMAGE_MIN_TOKEN_NUM VIDEO_MAX_TOKEN_NUM FPS FPS_MAX_FRAMES FPS_MIN_FRAMES SIZE_FACTOR IMAGE_FACTOR FRAME_FACTOR "
    "MAX_RATIO QWENVL_BBOX_FORMAT NCCL_TIMEOUT REASONING_EFFORT ASCEND_RT_VISIBLE_DEVICES INFONCE_TEMPERATURE "
    "INFONCE_USE_BATCH INFONCE_HARD_NEGATIVES INFONCE_MASK_FAKE_NEGATIVE INFONCE_FAKE_NEG_MARGIN INFONCE_INCLUDE_QQ "
    "INFONCE_INCLUDE_DD MAX_NEGATIVE_SAMPLES MAX_POSITIVE_SAMPLES LISTWISE_RERANKER_TEMPERATURE "
    "GENERATIVE_RERANKER_POSITIVE_TOKEN GENERATIVE_RERANKER_NEGATIVE_TOKEN"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_each_is_named(name: str) -> None:
    (text,) = unread_variables_notices({name: "1", "HOME": "/"})
    assert text.startswith(f"{name} (environment): is not read; ") and "HOME" not in text


def test_one_line_names_all() -> None:
    (text,) = unread_variables_notices({"MAX_PIXELS": "1", "FPS": "2"})
    assert text == "FPS, MAX_PIXELS (environment): are not read; give --video_fps 2 --max_pixels 1"
    (text,) = unread_variables_notices({"MIN_PIXELS": "1", "VIDEO_TOTAL_PIXELS": "2"})
    assert text.startswith("MIN_PIXELS, VIDEO_TOTAL_PIXELS (environment): are not read; the model's")
    assert list(unread_variables_notices({"PATH": "x", "MAX_PIXELS_OF_MINE": "1", "NCCL_DEBUG": "INFO"})) == []
    assert [*unread_variables_notices({"NCCL_TIMEOUT": "9", "FPS": "2"})][1].endswith(
        "--ddp_timeout SECONDS sets the timeout"
    )


def test_commands_say_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Training and inference, once each."""
    monkeypatch.setenv("FPS_MAX_FRAMES", "8")
    for words in (["sft", "--model", "m", "--dataset", "d"], ["infer", "--model", "m"]):
        with contextlib.suppress(SystemExit):  # there is no such model
            main(words)
        assert capsys.readouterr().err.count("FPS_MAX_FRAMES (environment): is not read") == 1, words

"""Frames of videos: which are read, how large, and files that cannot be.

Covers: megaswift/data/vision/files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision import files
from megaswift.data.vision.files import VideoSampling, open_video
from megaswift.data.vision.media import RowVideo
from megaswift.errors import WeightsError
from tests.parity import videos


@pytest.fixture
def film(tmp_path: Path) -> RowVideo:
    return RowVideo((str(videos.write_video(tmp_path / "film.mp4")),))


@pytest.fixture
def frames(tmp_path: Path) -> RowVideo:
    names = videos.write_frames(tmp_path)["a"]
    return RowVideo(tuple(str(tmp_path / name) for name in names), True, 4.0)


def test_chosen_frames_of_a_file(film: RowVideo, tmp_path: Path) -> None:
    """Those that another program decodes."""
    opened = open_video(film, VideoSampling(), lambda metadata: [1, 7, metadata.total_num_frames - 1])
    assert np.array_equal(opened.frames, videos.decoded(tmp_path / "film.mp4", (1, 7, 23)))
    assert opened.metadata.fps == videos.FILE_RATE and opened.metadata.frames_indices == [1, 7, 23]
    every = open_video(film, VideoSampling(), None)
    assert every.frames.shape == (videos.FILE_FRAMES, 16, 32, 3)


def test_no_more_than_the_most(film: RowVideo, frames: RowVideo) -> None:
    """At equal distances, first and last among them."""
    opened = open_video(film, VideoSampling(max_frames=5), None)
    assert opened.metadata.frames_indices == [0, 6, 12, 17, 23]
    assert open_video(film, VideoSampling(max_frames=5), lambda metadata: [2, 3]).metadata.frames_indices == [2, 3]
    opened = open_video(frames, VideoSampling(max_frames=2), None)
    assert opened.metadata.frames_indices == [0, 3] and opened.metadata.total_num_frames == 4


def test_frames_say_how_many_a_second(frames: RowVideo) -> None:
    """The row, or else the option, or else nothing, which leaves it to the processor."""
    assert open_video(frames, VideoSampling(fps=1.0), None).metadata.fps == 4.0
    silent = RowVideo(frames.files, True)
    assert open_video(silent, VideoSampling(fps=1.0), None).metadata.fps == 1.0
    assert open_video(silent, VideoSampling(), None).metadata.fps is None


def test_large_frames_are_scaled_down(film: RowVideo, frames: RowVideo) -> None:
    assert open_video(film, VideoSampling(max_pixels=128), None).frames.shape == (24, 8, 16, 3)
    assert open_video(frames, VideoSampling(max_pixels=96), None).frames.shape == (4, 8, 12, 3)
    assert open_video(frames, VideoSampling(max_pixels=16 * 24), None).frames.shape == (4, 16, 24, 3)


def test_files_that_cannot_be_read(film: RowVideo, frames: RowVideo, tmp_path: Path, monkeypatch: Any) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(Path(str(film.files[0])).read_bytes()[:200])
    with pytest.raises(RowError, match=r"column 'videos': .*broken.mp4 cannot be read \("):
        open_video(RowVideo((str(broken),)), VideoSampling(), None)
    other = videos.write_frames(tmp_path / "other")["b"]
    mixed = RowVideo((frames.files[0], str(tmp_path / "other" / other[0])), True)
    with pytest.raises(RowError, match=r"frames differ in size \(16 x 16, 24 x 16\)"):
        open_video(mixed, VideoSampling(), None)
    with pytest.raises(RowError, match="cannot be read"):
        open_video(RowVideo((str(broken),), True), VideoSampling(), None)
    monkeypatch.setattr(files, "DECODERS", {})
    monkeypatch.setattr("transformers.utils.import_utils.is_torchcodec_usable", lambda decode: False)
    with pytest.raises(WeightsError, match="pip install av"):
        open_video(film, VideoSampling(), None)
    assert len(open_video(frames, VideoSampling(), None).frames) == 4


def test_a_file_that_does_not_say_how_many_frames_it_has(film: RowVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import video_utils

    def load(file: str, backend: str, sample_indices_fn: Any) -> Any:
        return sample_indices_fn(metadata=video_utils.VideoMetadata(total_num_frames=0, fps=24.0))

    monkeypatch.setattr(video_utils, "load_video", load)
    with pytest.raises(RowError, match="does not say how many frames it has"):
        open_video(film, VideoSampling(), None)

"""Rows with videos, as frames and as files, and what transformers alone makes of them.

What runs here needs torchvision: it is run by ranks of `video_pool`.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.parity import vision
from tests.parity.pool import PRELOAD, ROOT, Pool

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
FILE_RATE, FILE_FRAMES = 8, 24
"""Of the video files: frames a second, and frames."""
TAKEN = {"Qwen2": (0, 4, 8, 12, 16, 20), "Qwen3": (0, 5, 9, 14, 18, 23), "Inter": (2, 6, 10, 14, 18, 22)}
"""Those that are two a second, by hand: each fourth; round(n x 23 / 5), with the last one; in the middle of each
four."""
FRAMES_RATE = 4.0
"""Frames a second that rows say of their lists of frames."""


def torchvision_folder() -> Path:
    """Where `scripts/setup_env.sh --dev` puts torchvision's Python."""
    return Path(os.environ.get("MEGASWIFT_TORCHVISION", ROOT / ".venv" / "torchvision"))


def video_pool() -> Pool:
    """Ranks with torchvision."""
    folders = [ROOT / "tests" / "parity" / "torchvision_site", torchvision_folder(), ROOT]
    return Pool(PRELOAD, {"PYTHONPATH": os.pathsep.join(map(str, folders))})


def write_model(kind: str, folder: Path) -> Path:
    """A vision-language model with a processor of videos."""
    vision.write_model(kind, folder)
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "internvl": "InternVL"}[kind]
    settings: dict[str, Any] = {"video_processor_type": f"{name}VideoProcessor"}
    if kind == "internvl":
        settings |= {"size": {"height": 16, "width": 16}}
    else:  # of Qwen3 the size is that of all frames together
        settings |= {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 6144 if name == "Qwen3VL" else 512}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_frames(folder: Path, counts: tuple[int, int] = (4, 3)) -> dict[str, list[str]]:
    """Frames of two videos; names by video."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(2)
    names: dict[str, list[str]] = {}
    for video, count, size in zip("ab", counts, ((16, 24), (16, 16)), strict=True):
        names[video] = [f"{video}{i}.png" for i in range(count)]
        for name in names[video]:
            Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / name)
    return names


def write_video(path: Path) -> Path:
    """`FILE_FRAMES` frames, each brighter than the last."""
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=FILE_RATE)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for i in range(FILE_FRAMES):
            frame = np.full((16, 32, 3), i * 10, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return path


def write_rows(path: Path, kind: str) -> Path:
    """Eight rows: of the first two, and of the next, only one has a video; images, two videos, a file, a second
    question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = (4, 4) if kind == "internvl" else (4, 3)  # its processor wants videos of one length in a conversation
    images, frames = vision.write_images(path.parent / "images"), write_frames(path.parent / "frames", counts)
    write_video(path.parent / "film.mp4")
    draw = random.Random(4)

    def shown(name: str) -> dict[str, Any]:
        if name == "film":
            return {"type": "video", "video": "film.mp4"}
        return {"type": "video", "video": [f"frames/{one}" for one in frames[name]], "fps": FRAMES_RATE}

    contents: list[list[Any]] = [
        [shown("a")],
        [],
        [vision.image(images[0])],
        [vision.image(images[1]), shown("b")],
        [shown("b"), vision.part("and"), shown("a")],
        [shown("film")],
        [],
        [shown("film"), vision.image(images[2])],
    ]
    with path.open("w", encoding="utf-8") as file:
        for i, media in enumerate(contents):
            words = "".join(draw.choice("abcdef ") for _ in range(draw.randint(3, 9)))
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": [*media, vision.part(words + "?")]},
                {"role": "assistant", "content": [vision.part(words[::-1])]},
            ]
            if i % 3 == 0:
                asked = [*([shown("b")] if i == 3 else []), vision.part("more")]
                answer = {"role": "assistant", "content": [vision.part("no more")]}
                turns += [{"role": "user", "content": asked}, answer]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def decoded(path: Path, taken: tuple[int, ...]) -> np.ndarray:
    """Frames of a file, by PyAV alone."""
    import av

    with av.open(str(path)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(frames) == FILE_FRAMES
    return np.stack([frames[i] for i in taken])


def inputs_of(processor: Any, line: str, folder: Path) -> dict[str, Tensor]:
    """What transformers makes of a row, the assistant's mask among it: frames are arrays, chosen by hand."""
    from PIL import Image
    from transformers.video_utils import VideoMetadata

    messages = copy.deepcopy(json.loads(line)["messages"])
    taken = TAKEN[type(processor).__name__[:5]]
    metadata = []
    for part in [p for message in messages for p in message["content"]]:
        if "path" in part:
            part["image"] = Image.open(folder / part.pop("path")).convert("RGB")
        elif part["type"] == "video" and isinstance(part["video"], list):
            files = part["video"]
            part["video"] = np.stack([np.asarray(Image.open(folder / name).convert("RGB")) for name in files])
            metadata.append(VideoMetadata(len(files), fps=part["fps"], frames_indices=[*range(len(files))]))
        elif part["type"] == "video":
            part["video"] = decoded(folder / part["video"], taken)
            metadata.append(VideoMetadata(FILE_FRAMES, fps=float(FILE_RATE), frames_indices=[*taken]))
    given = {"video_metadata": metadata, "do_sample_frames": False} if metadata else {}
    made = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="pt",
        processor_kwargs=given,
    )
    return {k: v for k, v in made.items() if isinstance(v, Tensor)}


def reference(rank: int, world: int, task: tuple[Path, Path, int]) -> vision.Reference:
    """`vision.reference` of rows with videos."""
    folder, data, rows = task
    return vision.reference(folder, data, rows, inputs_of)

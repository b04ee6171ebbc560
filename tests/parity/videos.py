"""Rows with videos, as frames and as files, and what transformers alone makes of them.

What runs here needs torchvision: it is run by ranks of `video_pool`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from tests.data.of_config import prompt_splits
from tests.parity import vision
from tests.parity.pool import PRELOAD, ROOT, Pool
from tests.parity.vision_preferences import BETA

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
    return Path(sys.prefix) / "torchvision"


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
    """Eight rows; of the first two only one has a video, the next two have images alone, so that with two ranks one
    is without; two videos, files, a video in a second question."""
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
        [vision.image(images[1])],
        [shown("b"), vision.part("and"), shown("a")],
        [shown("film")],
        [vision.image(images[3]), shown("b")],
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
                asked = [*([shown("b")] if i == 6 else []), vision.part("more")]
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


def inputs_of(processor: Any, line: str, folder: Path, **options: Any) -> dict[str, Tensor]:
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
        **options,
    )
    return {k: v for k, v in made.items() if isinstance(v, Tensor)}


def reference(rank: int, world: int, task: tuple[Path, Path, int]) -> vision.Reference:
    """`vision.reference` of rows with videos."""
    folder, data, rows = task
    return vision.reference(folder, data, rows, inputs_of)


OWN_SETTINGS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"fps": 4.0}, tuple(range(0, 24, 2))),
    ({"nframes": 4}, (0, 6, 12, 18)),
    ({"fps": "4", "max_frames": 6}, (0, 4, 8, 12, 16, 20)),
    ({"max_frames": 2, "max_pixels": 128}, (0, 12)),
)
"""What a part may say of its file where the run says two frames a second, and the frames that are then taken."""


def own_settings(rank: int, world: int, folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Of a question about a file, with each of `OWN_SETTINGS`: (ours, transformers')."""
    from PIL import Image
    from transformers.video_utils import VideoMetadata

    from megaswift.data.untokenized_sample import UntokenizedSample
    from megaswift.data.vision.files import VideoSampling
    from megaswift.data.vision.placeholders import RowImageFolders, attach_media

    spec = processor_folder_and_files_digest(write_model("qwen2_5_vl", folder / "model"), False)
    processor = Processor(replace(spec, videos=VideoSampling(fps=2.0)))
    file = write_video(folder / "film.mp4")
    found = []
    for settings, taken in OWN_SETTINGS:
        part = {"type": "video", "video": file.name, **settings}
        asked = {"role": "user", "content": [part, vision.part("what?")]}
        sample, media = attach_media({}, UntokenizedSample((asked,), (None,)), RowImageFolders(folder))
        text = processor.inner.apply_chat_template(
            [*sample.messages], chat_template=processor.tokenizer.chat_template, add_generation_prompt=True
        )
        frames = decoded(file, taken)
        if "max_pixels" in settings:  # 32 x 16, so half of each side
            small = [Image.fromarray(frame).resize((16, 8), Image.Resampling.BILINEAR) for frame in frames]
            frames = np.stack([np.asarray(frame) for frame in small])
        metadata = VideoMetadata(FILE_FRAMES, fps=float(FILE_RATE), frames_indices=[*taken])
        want = processor.inner(
            text=[text], videos=[[frames]], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        found.append((processor.inputs(text, media), {k: v for k, v in want.items() if isinstance(v, Tensor)}))
    return found


def write_pairs(folder: Path, kind: str) -> Path:
    """The rows up to their first answer, with another one that is rejected; model/ and reference/ beside them."""
    rows = [json.loads(line) for line in write_rows(folder / "rows.jsonl", kind).read_text().splitlines()]
    pairs = [{"messages": row["messages"][:2], "rejected_response": "not at all."[i:]} for i, row in enumerate(rows)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_model(kind, folder / "model")
    vision.write_model(kind, folder / "reference", seed=6)
    return folder


def _logprob(model: Any, processor: Any, messages: list[Any], folder: Path) -> Tensor:
    """The sum over the answer's tokens."""
    inputs = inputs_of(processor, json.dumps({"messages": messages}), folder)
    mask = inputs.pop("assistant_masks")[:, 1:].bool()
    if not {"pixel_values", "pixel_values_videos"} & inputs.keys():
        inputs.pop("mm_token_type_ids", None)
    logprobs = model(**inputs).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(2, inputs["input_ids"][:, 1:, None])[..., 0][mask].sum()


def dpo_reference(rank: int, world: int, task: tuple[Path, int]) -> vision.Reference:
    """The paper's formula (arXiv:2305.18290) on the first pairs, a conversation at a time."""
    from transformers import AutoModelForImageTextToText

    folder, count = task
    processor = Processor(processor_folder_and_files_digest(folder / "model", False)).inner
    model, still = (
        AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("model", "reference")
    )
    total = torch.zeros(())
    for line in (folder / "pairs.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        bad = {"role": "assistant", "content": [vision.part(row["rejected_response"])]}
        sides = [row["messages"], [row["messages"][0], bad]]
        own = [_logprob(model, processor, side, folder) for side in sides]
        with torch.no_grad():
            kept = [_logprob(still, processor, side, folder) for side in sides]
        total = total - logsigmoid(BETA * ((own[0] - kept[0]) - (own[1] - kept[1]))) / count
    total.backward()
    named = model.named_parameters()
    return vision.Reference(
        float(total.detach()), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
    )


def sampled(rank: int, world: int, folder: Path) -> list[tuple[list[float], list[float]]]:
    """Of completions of prompts with videos, two of each: (the sampler's log-probabilities, transformers')."""
    from transformers import AutoModelForImageTextToText

    from megaswift.bridge.weight_source import open_weights
    from megaswift.config import SwiftConfig
    from megaswift.data.model_tokenizer import training_processor
    from megaswift.data.prompts.images import PromptImageReader
    from megaswift.data.vision.batches import media_kinds
    from megaswift.rollout.backends.transformers_sampler import build
    from megaswift.rollout.sampler import BatchImages, SamplerOptions, SamplingParams

    cfg = SwiftConfig(
        task="grpo", model=str(folder / "model"), dataset=[str(folder / "rows.jsonl")], shuffle=False, engine="ddp",
        dataset_cache_dir=str(folder / "cache"), reward_funcs=["format"], max_length=512, max_completion_length=8,
        video_fps=2.0,
    )  # fmt: skip
    processor = training_processor(cfg.data, folder / "model", cfg.model.trust_remote_code)
    source = prompt_splits(cfg, processor, 1)[0]
    prompts = [source.prompts.read(i) for i in range(len(source.prompts)) for _ in range(2)]
    sampler = build(folder / "model", SamplerOptions(batch_size=5))
    weights = open_weights(folder / "model")
    sampler.update_weights((name, weights.slice(name)) for name in weights.names())
    images = BatchImages(
        [p.images for p in prompts], PromptImageReader(processor, media_kinds(source.prompts.docs.stores))
    )
    drawn = sampler.generate_with_images(
        [p.token_ids for p in prompts],
        images,
        SamplingParams(6, temperature=1.0, stop_token_ids=(1,)),
        [*range(len(prompts))],
    )
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    lines = (folder / "rows.jsonl").read_text().splitlines()
    found = []
    for i, (prompt, completion) in enumerate(zip(prompts, drawn, strict=True)):
        messages = json.loads(lines[i // 2])["messages"]
        messages.pop()
        own = inputs_of(processor.inner, json.dumps({"messages": messages}), folder, add_generation_prompt=True)
        own.pop("assistant_masks")
        assert own["input_ids"][0].tolist() == [*prompt.token_ids]
        written = torch.tensor([completion.token_ids])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if name in own:
                more = {"input_ids": written, "attention_mask": torch.ones_like(written)}
                own[name] = torch.cat([own[name], more.get(name, torch.zeros_like(written))], dim=1)
        if not {"pixel_values", "pixel_values_videos"} & own.keys():
            own.pop("mm_token_type_ids", None)
        with torch.no_grad():
            logits = model(**own).logits[0, len(prompt.token_ids) - 1 : -1].float()
        found.append(([*completion.logprobs], logits.log_softmax(-1).gather(1, written[0, :, None])[:, 0].tolist()))
    return found


def streamed_media(rank: int, world: int, task: tuple[Path, Path, bool]) -> list[set[str]]:
    """What micro-batches of a stream of rows without videos bring beside the tokens, by whether weights are divided."""
    from megaswift.config import SwiftConfig
    from megaswift.data.batches.numbered import LoaderGeometry
    from megaswift.data.build import build_train_and_eval_sources
    from megaswift.data.model_tokenizer import training_processor

    folder, data, divided = task
    cfg = SwiftConfig(
        task="sft", model=str(folder), dataset=[str(data)], engine="ddp", streaming=True, max_steps=2, shuffle=False
    )
    geometry = LoaderGeometry(divided_weights=divided)
    source, _ = build_train_and_eval_sources(
        cfg.data, cfg.train, training_processor(cfg.data, folder, cfg.model.trust_remote_code), geometry, "sft"
    )
    return [{*source.next()[0].extra} & {"pixel_values", "pixel_values_videos"} for _ in range(2)]


def answered(rank: int, world: int, folder: Path) -> list[tuple[str, str]]:
    """Of the rows: (what `megaswift infer` answers, what transformers' `generate` writes)."""
    from transformers import AutoModelForImageTextToText

    from megaswift.infer import main

    settings = folder / "model" / "video_preprocessor_config.json"  # inference reads these
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"fps": 2.0, "do_sample_frames": True}))
    words = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max_new_tokens", "4"]
    assert (
        main([*words, "--temperature", "0", "--batch_size", "3", "--result_path", str(folder / "answers.jsonl")]) == 0
    )
    processor = Processor(processor_folder_and_files_digest(folder / "model", False)).inner
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found = []
    for line, answer in zip(
        *((folder / f"{n}.jsonl").read_text().splitlines() for n in ("rows", "answers")), strict=True
    ):
        asked = json.dumps({"messages": json.loads(line)["messages"][:-1]})
        own = inputs_of(processor, asked, folder, add_generation_prompt=True)
        own.pop("assistant_masks")
        if not {"pixel_values", "pixel_values_videos"} & own.keys():
            own.pop("mm_token_type_ids", None)
        whole = model.generate(**own, do_sample=False, max_new_tokens=4)[0, own["input_ids"].shape[1] :]
        found.append((json.loads(answer)["response"], processor.tokenizer.decode(whole, skip_special_tokens=True)))
    return found

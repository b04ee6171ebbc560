"""The transformers sampler on prompts with images, beside transformers itself on one prompt at a time.

Covers: megaswift/rollout/decoding.py, megaswift/rollout/token_sampling.py, megaswift/data/prompts/images.py,
megaswift/data/prompts/encode.py, megaswift/data/prompts/source.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.bridge.weight_source import open_weights
from megaswift.config import SwiftConfig
from megaswift.data.prompts.images import PromptImageReader
from megaswift.data.prompts.source import Prompt
from megaswift.data.show import samples
from megaswift.data.vision.media import RowMedia
from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from megaswift.errors import DataError
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.sampler import BatchImages, Completion, SamplerOptions, SamplingParams
from tests.data.of_config import prompt_splits
from tests.parity import vision
from tests.parity.vision_tokenizer import VOCAB
from tests.trainers.vision_rows import write_pairs

pytestmark = pytest.mark.wide
SLOW = pytest.mark.slow
ROWS, LONGEST = 8, 9
SAMPLING = SamplingParams(LONGEST, temperature=0.8, stop_token_ids=(1,))


class Inputs:
    """A model, its sampler, and prompts with no, one or two images, each twice."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.model = folder, vision.write_model(kind, folder / "model")
        names = ["<|image_pad|>", "<|video_pad|>"] if kind.startswith("qwen") else ["<image>"]
        self.placeholders = [VOCAB.index(name) for name in names]
        write_pairs(folder, ROWS)
        self.processor = Processor(processor_folder_and_files_digest(self.model, False))
        self.prompts = [p for p in self.load("trl") for _ in range(2)]
        self.sampler = build(self.model, SamplerOptions(batch_size=11))
        source = open_weights(self.model)
        self.sampler.update_weights((name, source.slice(name)) for name in source.names())

    def load(self, name: str, **options: Any) -> list[Prompt]:
        data = {"dataset": [str(self.folder / f"{name}.jsonl")], "dataset_cache_dir": str(self.folder / "cache")}
        data |= {
            "shuffle": False,
            "engine": "ddp",
            "reward_funcs": ["format"],
            "max_length": 128,
            "max_completion_length": 8,
        } | options
        cfg = SwiftConfig(task="grpo", model=str(self.model), **data)
        source = prompt_splits(cfg, self.processor, 1)[0]
        return [source.prompts.read(i) for i in range(len(source.prompts))]

    def draw(self, sampling: SamplingParams, prompts: list[Prompt] | None = None) -> list[Completion]:
        asked = self.prompts if prompts is None else prompts
        images = BatchImages([p.images for p in asked], PromptImageReader(self.processor))
        seeds = [100 + i for i in range(len(asked))]
        return self.sampler.generate_with_images([p.token_ids for p in asked], images, sampling, seeds)

    def of_transformers(self, prompt: Prompt) -> tuple[Any, dict[str, torch.Tensor]]:
        """(the model, what its processor makes of the prompt by itself)."""
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(self.model, dtype=torch.float32).eval()
        inputs = self.processor.inner.apply_chat_template(
            list(prompt.content), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return model, {k: v for k, v in inputs.items() if "pixel_values" in inputs or k != "mm_token_type_ids"}


KINDS = ["qwen2_vl", "gemma3", *(pytest.param(k, marks=SLOW) for k in vision.KINDS if k not in ("qwen2_vl", "gemma3"))]


@pytest.fixture(scope="module", params=KINDS)
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(request.param, tmp_path_factory.mktemp("sampler"))


def test_prompts_and_logprobs_are_those_of_transformers(inputs: Inputs) -> None:
    drawn = inputs.draw(SAMPLING)
    assert len({len(c.token_ids) for c in drawn}) > 2 and len({c.token_ids for c in drawn}) > ROWS
    for prompt, completion in zip(inputs.prompts, drawn, strict=True):
        model, own = inputs.of_transformers(prompt)
        assert own["input_ids"][0].tolist() == [*prompt.token_ids]
        written = torch.tensor([completion.token_ids])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
            if name in own:
                more = {"input_ids": written, "attention_mask": torch.ones_like(written)}
                own[name] = torch.cat([own[name], more.get(name, torch.zeros_like(written))], dim=1)
        with torch.no_grad():
            logits = model(**own).logits[0, len(prompt.token_ids) - 1 : -1].float() / SAMPLING.temperature
        wanted = logits.log_softmax(-1).gather(1, written[0, :, None])[:, 0]
        assert torch.tensor(completion.logprobs) == pytest.approx(wanted, abs=2e-5)


def test_greedy_is_transformers_generate(inputs: Inputs) -> None:
    drawn = inputs.draw(replace(SAMPLING, temperature=0.0))
    forbidden = inputs.placeholders
    for prompt, completion in zip(inputs.prompts[::2], drawn[::2], strict=True):
        model, own = inputs.of_transformers(prompt)
        options = {"do_sample": False, "max_new_tokens": LONGEST, "eos_token_id": 1, "suppress_tokens": forbidden}
        whole = model.generate(**own, **options)[0].tolist()
        assert whole[len(prompt.token_ids) :] == [*completion.token_ids]


def test_a_completion_depends_on_its_own_images_alone(inputs: Inputs) -> None:
    """Alone as among others; with another image of the same size, other log-probabilities."""
    together = inputs.draw(SAMPLING)
    prompts, one = (
        inputs.prompts,
        next(i for i, p in enumerate(inputs.prompts) if p.images and len(p.images.media) == 2),
    )
    images = BatchImages([prompts[one].images], PromptImageReader(inputs.processor))
    alone = inputs.sampler.generate_with_images([prompts[one].token_ids], images, SAMPLING, [100 + one])[0]
    assert alone.token_ids == together[one].token_ids
    assert alone.logprobs == pytest.approx(together[one].logprobs, abs=1e-5)
    from PIL import Image, ImageOps

    turned = inputs.folder / "turned.png"
    pictures = prompts[one].images
    assert pictures is not None
    with Image.open(pictures.media.images[0]) as opened:
        ImageOps.invert(opened.convert("RGB")).save(turned)
    other = replace(pictures, media=RowMedia((str(turned), *pictures.media.images[1:])))
    both = replace(images, of=[pictures, other])
    first, second = inputs.sampler.generate_with_images([prompts[one].token_ids] * 2, both, SAMPLING, [100 + one] * 2)
    assert first.token_ids == alone.token_ids and first.logprobs[0] != pytest.approx(second.logprobs[0], abs=1e-5)


def test_no_placeholder_is_ever_written(inputs: Inputs) -> None:
    """By a head that wants nothing else; the log-probabilities are those of that head."""
    places = torch.tensor(inputs.placeholders)
    head = inputs.sampler.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, logits: logits.index_fill(-1, places, 9.0))
    prompts = inputs.load("trl")
    try:
        drawn = [inputs.draw(replace(SAMPLING, temperature=heat), prompts) for heat in (0.8, 0.0)]
    finally:
        hook.remove()
    written = [c for completions in drawn for c in completions]
    assert not {t for c in written for t in c.token_ids} & {*inputs.placeholders}
    assert all(logprob < -3 for c in written for logprob in c.logprobs)


def test_images_that_changed_are_told(inputs: Inputs) -> None:
    prompt = next(p for p in inputs.prompts if p.images)
    other = next(p for p in inputs.prompts if p.images and p.token_ids != prompt.token_ids)
    with pytest.raises(DataError, match="have changed since tokenization"):
        inputs.draw(SAMPLING, [replace(prompt, images=other.images)])


def test_rows_name_their_faults_and_none_loses_an_image(inputs: Inputs) -> None:
    rows = [json.loads(line) for line in (inputs.folder / "trl.jsonl").read_text().splitlines()]
    rows[2]["images"] = ["images/9.png"]
    (inputs.folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"bad.jsonl:3: column images: no such file: .*9.png"):
        inputs.load("bad")
    (inputs.folder / "plain.jsonl").write_text(json.dumps({"prompt": "what", "images": ["images/0.png"]}) + "\n")
    with pytest.raises(DataError, match=r"plain.jsonl:1: column prompt: plain text, .* its images have no place"):
        inputs.load("plain")
    room = 10
    kept = inputs.load("trl", max_length=8 + room, truncation_strategy="left")
    assert kept and all(p.images is None or len(p.token_ids) <= room for p in kept)
    assert len(kept) < ROWS


def test_data_show_prints_prompts_with_images(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(inputs.folder / "trl.jsonl"), "--task", "grpo", "--model", "unused", "--samples", "1"]
    cache = ["--dataset_cache_dir", str(inputs.folder / "cache"), "--max_length", "128", "--max_completion_length", "8"]
    capsys.readouterr()
    assert samples.main([*words, *cache], lambda *_: inputs.processor) == 0
    printed = capsys.readouterr().out
    files = inputs.prompts[0].images
    assert (
        files is not None
        and " x " in printed.split("images: ")[0]
        and f"images: {json.dumps([*files.media.images])}" in printed
    )
    assert f"certified: {ROWS} rows" in printed, printed


def test_rewards_see_messages_with_parts_and_paths(inputs: Inputs) -> None:
    for prompt in inputs.prompts:
        parts = [part for message in prompt.content if isinstance(message, dict) for part in message["content"]]
        files = [part["image"] for part in parts if isinstance(part, dict) and part["type"] == "image"]
        assert [*(prompt.images.media.images if prompt.images else ())] == files
        assert prompt.columns["images"] == files

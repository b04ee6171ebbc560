"""Vision-language models of some ten thousand parameters, rows with images, and what transformers alone makes of
them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from megaswift.losses.sft import CrossEntropy
from tests.parity.vision_tokenizer import VOCAB, tokenizer

TEXT = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "head_dim": 8,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}

QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}


@dataclass
class Files:
    """A processor whose class cannot be made without torchvision, as its files."""

    tokens: Any
    images: Any
    name: str
    chat_template: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the processor's own file."""

    def save_pretrained(self, folder: Path) -> None:
        self.tokens.save_pretrained(folder)
        self.images.save_pretrained(folder)
        config = Path(folder) / "preprocessor_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"processor_class": self.name}))
        if self.settings:
            own = {**self.settings, "processor_class": self.name}
            (Path(folder) / "processor_config.json").write_text(json.dumps(own))


MARKS = {
    "image_token_id": VOCAB.index("<|image_pad|>"),
    "video_token_id": VOCAB.index("<|video_pad|>"),
    "vision_start_token_id": VOCAB.index("<|vision_start|>"),
    "vision_end_token_id": VOCAB.index("<|vision_end|>"),
}


def _qwen2_vl(tokens: Any) -> tuple[Any, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    config = Qwen2VLConfig(
        text_config=text
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        **MARKS,
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
    return Qwen2VLForConditionalGeneration(config), Files(tokens, images, "Qwen2VLProcessor")


def _qwen2_5_vl(tokens: Any) -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    config = Qwen2_5_VLConfig(
        text_config=text
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
        vision_config=QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        **MARKS,
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
    return Qwen2_5_VLForConditionalGeneration(config), Files(tokens, images, "Qwen2_5_VLProcessor")


def _qwen3_vl(tokens: Any, **experts: int) -> tuple[Any, Any]:
    from transformers import (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {k: v for k, v in TEXT.items() if k not in ("bos_token_id", "eos_token_id")}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = (Qwen3VLMoeConfig if experts else Qwen3VLConfig)(
        text_config=text | experts | {"rope_parameters": rope},
        vision_config=QWEN_TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        **MARKS,
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
    model = (Qwen3VLMoeForConditionalGeneration if experts else Qwen3VLForConditionalGeneration)(config)
    return model, Files(tokens, images, "Qwen3VLProcessor")


def _qwen3_vl_moe(tokens: Any) -> tuple[Any, Any]:
    return _qwen3_vl(tokens, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def _llava_next(tokens: Any) -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextProcessor,
    )
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    grid = [[16, 32], [32, 16], [32, 32]]
    config = LlavaNextConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(**TOWER),
        image_token_index=VOCAB.index("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=grid,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=grid
    )
    processor = LlavaNextProcessor(
        images, tokens, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaNextForConditionalGeneration(config), processor


def _llava(tokens: Any) -> tuple[Any, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(**TOWER),
        image_token_index=VOCAB.index("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        images, tokens, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaForConditionalGeneration(config), processor


def _gemma3(tokens: Any) -> tuple[Any, Any]:
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3Processor,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, sliding_window=24),
        vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=VOCAB.index("<boi>"),
        eoi_token_index=VOCAB.index("<eoi>"),
        image_token_index=VOCAB.index("<image>"),
    )
    processor = Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokens, image_seq_length=4)
    return Gemma3ForConditionalGeneration(config), processor


def _idefics3(tokens: Any) -> tuple[Any, Any]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT), vision_config=TOWER, image_token_id=VOCAB.index("<image>"), scale_factor=2
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
    )
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(images, tokens, image_seq_len=4)


def _internvl(tokens: Any) -> tuple[Any, Any]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    config = InternVLConfig(
        text_config=Qwen2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"}),
        vision_config=InternVLVisionConfig(**{**TOWER, "image_size": (16, 16), "patch_size": (4, 4)}),
        image_token_id=VOCAB.index("<image>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=False)
    return InternVLForConditionalGeneration(config), Files(
        tokens, images, "InternVLProcessor", settings={"image_seq_length": 4}
    )


KINDS = {
    "internvl": _internvl,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
}


def write_model(kind: str, folder: Path, seed: int = 5) -> Path:
    """A model's folder: weights, tokenizer, processor, chat template."""
    torch.manual_seed(seed)
    tokens = tokenizer(kind)
    model, processor = KINDS[kind](tokens)
    processor.chat_template = tokens.chat_template
    with torch.no_grad():
        for parameter in model.parameters():
            # biases and class tokens are zero when they are made
            if parameter.dim() == 1 or float(parameter.abs().max()) == 0:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_images(folder: Path, count: int = 4) -> list[str]:
    """Pictures of several sizes; their names."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for i in range(count):
        width, height = draw.choice([(16, 16), (24, 16), (16, 32)])
        image = Image.new("RGB", (width, height))
        image.putdata([tuple(draw.randint(0, 255) for _ in range(3)) for _ in range(width * height)])
        image.save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(count)]


def part(text: str) -> dict[str, str]:
    """A text part."""
    return {"type": "text", "text": text}


def image(name: str) -> dict[str, str]:
    """An image part."""
    return {"type": "image", "path": f"images/{name}"}


def write_rows(path: Path, rows: int = 8) -> Path:
    """Rows of no, one or two images; of the first two only one has any, so that with two ranks one is without."""
    names = write_images(path.parent / "images")
    draw = random.Random(3)
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            pictures = [draw.choice(names) for _ in range((1, 0, 2, 0, 0, 0, 1, 1)[i % 8])]
            words = "".join(draw.choice("abcdef ") for _ in range(draw.randint(3, 9)))
            asked = [*map(image, pictures), part(words + "?")]
            if i % 8 == 6:
                asked = [part(words), image(pictures[0]), part("?")]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": [part(words[::-1])]}]
            if i % 3 == 0:
                turns += [
                    {"role": "user", "content": [part("more")]},
                    {"role": "assistant", "content": [part("no more")]},
                ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def inputs_of(processor: Any, line: str, folder: Path) -> dict[str, Tensor]:
    """What transformers makes of a row, the assistant's mask among it."""
    messages = copy.deepcopy(json.loads(line)["messages"])
    for message in messages:
        for p in message["content"]:
            if "path" in p:
                p["path"] = str(folder / p["path"])
    made = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    return dict(made)


@dataclass
class Reference:
    """Loss and gradients of a global batch, whole tensors by parameter name."""

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)


def reference(folder: Path, data: Path, rows: int, read: Callable[..., dict[str, Tensor]] = inputs_of) -> Reference:
    """transformers alone, a row at a time without padding, in one process. `read`: makes a row's inputs."""
    from transformers import AutoModelForImageTextToText

    processor = Processor(processor_folder_and_files_digest(folder, False)).inner
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    lines = data.read_text(encoding="utf-8").splitlines()[:rows]
    made = [read(processor, line, data.parent) for line in lines]
    count = sum(int(inputs["assistant_masks"][0, 1:].sum()) for inputs in made)
    total = 0.0
    for inputs in made:
        mask = inputs.pop("assistant_masks")[:, 1:].bool()
        if not {"pixel_values", "pixel_values_videos"} & inputs.keys():
            inputs.pop("mm_token_type_ids", None)
        logits = model(**inputs).logits[:, :-1].float()
        loss = (
            torch.nn.functional.cross_entropy(logits[mask], inputs["input_ids"][:, 1:][mask], reduction="sum") / count
        )
        loss.backward()
        total += float(loss.detach())
    return Reference(total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})


@dataclass(frozen=True)
class Task:
    """What the ranks get."""

    folder: Path
    data: Path
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0


def train(rank: int, world: int, task: Task) -> Reference | None:
    """The engine's numbers of the first global batch, then of `steps` steps; on rank 0."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.torch.strategies.strategy import GRADIENT, WEIGHT, whole_tensor
    from megaswift.models.any_model import spec_from_family_or_size_fields
    from megaswift.parallel.layout import Layout
    from megaswift.run.build import load_start_weights
    from megaswift.run.dataset_task import read_rows
    from megaswift.run.engines import make_engine, start_context
    from megaswift.run.plan import RunPlan
    from megaswift.run.tasks import TASKS

    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "shuffle": False,
        "adam_epsilon": 1e-6,
        "dataset_cache_dir": str(task.data.parent / "cache"),
        "ddp_timeout": 60,
    }
    if task.options.get("streaming"):
        del options["dataset_cache_dir"]
    cfg = SwiftConfig(
        task="sft", model=str(task.folder), dataset=[str(task.data)], engine=task.engine, **options | dict(task.options)
    )
    context = start_context(cfg, Layout.from_config(cfg.parallel, world))
    unused: Any = None
    plan = RunPlan(cfg, spec_from_family_or_size_fields(task.folder), task.folder, context, unused)
    plan, rows = read_rows(plan, TASKS.get("sft"))
    engine: Any = make_engine(plan.scheduled(1), plan.spec, plan.folder, context)
    load_start_weights(plan, engine)
    first = rows.source.next()
    assert all("pixel_values" in batch.extra for batch in first), "a micro-batch without an image"
    out = Reference(engine.accumulate(first, CrossEntropy()).loss)
    out.gradients = {
        n.removeprefix("model."): whole_tensor(engine.strategy, n, GRADIENT).cpu().clone()
        for n in engine.strategy.trained()
    }
    for _ in range(task.steps):
        engine.train_batch(first, CrossEntropy(), 1e-2)
    out.weights = {
        n.removeprefix("model."): whole_tensor(engine.strategy, n, WEIGHT).detach().cpu().clone() for n in engine.shapes
    }
    out.shards = {"own": engine.strategy.sizes()[0], "all": sum(s.numel() for s in engine.shapes.values())}
    torch.distributed.barrier()
    context.close()
    return out if rank == 0 else None

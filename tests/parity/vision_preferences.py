"""Preference losses on rows with images: the engine's numbers of a first global batch, and what transformers alone
makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.parity.vision import Reference
from tests.trainers.vision_rows import inner_processor

BETA, GAMMA = 0.4, 0.9


@dataclass(frozen=True)
class PairTask:
    """What the ranks get."""

    folder: Path
    """With model/, reference/ and rows."""
    rows: str
    engine: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)


def train(rank: int, world: int, given: PairTask) -> Reference | None:
    """Loss and gradients of the first global batch of four pairs; on rank 0."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.torch.strategies.strategy import GRADIENT, whole_tensor
    from megaswift.losses.options.preference import needs_reference
    from megaswift.models.any_model import spec_from_family_or_size_fields
    from megaswift.parallel.layout import Layout
    from megaswift.run.build import load_start_weights, start_from_reference
    from megaswift.run.dataset_task import read_rows
    from megaswift.run.engines import make_engine, start_context
    from megaswift.run.plan import RunPlan
    from megaswift.run.tasks import TASKS

    model = given.folder / "model"
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2 // world,
        "shuffle": False,
        "freeze_vit": False,
        "freeze_aligner": False,
        "dataset_cache_dir": str(given.folder / "cache"),
        "ddp_timeout": 60,
        "beta": BETA,
    }
    data = [str(given.folder / f"{name}.jsonl") for name in given.rows.split()]
    cfg = SwiftConfig(task=given.task, model=str(model), dataset=data, engine=given.engine, **options | given.options)
    context = start_context(cfg, Layout.from_config(cfg.parallel, world))
    task, unused = TASKS.get(given.task), cast(Any, None)
    plan, rows = read_rows(RunPlan(cfg, spec_from_family_or_size_fields(model), model, context, unused), task)
    engine: Any = make_engine(plan.scheduled(1), plan.spec, plan.folder, context)
    if needs_reference(cfg):
        rows = replace(rows, reference=start_from_reference(plan, engine, rows.every_row_once))
    else:
        load_start_weights(plan, engine)
    parts = task.attach(plan, rows, engine, lambda step: 0.0)
    batches = parts.prepare(engine, parts.data.next(), True)
    out = Reference(engine.accumulate(batches, task.loss(cfg)).loss)
    out.gradients = {
        n.removeprefix("model."): whole_tensor(engine.strategy, n, GRADIENT).cpu().clone()
        for n in engine.strategy.trained()
    }
    torch.distributed.barrier()
    context.close()
    return out if rank == 0 else None


def _logprobs(model: Any, processor: Any, messages: list[dict[str, Any]], prompt: int) -> Tensor:
    """[completion tokens], the `prompt` messages given."""
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    before = processor.apply_chat_template(messages[:prompt], add_generation_prompt=True, **options)
    inputs = dict(processor.apply_chat_template(messages, **options))
    begin, ids = before["input_ids"].shape[1], inputs["input_ids"]
    if "pixel_values" not in inputs:
        inputs.pop("mm_token_type_ids", None)
    logits = model(**inputs).logits[0, begin - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]


def reference(folder: Path, rows: list[dict[str, Any]], task: str, ref_model: str = "reference") -> Reference:
    """transformers alone, a conversation at a time without padding; the formulas of the papers by hand (DPO:
    arXiv:2305.18290, CPO: 2401.08417, SimPO: 2405.14734)."""
    from transformers import AutoModelForImageTextToText

    processor = inner_processor(folder / "model")
    model, other = (
        AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", ref_model)
    )
    total, nll, tokens = torch.zeros(()), torch.zeros(()), 0
    for row in rows:
        pictures = [{"type": "image", "path": str(folder / name)} for name in row["images"]]
        text = {"type": "text", "text": row["prompt"][0]["content"]}
        ask = {"role": "user", "content": [*pictures, text]}
        sides = [
            [ask, {"role": "assistant", "content": [{"type": "text", "text": row[side][0]["content"]}]}]
            for side in ("chosen", "rejected")
        ]
        good, bad = (_logprobs(model, processor, side, 1) for side in sides)
        with torch.no_grad():
            still = [_logprobs(other, processor, side, 1).sum() for side in sides]
        if task == "dpo":
            loss = -logsigmoid(BETA * ((good.sum() - still[0]) - (bad.sum() - still[1])))
        elif task == "cpo":
            loss = -logsigmoid(BETA * (good.sum() - bad.sum()))
            nll, tokens = nll - good.sum(), tokens + len(good)
        else:
            loss = -logsigmoid(BETA * (good.mean() - bad.mean()) - GAMMA)
        total = total + loss / len(rows)
    total = total + nll / max(tokens, 1)  # --cpo_alpha 1
    total.backward()
    named = model.named_parameters()
    return Reference(float(total.detach()), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})


def pairs(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]

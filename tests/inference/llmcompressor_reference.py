"""Quantizes a model as llmcompressor's own documentation does, without megaswift, and saves its logits.

Usage: MODEL METHOD SEQUENCES OUT, where SEQUENCES is a JSON list of lists of token IDs.
"""

from __future__ import annotations

import json
import sys

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEME = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}


def main(source: str, method: str, sequences: str, out: str) -> None:
    IntermediatesCache.pin_memory = lambda *_: None  # no accelerator here
    model = AutoModelForCausalLM.from_pretrained(source)
    rows = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in json.loads(sequences)])
    recipe = [GPTQModifier(**SCHEME)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**SCHEME)]
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(source),
        dataset=rows,
        recipe=recipe,
        shuffle_calibration_samples=False,
        pipeline="sequential",
    )
    with torch.no_grad():
        torch.save(model(torch.arange(4, 40)[None]).logits, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tokenizers trained on the spot, templates and options for the data tests."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megaswift.config import SwiftConfig
from megaswift.data.vision.processor import Processor, processor_folder_and_files_digest
from tests.parity import vision

HERE = Path(__file__).parent
TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "hello world, how are you today my friend?",
    "<think>\nlet me think about it step by step\n</think>\n\nThe answer is forty two.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "def main(argv):\n    return argv[0]\n\n\n# done   ",
    "Zażółć gęślą jaźń 🙂🙂 日本語のテキスト",
] * 3
SPECIAL = {
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
    "mistral": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "gemma": ("<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
    "cohere": (
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    "harmony": ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    "glimmer": ("<|endoftext|>", "<|start|>", "<|message|>", "<|eot|>", "<|eom|>"),
}
EOS = {
    "qwen": "<|im_end|>",
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "glm": "<|endoftext|>",
    "gemma": "<eos>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "harmony": "<|return|>",
    "glimmer": "<|eot|>",
}
BOS = {"llama": "<|begin_of_text|>", "mistral": "<s>"}


def template(name: str) -> str:
    """A template: our own beside this file, or the published one that TRL carries."""
    own = HERE / "templates" / f"{name}.jinja"
    if own.exists():
        return own.read_text()
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


@cache
def _backend(kind: str) -> str:
    if kind == "mistral":  # as SentencePiece models come: spaces become ▁, unknown bytes their own tokens
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
        bytes_ = [f"<0x{b:02X}>" for b in range(256)]
        alphabet: list[str] = []
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # hides white space from offsets, as GPT-2's does
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        bytes_, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIAL[kind], *bytes_], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if kind == "qwen":
        tokenizer.add_tokens(
            [AddedToken(t, special=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
        )
    return tokenizer.to_str()


def tokenizer(kind: str, template_name: str | None = None) -> PreTrainedTokenizerFast:
    """A small tokenizer of a family's kind, with one of the templates."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(kind)),
        eos_token=EOS[kind],
        bos_token=BOS.get(kind),
        pad_token=SPECIAL[kind][0],
    )
    if template_name:
        made.chat_template = template(template_name)
    return made


def jsonl(path: Path, rows: list[Any]) -> str:
    """Write rows, one JSON object a line; the path as text."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def chat(question: str, answer: str) -> dict[str, Any]:
    """A row of one round."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def config(tmp_path: Path, dataset: str | list[str], task: str = "sft", **options: Any) -> SwiftConfig:
    """A configuration with its cache below `tmp_path`."""
    if options.get("streaming"):
        options.setdefault("max_steps", 10)
    else:
        options["dataset_cache_dir"] = str(tmp_path / "cache")
    names = [dataset] if isinstance(dataset, str) else dataset
    return SwiftConfig(task=task, model="unused", dataset=names, **options)


def vision_processor(kind: str, folder: Path) -> Processor:
    """The processor of one of `tests.parity.vision.KINDS`, read from its files."""
    tokens = vision.tokenizer(kind)
    made = vision.KINDS[kind](tokens)[1]
    made.chat_template = tokens.chat_template
    made.save_pretrained(folder)
    return Processor(processor_folder_and_files_digest(folder, False))

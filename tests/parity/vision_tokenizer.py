"""A tokenizer of one token a character for tiny vision-language models, with their placeholders and a chat template."""

from __future__ import annotations

from typing import Any

WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789 ?=+.\n", "<unk>"]
SPECIAL = [
    "<pad>",
    "<e>",
    "<u>",
    "<a>",
    "<image>",
    "<boi>",
    "<eoi>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
]
VOCAB = [*SPECIAL, *WORDS]
QWEN, QWEN_VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
PLACEHOLDER = {"qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "gemma3": "<boi>"}
VIDEO_PLACEHOLDER = {kind: QWEN_VIDEO for kind in PLACEHOLDER if "qwen" in kind} | {"internvl": "<|video_pad|>"}
TEMPLATE = (
    "{%% macro body(c) %%}{%% if c is string %%}{{ c }}{%% else %%}{%% for p in c %%}{%% if p['type'] == 'image' "
    "%%}%s{%% elif p['type'] == 'video' %%}%s{%% else %%}{{ p['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "{%% endmacro %%}{%% for m in messages %%}{%% if m['role'] == 'assistant' %%}<a>{%% generation %%}"
    "{{ body(m['content']) }}<e>{%% endgeneration %%}{%% else %%}<u>{{ body(m['content']) }}<e>{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<a>{%% endif %%}"
)


def tokenizer(kind: str) -> Any:
    """One token a character."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(VOCAB)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split("", "isolated")
    inner.add_special_tokens(SPECIAL)
    extra = {
        "image_token": "<|image_pad|>" if kind.startswith("qwen") else "<image>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
    }
    if kind == "internvl":
        extra |= {
            "start_image_token": "<boi>",
            "end_image_token": "<eoi>",
            "context_image_token": "<image>",
            "video_token": "<|video_pad|>",
        }
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<e>", unk_token="<unk>", extra_special_tokens=extra
    )
    made.chat_template = TEMPLATE % (PLACEHOLDER.get(kind, "<image>"), VIDEO_PLACEHOLDER.get(kind, ""))
    return made

"""Tiny models that stand for the ones which documents and examples name: the same architecture and the same number of
layers and experts, so that every layout fits or fails as on the real one.

Owns configurations only. The folders hold a tokenizer and an empty weights file: enough for everything that happens
before a run starts its processes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.data.makers import tokenizer
from tests.encoder_folders import encoder_config, encoder_tokenizer
from tests.parity import deepseek_moe

DENSE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "num_hidden_layers": 48,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
}
LATENT = {"num_key_value_heads": 64, "head_dim": 64, "qk_rope_head_dim": 64}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
ENCODERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"modernbert", "modernbert", {"num_hidden_layers": 22, "max_position_embeddings": 8192}),
    (r"distilbert", "distilbert", {"n_layers": 6, "max_position_embeddings": 512}),
    (r"bge-m3|bge-reranker-v2-m3", "xlm-roberta", {"num_hidden_layers": 24, "max_position_embeddings": 8194}),
    (r"xlm-roberta|multilingual-e5|bge-reranker", "xlm-roberta", {"max_position_embeddings": 514}),
    (r"roberta", "roberta", {"max_position_embeddings": 514}),
    (r"bert|bge|gte|minilm|^e5", "bert", {"max_position_embeddings": 512}),
)
"""The same of encoders, less `KINDS` of tests/encoder_folders.py; a name that is a decoder's too is none here."""
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"qwen3-30b-a3b|qwen3-coder", "qwen3_moe", EXPERTS),
    (r"qwen3-235b", "qwen3_moe", {**EXPERTS, "num_hidden_layers": 94}),
    (r"qwen1\.5-moe|qwen2-57b", "qwen2_moe", {**EXPERTS, "num_experts": 64, "shared_expert_intermediate_size": 512}),
    (r"moonlight|deepseek-v3|deepseek-r1$", "deepseek_v3", {"num_hidden_layers": 27, "n_routed_experts": 64, **LATENT}),
    (r"deepseek-moe", "deepseek", {"num_hidden_layers": 28, "n_routed_experts": 64}),
    (r"deepseek-v2", "deepseek_v2", {"num_hidden_layers": 27, "n_routed_experts": 64, **LATENT}),
    (r"glm-4\.5-air", "glm4_moe", {"num_hidden_layers": 46, "n_routed_experts": 128, "first_k_dense_replace": 1}),
    (r"glm-4-9b-0414", "glm4", {"num_hidden_layers": 40}),
    (r"glm-4\.\dv-flash", "glm4v", {}),
    (r"glm-4\.\dv", "glm4v_moe", {}),
    (r"emu3", "emu3", {}),
    (r"paddleocr-vl", "paddleocr_vl", {}),
    (r"gemma-4", "gemma4", {}),
    (r"gpt-oss", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}),
    (r"qwen3-next", "qwen3_next", {"num_experts": 512, "num_experts_per_tok": 10}),
    (r"qwen3\.[58].*a\d+b", "qwen3_5_moe", {}),
    (r"qwen3\.[58]", "qwen3_5", {}),
    (r"qwen3-omni", "qwen3_omni_moe", {}),
    (r"qwen2\.5-omni", "qwen2_5_omni", {}),
    (r"qwen3-vl.*a\d+b", "qwen3_vl_moe", {}),
    (r"qwen3-vl", "qwen3_vl", {}),
    (r"qwen2\.5-vl|qvq", "qwen2_5_vl", {}),
    (r"qwen2-vl|gme", "qwen2_vl", {}),
    (r"qwen2-audio", "qwen2_audio", {}),
    (r"internvl.*-hf", "internvl", {}),
    (r"internvl", "internvl_chat", {"llm_config": {}, "vision_config": {}}),
    (r"llava", "llava", {}),
    (r"llama-4", "llama4", {}),
    (r"gemma-3", "gemma3", {}),
    (r"gemma-2", "gemma2", {"num_hidden_layers": 26}),
    (r"mixtral", "mixtral", {"num_hidden_layers": 32, "num_local_experts": 8}),
    (r"r1-distill-qwen|qwen2(\.5)?-|qwen2(\.5)?$|qwq|qwen1\.5|^qwen-\d", "qwen2", {}),
    (r"qwen3", "qwen3", {}),
    (r"gte.*qwen2", "qwen2", {}),
    (r"bge.*gemma2", "gemma2", {"num_hidden_layers": 42}),
    (r"bge.*gemma", "gemma", {"num_hidden_layers": 18}),
    (r"bge-en-icl", "mistral", {"num_hidden_layers": 32}),
    (r"llama", "llama", {"num_hidden_layers": 32}),
    (r"mistral", "mistral", {"num_hidden_layers": 32}),
    (r"internlm2.*reward|internlm2", "internlm2", {}),
)
"""A pattern of the name in lower case, the model type, and what differs from `DENSE`."""


def tiny_model_folder(name: str, root: Path, reward: bool = False) -> Path | None:
    """A folder for the model of this name; None where no pattern knows it."""
    short = name.rstrip("/").split("/")[-1].lower()
    known = next((row for row in (*MODELS, *ENCODERS) if re.search(row[0], short)), None)
    if known is None:
        return None
    folder = root / (re.sub(r"[^\w.-]", "_", short) + "-reward" * reward)
    if not (folder / "config.json").exists():
        encoder = known in ENCODERS
        made = encoder_tokenizer(known[1]) if encoder else tokenizer("qwen", "qwen3")
        made.save_pretrained(folder)
        scores = encoder and "reranker" in short
        config = encoder_config_of(known[1], known[2], scores) if encoder else config_of(*known[1:], short, reward)
        (folder / "config.json").write_text(json.dumps(config))
        if not encoder:
            (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
        (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder


def encoder_config_of(model_type: str, changes: dict[str, Any], scores: bool) -> dict[str, Any]:
    """config.json of an encoder as it was pretrained, or of a reranker."""
    from transformers.models.auto import modeling_auto

    depth = {} if model_type == "distilbert" else {"num_hidden_layers": 12}
    labels = {"num_labels": 1} if scores else {}
    config = encoder_config(model_type, **{**depth, **changes}, **labels)
    names = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if scores:
        names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [names[model_type]]}


def config_of(model_type: str, changes: dict[str, Any], name: str = "", reward: bool = False) -> dict[str, Any]:
    """config.json of a model type with tiny layers; of one that is split into parts, transformers' own."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    deepseek_moe.register()
    if model_type not in (*CONFIG_MAPPING_NAMES, "deepseek", "kimi_k2"):
        return {"model_type": model_type, "architectures": [model_type], **DENSE, **changes}
    standard = AutoConfig.for_model(model_type)
    parts = getattr(standard, "sub_configs", None)
    fields = {k: v for k, v in {**DENSE, **changes}.items() if not parts and hasattr(standard, k)}
    if model_type == "qwen2":
        fields.pop("head_dim", None)
    made = json.loads(AutoConfig.for_model(model_type, **fields).to_json_string(use_diff=False))
    if "fp8" in name:
        made["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    architecture = (
        {
            "architectures": ["Qwen2ForSequenceClassification"],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
        if reward
        else {}
    )
    return {**made, **architecture, "torch_dtype": "bfloat16"}

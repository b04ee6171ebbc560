"""Chat templates by name (`--template qwen3`), for tokenizers without one and for rows that need another.

Owns the names: those with a file in `chat_templates/`, each written with `{% generation %}`, and those that other
toolkits have for models whose tokenizer brings its own template. Reading files and texts belongs to
`options.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "chat_templates"
ALIASES = {"llama2": "llama", "gemma2": "gemma", "gemma3_text": "gemma", "qwen3_instruct": "qwen3_nothinking"}
"""Other names of files."""
_NAMES = """
qwen qwen2_5_math qwen3_thinking qwen3_coder qwen3_5 qwen3_guard qwen3_emb qwen3_reranker qwq qwq_preview marco_o1
llama3_1 llama3_2 llama3_3 llama4 yi yi_coder gpt_oss seed_oss minimax minimax_m1 minimax_m2 minimax_m2_1 mistral
mistral_nemo mistral_2501 mixtral devstral phi4 gemma4 chatglm2 chatglm3 chatglm4 glm4 glm4_z1_rumination glm4_7
glm5_1 glm5_2 codegeex4 internlm internlm2 internlm3 deepseek deepseek_coder deepseek_v2_5 deepseek_v3 deepseek_v3_1
deepseek_v4 baichuan baichuan_m1 minicpm minicpm3 telechat telechat2 codefuse skywork skywork_o1 ling ling2 ring2
ring2_5 moonlight kimi_k2 mimo_rl dots1 hunyuan hunyuan_moe ernie ernie_thinking aya c4ai dbrx olmoe nemotron_h
qwen_vl qwen2_vl qwen2_5_vl qwen3_vl qwen2_5_omni qwen3_omni qvq ovis2 ovis2_5 mimo_vl llama3_2_vision llava1_5_hf
llava_next_qwen_hf llava_onevision_hf yi_vl internvl internvl2 internvl2_5 internvl3 internvl3_5 glm4v glm4_5v
minicpmv2_6 minicpmv4 minicpmv4_5 deepseek_vl2 kimi_vl idefics3 pixtral paligemma gemma3_vision phi3_vision
"""
TOKENIZERS_OWN = frozenset(_NAMES.split())
"""Names of ms-swift's templates that stand for the one that the model's tokenizer has."""
_TOKEN = re.compile(r"<\|\w+\|>|<｜\w+｜>|<(?:start|end)_of_turn>")
_INCLUDE = re.compile(r"\{% include '(_\w+\.jinja)' %\}\n")


def named_templates() -> list[str]:
    """The names with a file."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.jinja"))


def read_named_template(name: str) -> str | None:
    """The template of a name, its shared parts inserted; None where the name has no file."""
    path = FOLDER / f"{ALIASES.get(name, name)}.jinja"
    if not name.isidentifier() or name.startswith("_") or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return _INCLUDE.sub(lambda found: (FOLDER / found[1]).read_text(encoding="utf-8"), text)


def template_tokens(text: str) -> list[str]:
    """What looks like special tokens in a template, in the order of their first place."""
    return list(dict.fromkeys(_TOKEN.findall(text)))

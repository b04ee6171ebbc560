"""Names of `--agent_template`: ms-swift's names of the ways in which tool calls are written.

A chat template writes tools and tool calls itself, so a name is a condition: `data/encode_rows.py` renders a call and
looks for the text that belongs to it.
"""

from __future__ import annotations

AGENT_FORMATS = {
    "hermes": '<tool_call>\n{"name"',
    "qwen3_coder": "<function=",
    "qwen3_5": "<function=",
    "glm4_5": "<arg_key>",
    "glm4_7": "<arg_key>",
    "glm5_1": "<arg_key>",
    "llama3": '"parameters": {',
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>",
    "minimax_m2": "<minimax:tool_call>",
    "seed_oss": "<seed:tool_call>",
    "gemma4": "<|tool_call>call:",
    "kimi_k25": "<|tool_call_begin|>",
}
"""Name -> what a tool call contains."""

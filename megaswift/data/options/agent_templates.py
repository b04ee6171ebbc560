"""Names of `--agent_template`: ms-swift's names of the ways in which tool calls are written.

Most are the format of a chat template, which writes tools and calls itself: the name is then a condition, and
`data/encode/rows.py` renders a call and looks for the text that belongs to it. Others are text of their own within the
system message and the assistant's turns, whatever the chat template: `data/templates/agent_text.py` writes them.
"""

from __future__ import annotations

AGENT_FORMATS = {
    "hermes": '<tool_call>\n{"name"',
    "hunyuan_hermes": "<tool_calls>\n<tool_call>",
    "hy_v3_preview": "<tool_sep>\n<arg_key>",
    "hy_v3": "<tool_sep:opensource>",
    "youtu": '<tool_call>{"name"',
    "minicpm5": '<function name="',
    "qwen3_coder": "<function=",
    "qwen3_5": "<function=",
    "glm4_5": "<arg_key>",
    "glm4_7": "<arg_key>",
    "glm5_1": "<arg_key>",
    "glm4": "megaswiftprobe\n{",
    "chatglm4": "megaswiftprobe\n{",
    "llama3": '"parameters": {',
    "llama4": '"parameters": {',
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>",
    "deepseek_v4": "｜DSML｜invoke name=",
    "minimax_m2": "<minimax:tool_call>",
    "minimax_m3": "]<]minimax[>[<invoke name=",
    "seed_oss": "<seed:tool_call>",
    "gemma4": "<|tool_call>call:",
    "kimi_k25": "<|tool_call_begin|>",
    "kimi_k3": "<|open|>call tool=",
}
"""Name -> what a call of the tool `megaswiftprobe` contains where the chat template writes it."""
AGENT_TEXTS = (
    "react_en",
    "react_zh",
    "react_grpo",
    "qwen_en",
    "qwen_zh",
    "qwen_en_parallel",
    "qwen_zh_parallel",
)
"""Names of formats that are written as text."""
REFUSED_AGENT_FORMATS = {
    "toolbench": (
        "has instructions that are prose of the ToolBench data set, which its rows bring along",
        "keep the system message of the rows (or --system FILE), rows without tools, and --agent_template react_en, "
        "which writes calls and results alike",
    )
}
"""Name -> (why megaswift does not write it, what does)."""
AGENT_TEMPLATES = (*AGENT_FORMATS, *AGENT_TEXTS, *REFUSED_AGENT_FORMATS)
"""What --agent_template takes."""

"""The system messages of `--agent_template` formats that are text: ReAct (arXiv 2210.03629) and Qwen-Agent's.

Owns the fixed words that models of these formats were trained with, equal to what ms-swift's templates of the same
names write. Turns belong to `agent_text.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.data.untokenized_sample import RowError, describe_value


@dataclass(frozen=True)
class AgentTextFormat:
    """One format. `{tools}` and `{names}` stand for the tools' descriptions and their names in `instructions`."""

    action: str
    arguments: str
    result: str
    """The words before a call's name, its arguments and its result."""
    instructions: str
    tool: str
    """The text of one tool: `{name}`, `{human}` (name for people), `{description}` and `{parameters}`."""
    keeps_system: bool
    """Whether the row's own system message stays, in front of the instructions."""
    result_after_user: bool = False
    """Whether a result may follow a user's message that no call follows."""

    def system(self, tools: Sequence[Mapping[str, Any]], own: str) -> str:
        """The system message that describes `tools`."""
        described = [_described(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        filled = self.instructions.replace("{names}", ",".join(one["name"] for one in described))
        before, _, behind = filled.partition("{tools}")
        text = before + "\n\n".join(self.tool.format_map(one) for one in described) + behind
        return f"{own}\n\n{text}" if self.keeps_system else text


def _described(tool: Mapping[str, Any], where: str) -> dict[str, str]:
    function = tool["function"] if "type" in tool and "function" in tool else tool
    if not isinstance(function, Mapping):
        raise RowError(where, describe_value(function), "an object with name, description and parameters")
    name = function.get("name_for_model") or function.get("name")
    description = function.get("description")
    description = function.get("description_for_model") if description is None else description
    if not isinstance(name, str) or not isinstance(description, str):
        raise RowError(where, describe_value(dict(function)), "a tool with a name and a description")
    parameters = function.get("parameters") or {}
    return {
        "name": name,
        "human": str(function.get("name_for_human") or name),
        "description": description,
        "parameters": parameters if isinstance(parameters, str) else json.dumps(parameters, ensure_ascii=False),
    }


_JSON = {"en": "Format the arguments as a JSON object.", "zh": "此工具的输入应为JSON对象。"}
_REACT_TOOL = (
    "{name}: Call this tool to interact with the {human} API. What is the {human} API useful for? {description} "
    "Parameters: {parameters} " + _JSON["en"]
)
_REACT_EN = """\
Answer the following questions as best you can. You have access to the following tools:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can be repeated zero or more times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!
"""
_REACT_ZH = """\
尽可能地回答以下问题。你可以使用以下工具:

{tools}

请按照以下格式进行:

Question: 需要你回答的输入问题
Thought: 你应该总是思考该做什么
Action: 需要使用的工具，应该是[{names}]中的一个
Action Input: 传入工具的内容
Observation: 行动的结果
... (这个Thought/Action/Action Input/Observation可以重复N次)
Thought: 我现在知道最后的答案
Final Answer: 对原始输入问题的最终答案

现在开始！
"""
_REACT_GRPO = (
    "A conversation for tool calling between User and Assistant. The user asks a question which may be solved by "
    "calling tools, and the Assistant solves it. The assistant first thinks about the reasoning process in the mind "
    "and then provides the user with the answer. The reasoning process should be enclosed within <think> </think>tags "
    "and answer should follow the ReACT format(Action:xxx\nAction Input:xxx), i.e., <think> reasoning process here "
    "</think> Action: action here\nAction Input: parameters here\n\n"
    "Answer the following questions as best as you can. You have access to the following tools:\n\n"
    """{tools}

Use the following format:

<think>you should always think about what to do</think>
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action, given by the actual calling
... (this Thought/Action/Action Input/Observation can be repeated zero or more times)
Final Answer: the final answer to the original input question

Begin!
"""
)
_QWEN_TOOL_EN = "### {human}\n\n{name}: {description} Parameters: {parameters} " + _JSON["en"]
_QWEN_TOOL_ZH = "### {human}\n\n{name}: {description} 输入参数：{parameters} " + _JSON["zh"]
_QWEN_EN = """\
# Tools

## You have access to the following tools:

{tools}

"""
_QWEN_ZH = """\
# 工具

## 你拥有如下工具：

{tools}

"""
_QWEN_EN_ONE = (
    "## When you need to call a tool, please insert the following command in your reply, which can be called zero or "
    "multiple times according to your needs:\n\n"
    """\
✿FUNCTION✿: The tool to use, should be one of [{names}]
✿ARGS✿: The input of the tool
✿RESULT✿: Tool results
"""
)
_QWEN_EN_MANY = """\
## Insert the following command in your reply when you need to call N tools in parallel:

✿FUNCTION✿: The name of tool 1, should be one of [{names}]
✿ARGS✿: The input of tool 1
✿FUNCTION✿: The name of tool 2
✿ARGS✿: The input of tool 2
...
✿FUNCTION✿: The name of tool N
✿ARGS✿: The input of tool N
✿RESULT✿: The result of tool 1
✿RESULT✿: The result of tool 2
...
✿RESULT✿: he result of tool N
"""
_QWEN_EN_REPLY = "✿RETURN✿: Reply based on tool results. Images need to be rendered as ![](url)"
_QWEN_ZH_ONE = """\
## 你可以在回复中插入零次、一次或多次以下命令以调用工具：

✿FUNCTION✿: 工具名称，必须是[{names}]之一。
✿ARGS✿: 工具输入
✿RESULT✿: 工具结果
"""
_QWEN_ZH_MANY = """\
## 你可以在回复中插入以下命令以并行调用N个工具：

✿FUNCTION✿: 工具1的名称，必须是[{names}]之一
✿ARGS✿: 工具1的输入
✿FUNCTION✿: 工具2的名称
✿ARGS✿: 工具2的输入
...
✿FUNCTION✿: 工具N的名称
✿ARGS✿: 工具N的输入
✿RESULT✿: 工具1的结果
✿RESULT✿: 工具2的结果
...
✿RESULT✿: 工具N的结果
"""
_QWEN_ZH_REPLY = "✿RETURN✿: 根据工具结果进行回复，需将图片用![](url)渲染出来"
_REACT_WORDS = ("Action:", "Action Input:", "Observation:")
_QWEN_WORDS = ("✿FUNCTION✿:", "✿ARGS✿:", "✿RESULT✿:")
_REACT_TOOL_ZH = (
    "{name}: 调用此工具与 {human} API 进行交互。{human} 有什么用？{description} 输入参数：{parameters} " + _JSON["zh"]
)
AGENT_TEXT_FORMATS = {
    "react_en": AgentTextFormat(*_REACT_WORDS, _REACT_EN, _REACT_TOOL, False, True),
    "react_zh": AgentTextFormat(*_REACT_WORDS, _REACT_ZH, _REACT_TOOL_ZH, False, True),
    "react_grpo": AgentTextFormat(*_REACT_WORDS, _REACT_GRPO, _REACT_TOOL, False),
    "qwen_en": AgentTextFormat(*_QWEN_WORDS, _QWEN_EN + _QWEN_EN_ONE + _QWEN_EN_REPLY, _QWEN_TOOL_EN, True),
    "qwen_zh": AgentTextFormat(*_QWEN_WORDS, _QWEN_ZH + _QWEN_ZH_ONE + _QWEN_ZH_REPLY, _QWEN_TOOL_ZH, True),
    "qwen_en_parallel": AgentTextFormat(*_QWEN_WORDS, _QWEN_EN + _QWEN_EN_MANY + _QWEN_EN_REPLY, _QWEN_TOOL_EN, True),
    "qwen_zh_parallel": AgentTextFormat(*_QWEN_WORDS, _QWEN_ZH + _QWEN_ZH_MANY + _QWEN_ZH_REPLY, _QWEN_TOOL_ZH, True),
}
"""By the names of `--agent_template`."""

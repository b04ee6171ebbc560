"""Kinds of chat templates, each as Jinja and as a plain Python rendering that knows which characters are the
assistant's: the oracle of loss masks. A fault can be planted in the Jinja."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

TOOL_NAMES = ("add", "get_weather", "search")
TEMPLATE_FAULTS = (
    "user_marked",
    "header_marked",
    "end_unmarked",
    "first_character_unmarked",
    "last_answer_unmarked",
    "calls_unmarked",
    "all_marked",
    "no_end",
    "answer_cut",
    "answer_lower",
    "tools_dropped",
    "tool_parameters_dropped",
    "calls_dropped",
    "call_arguments_dropped",
    "results_dropped",
    "system_dropped",
    "first_user_dropped",
    "reasoning_dropped",
    "reasoning_unmarked",
    "answer_in_prompt",
)
MARKED = ("user_marked", "header_marked", "all_marked", "calls_unmarked", "reasoning_unmarked") + TEMPLATE_FAULTS[2:5]
"""Those of {% generation %}."""
OPENERS = {
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>"),
    "header": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "words": ("{Role}: ", "</s>"),
    "inst": ("", "</s>"),
}


@dataclass(frozen=True)
class TemplateKind:
    """One way to write a chat template."""

    frame: str = "chatml"
    marked: bool = False
    """With {% generation %}."""
    strip: bool = False
    """Contents are trimmed."""
    newline: bool = True
    """A line end after each turn."""
    thinking: str = "kept"
    """`kept`: as in the content; `history`: removed before the last question; `empty`: the same, and an empty block in
    answers without reasoning after it; `field`: reasoning_content, written as a block."""
    system: str = "own"
    """A turn of its `own`, or `merged` into the first user message."""
    calls: str = "hermes"
    """`hermes`: JSON in tags; `list`: a JSON list behind a word."""
    begin: bool = False
    """Begins with a special token."""

    @property
    def name(self) -> str:
        """For test ids."""
        flags = [n for n in ("marked", "strip", "newline", "begin") if getattr(self, n)]
        return "-".join([self.frame, *flags, self.thinking, self.system, self.calls])


def all_kinds() -> list[TemplateKind]:
    """A covering choice: every pair of values of two fields that can go together occurs."""
    values = product(OPENERS, (False, True), (False, True), (False, True), ("kept", "history", "empty", "field"))
    rest = [("own", "hermes", False), ("merged", "list", True), ("own", "list", True), ("merged", "hermes", False)]
    kinds = [TemplateKind(*one, *rest[i % 4]) for i, one in enumerate(values)]
    return [k for i, k in enumerate(kinds) if (i // 4 + i) % 2 == 0]


def _opener(kind: TemplateKind, role: str) -> str:
    role = "user" if role == "tool" and kind.frame != "header" else role
    return OPENERS[kind.frame][0].format(role=role, Role=role.upper())


def _think_split(content: str) -> tuple[str, str]:
    if "</think>" not in content:
        return "", content
    head, _, tail = content.rpartition("</think>")
    return head.rpartition("<think>")[2].strip("\n"), tail.lstrip("\n")


def rendered(kind: TemplateKind, row: dict[str, Any], prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
    """(text, the characters of each assistant turn with its end) of a row: what the sound template must give."""
    messages, tools = row["messages"], row.get("tools")
    _, end = OPENERS[kind.frame]
    line = "\n" if kind.newline else ""
    text, spans = "<|begin|>" if kind.begin else "", []
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    preface = ""
    if messages[0]["role"] == "system":
        preface = messages[0]["content"].strip() if kind.strip else messages[0]["content"]
        messages, last = messages[1:], last - 1
    if tools:
        preface += "\n\n# Tools\n" + "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools)
    if preface and (kind.system == "own" and kind.frame != "inst"):
        text += _opener(kind, "system") + preface + end + line
        preface = ""
    for i, message in enumerate(messages):
        content = message["content"].strip() if kind.strip else message["content"]
        if message["role"] != "assistant":
            if message["role"] == "tool":
                content = "<tool_response>\n" + content + "\n</tool_response>"
            if i == 0 and preface:
                content = preface + "\n\n" + content
            text += (
                f"[INST] {content} [/INST]"
                if kind.frame == "inst"
                else _opener(kind, message["role"]) + content + end + line
            )
            continue
        text += _opener(kind, "assistant")
        body = _body(kind, message, content, i > last)
        if kind.thinking == "empty" and i > last and not _think_split(content)[0]:
            text += "<think>\n\n</think>\n\n"
        spans.append((len(text), len(text) + len(body) + len(end)))
        text += body + end + line
    return text + _opener(kind, "assistant") * prompt, spans


def _body(kind: TemplateKind, message: dict[str, Any], content: str, current: bool) -> str:
    thought, answer = _think_split(content)
    body = content
    if kind.thinking in ("history", "empty"):
        body = f"<think>\n{thought}\n</think>\n\n{answer}" if thought and current else answer
    elif kind.thinking == "field":
        body = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message.get("reasoning_content") else ""
        body += content
    calls = [c["function"] for c in message.get("tool_calls", ())]
    if calls and kind.calls == "list":
        return body + "[TOOL_CALLS]" + json.dumps(calls, ensure_ascii=False)
    return body + "".join(f"\n<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls)


def jinja(kind: TemplateKind, fault: str = "") -> str:
    """The template, with one of TEMPLATE_FAULTS planted."""
    _, end = OPENERS[kind.frame]
    line = "\\n" if kind.newline else ""
    gen = ("{% generation %}", "{% endgeneration %}") if kind.marked else ("", "")
    trim = " | trim" if kind.strip else ""
    own = kind.system == "own" and kind.frame != "inst"
    out = ["{{ '<|begin|>' }}" if kind.begin else ""]
    everything = gen if fault == "all_marked" else ("", "")
    out += [everything[0], "{%- set ns = namespace(last=-1, preface='', dropped=false) -%}"]
    out += ["{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"]
    out += ["{%- if m.role == 'system' -%}", _set_preface(fault, trim), "{%- endif -%}{%- endfor -%}"]
    out += [_tools(fault)]
    if own:
        opener = _escaped(_opener(kind, "system"))
        out += [f"{{%- if ns.preface -%}}{{{{ '{opener}' + ns.preface + '{end}{line}' }}}}{{%- endif -%}}"]
        out += ["{%- set ns.preface = '' -%}"]
    out += ["{%- for m in messages -%}", f"{{%- set content = m.content{trim} -%}}"]
    out += [_others(kind, fault, gen), "{%- if m.role == 'assistant' -%}", _answer(kind, fault, gen)]
    out += ["{%- endif -%}{%- endfor -%}"]
    opener = _escaped(_opener(kind, "assistant"))
    out += [f"{{%- if add_generation_prompt -%}}{{{{ '{opener}' }}}}{{%- endif -%}}" if opener else "", everything[1]]
    return "".join(out)


def _escaped(text: str) -> str:
    return text.replace("\n", "\\n")


def _set_preface(fault: str, trim: str) -> str:
    return "" if fault == "system_dropped" else f"{{%- set ns.preface = m.content{trim} -%}}"


def _tools(fault: str) -> str:
    if fault == "tools_dropped":
        return ""
    written = "t.function.name" if fault == "tool_parameters_dropped" else "t | tojson"
    return (
        "{%- if tools -%}{%- set ns.preface = ns.preface + '\\n\\n# Tools\\n' -%}{%- for t in tools -%}"
        f"{{%- set ns.preface = ns.preface + {written} + '\\n' -%}}{{%- endfor -%}}{{%- endif -%}}"
    )


def _others(kind: TemplateKind, fault: str, gen: tuple[str, str]) -> str:
    _, end = OPENERS[kind.frame]
    line = "\\n" if kind.newline else ""
    before, after = gen if fault == "user_marked" else ("", "")
    roles = "['user']" if fault == "results_dropped" else "['user', 'tool']"
    dropped = " and loop.index0 != ns.last" if fault == "first_user_dropped" else ""
    out = [f"{{%- if m.role in {roles}{dropped} -%}}"]
    out += ["{%- if m.role == 'tool' -%}{%- set content = '<tool_response>\\n' + content + '\\n</tool_response>' -%}"]
    out += ["{%- endif -%}{%- if ns.preface -%}{%- set content = ns.preface + '\\n\\n' + content -%}"]
    out += ["{%- set ns.preface = '' -%}{%- endif -%}"]
    if fault == "answer_in_prompt":
        out += ["{%- set content = content + ' (' + messages[-1].content + ')' -%}"]
    if kind.frame == "inst":
        out += ["{{ '[INST] ' }}", before, "{{ content }}", after, "{{ ' [/INST]' }}"]
    else:
        user, tool = _escaped(_opener(kind, "user")), _escaped(_opener(kind, "tool"))
        out += [f"{{{{ '{tool}' if m.role == 'tool' else '{user}' }}}}", before, "{{ content }}", after]
        out += [f"{{{{ '{end}{line}' }}}}"]
    return "".join([*out, "{%- endif -%}"])


def _answer(kind: TemplateKind, fault: str, gen: tuple[str, str]) -> str:
    _, end = OPENERS[kind.frame]
    line = "\\n" if kind.newline else ""
    opener = _escaped(_opener(kind, "assistant"))
    gen = ("", "") if fault == "all_marked" else gen
    out = ["{%- set thought = '' -%}{%- set answer = content -%}{%- if '</think>' in content -%}"]
    out += ["{%- set thought = content.split('</think>')[:-1] | join('</think>') -%}"]
    out += ["{%- set thought = thought.split('<think>')[-1].strip('\\n') -%}"]
    out += ["{%- set answer = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"]
    first = f"{{{{ '{opener}' }}}}" if opener else ""
    out += [gen[0] + first if fault == "header_marked" else first]
    if kind.thinking == "empty":
        out += ["{%- if not thought and loop.index0 > ns.last -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"]
    if fault == "first_character_unmarked":
        out += ["{{ answer[:1] }}{%- set answer = answer[1:] -%}{%- set content = content[1:] -%}"]
    out += ["" if fault in ("header_marked", "reasoning_unmarked") else gen[0]]
    body = _jinja_body(kind, fault, gen)
    out += [body]
    ending = "" if fault == "no_end" else f"{{{{ '{end}' }}}}"
    out += [gen[1] + ending if fault == "end_unmarked" else "" if fault == "calls_unmarked" else ending + gen[1]]
    out += [ending if fault == "calls_unmarked" else "", f"{{{{ '{line}' }}}}" if line else ""]
    text = "".join(out)
    if fault == "last_answer_unmarked" and gen[0]:
        plain = text.replace(gen[0], "").replace(gen[1], "")
        return f"{{%- if loop.last -%}}{plain}{{%- else -%}}{text}{{%- endif -%}}"
    return text


def _jinja_body(kind: TemplateKind, fault: str, gen: tuple[str, str]) -> str:
    cut = {"answer_cut": "[:3]", "answer_lower": " | lower"}.get(fault, "")
    reopen = gen[0] if fault == "reasoning_unmarked" else ""
    block = "{{ '<think>\\n' + %s + '\\n</think>\\n\\n' }}"
    if kind.thinking in ("history", "empty"):
        when = "false" if fault == "reasoning_dropped" else "thought and loop.index0 > ns.last"
        body = f"{{%- if {when} -%}}" + block % "thought" + f"{{%- endif -%}}{reopen}{{{{ (answer){cut} }}}}"
    elif kind.thinking == "field":
        when = "false" if fault == "reasoning_dropped" else "m.reasoning_content"
        body = (
            f"{{%- if {when} -%}}" + block % "m.reasoning_content" + f"{{%- endif -%}}{reopen}{{{{ (content){cut} }}}}"
        )
    else:
        body = f"{reopen}{{{{ ({'answer' if fault == 'reasoning_dropped' else 'content'}){cut} }}}}"
    body += gen[1] if fault == "calls_unmarked" else ""
    if fault == "calls_dropped":
        return body
    written = "{'name': c.function.name}" if fault == "call_arguments_dropped" else "c.function"
    if kind.calls == "list":
        calls = "{%- set ns.calls = [] -%}{%- for c in m.tool_calls -%}{%- set ns.calls = ns.calls + [" + written
        calls += "] -%}{%- endfor -%}{{ '[TOOL_CALLS]' + ns.calls | tojson }}"
    else:
        calls = "{%- for c in m.tool_calls -%}{{ '\\n<tool_call>\\n' + (" + written
        calls += ") | tojson + '\\n</tool_call>' }}{%- endfor -%}"
    return body + "{%- if m.tool_calls -%}" + calls + "{%- endif -%}"


WORDS = (
    "a",
    "Paris",
    "the answer",
    "assistant",
    "user",
    "I",
    "42",
    "naïve 🙂",
    "  two  spaces ",
    "x\ny",
    "INST",
    "think",
)


def conversation(rng: random.Random, kind: TemplateKind) -> dict[str, Any]:
    """A random conversation that the kind can render: rounds, tool calls, reasoning, repeated and tiny texts."""

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2, 6)))) + rng.choice(("", "", "\n", " "))

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": "Be brief. " + text().strip()})
    tools = [_tool(name, rng) for name in TOOL_NAMES[: rng.randint(1, 3)]] if rng.random() < 0.4 else None
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        while tools and rng.random() < 0.5:
            calls = [_call(rng, tools) for _ in range(rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": rng.choice(("", text())), "tool_calls": calls})
            messages += [{"role": "tool", "content": text()} for _ in calls]
        answer: dict[str, Any] = {"role": "assistant", "content": text()}
        if rng.random() < 0.3:
            if kind.thinking == "field":
                answer["reasoning_content"] = "so " + text().strip()
            else:
                answer["content"] = f"<think>\nso {text().strip()}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    return {"messages": messages} | ({"tools": tools} if tools else {})


def _tool(name: str, rng: random.Random) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": f"the {key}"} for key in rng.sample(("city", "a", "b"), 2)}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": schema}}


def _call(rng: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    function = rng.choice(tools)["function"]
    arguments = {
        key: rng.choice((1, 2.5, "Łódź", 'a "quoted" word', True)) for key in function["parameters"]["properties"]
    }
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def conversations(seed: int, count: int, kind: TemplateKind) -> Iterator[dict[str, Any]]:
    """`count` random conversations."""
    rng = random.Random(seed)
    return (conversation(rng, kind) for _ in range(count))


def unmarked(kind: TemplateKind) -> TemplateKind:
    """The same without {% generation %}."""
    return replace(kind, marked=False)

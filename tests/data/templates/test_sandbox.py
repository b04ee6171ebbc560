"""Chat templates without end, and what transformers renders with the limits in place."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

from megaswift.data.options.loss_scale import LossScale
from megaswift.data.templates import sandbox
from megaswift.data.templates.render import ChatRenderer, ChatTemplateTexts
from megaswift.data.tokenizer import load_tokenizer
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, checked_conversation_sample
from megaswift.errors import DataError, WeightsError
from tests.data.makers import chat, tokenizer

SAMPLE = checked_conversation_sample(chat("q", "a")["messages"], "messages")


def rendered(template: str, sample: UntokenizedSample = SAMPLE) -> str:
    return ChatRenderer(ChatTemplateTexts({"default": template}), LossScale("all")).render(sample).text


LARGE = "of more than [0-9,]+ characters or items"
ENDLESS = [
    ("{{ 'x' * 10**9 }}", LARGE),
    ("{{ [0] * 1000000000 }}", LARGE),
    ("{% generation %}{{ 1000000000 * 'x' }}{% endgeneration %}", LARGE),
    ("{{ 'x' | center(1000000000) }}", LARGE),
    ("{{ 'x'.ljust(1000000000) }}", LARGE),
    ("{{ messages | tojson(indent=1000000000) }}", LARGE),
    ("{{ '%1000000000d' % 1 }}", "a width of millions"),
    ("{{ '%1000000000d' | format(1) }}", "a width of millions"),
    ("{{ '{:1000000000}'.format(1) }}", "a width of millions"),
    ("{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}", LARGE),
    ("{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}", LARGE),
    ("{{ range(99999) | list | join('y' * 1000000) }}", LARGE),
    ("{{ 9 ** 99999999 }}", LARGE),
    ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", LARGE),
    ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", LARGE),
    ("{% macro f(s, n) %}{% if n %}{{ f(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ f('x', 60) }}", LARGE),
    ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", LARGE),
    ("{% set x %}{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}", LARGE),
    ("{{ 1 }}" + "x" * sandbox.MOST_SOURCE, "a template of 1,048,583 characters"),
]


STEPS = "loop iterations and calls|seconds"
MUCH = "more than [0-9,]+ bytes for one conversation"
TEXT = "{% set a = 'x' * 1000000 %}{% set a = a ~ a ~ a ~ a %}{% set a = a ~ a ~ a ~ a %}"
"""16 million letters."""
TWICE = "{% set n = namespace(l=[1], t=(1,)) %}{% for i in range(60) %}"
"""The beginning of lists that hold another list twice, sixty times over: no memory until one is written."""
SIBLINGS = [
    ("{{ ('a' * 1000000).translate({97: 'b' * 1000}) | length }}", "the method translate of a str"),
    ("{{ ('a' | attr('translate'))({97: 'b'}) }}", "the method translate of a str"),
    ("{{ (1).to_bytes(10 ** 9, 'big') | length }}", "the method to_bytes of a int"),
    ("{{ 'a'.maketrans({'a': 'b'}) }}", "the method maketrans"),
    ("{{ {}.fromkeys([1]) }}", "the method fromkeys"),
    ("{{ 'a'.encode() }}", "the method encode of a str"),
    ("{{ ('\t' * 1000000).expandtabs(1000000) | length }}", LARGE),
    ("{{ 'x'.zfill(1000000000) }}", LARGE),
    ("{{ ('\n' * 1000000) | indent(1000000) | length }}", LARGE),
    ("{{ ('\n' * 1000000) | indent('y' * 1000000) | length }}", LARGE),
    ("{{ ([('x' * 1000000)] * 1000000) | join('') | length }}", LARGE),
    ("{{ ''.join([('x' * 1000000)] * 1000000) | length }}", LARGE),
    ("{{ ''.join(([('x' * 1000000)] * 1000) | map('trim')) | length }}", MUCH),
    ("{{ range(100000) | join('x' * 1000000) | length }}", LARGE),
    ("{{ ([('x' * 1000000)] * 1000000) | map('upper') | list | length }}", MUCH),
    ("{{ ([('x' * 1000000)] * 1000000) | tojson | length }}", LARGE),
    ("{{ ([('x' * 1000000)] * 1000000) | string | length }}", LARGE),
    ("{{ [('x' * 1000000)] * 1000000 }}", LARGE),
    (TEXT + "{{ (" + " ~ ".join(["a"] * 100) + ") | length }}", LARGE),
    (TEXT + "{{ (" + " + ".join(["a"] * 100) + ") | length }}", LARGE),
    (TEXT + "{{ (('%s' * 100) % (" + ", ".join(["a"] * 100) + ")) | length }}", LARGE),
    ("{{ ('%.999999f' * 100000) % (" + ", ".join(["1.5"] * 10) + ") }}", LARGE),
    (TEXT + "{{ ('{0}' * 1000).format(a) | length }}", LARGE),
    ("{{ ('{0:999999}' * 100000).format(1) | length }}", LARGE),
    (TEXT + "{{ ('{x}' * 1000).format_map({'x': a}) | length }}", LARGE),
    (TEXT + "{{ [" + ", ".join(f"a[{i}:]" for i in range(1, 99)) + "] | length }}", MUCH),
    (TEXT + "".join("{% set v%d = a[%d:] %%}".replace("{%", "{%%", 1) % (i, i) for i in range(1, 99)), MUCH),
    (TEXT + "{{ a | list | length }}", LARGE),
    (TEXT + "{{ a.split('x') | length }}", LARGE),
    ("{{ strftime_now('%c' * 1048577) }}", LARGE),
    ("{{ ([[1]] * 1000000) | sum(start=[]) | length }}", "a sum of texts or lists|" + LARGE),
    (TWICE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}", LARGE),
    (TWICE + "{% set n.l = [n.l] + [n.l] %}{% endfor %}{{ n.l == 1 }}", LARGE),
    (TWICE + "{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l | tojson }}", LARGE),
    (TWICE + "{% set n.l = dict(a=n.l, b=n.l) %}{% endfor %}{{ n.l ~ '' }}", LARGE),
    (TWICE + "{% set n.l = namespace(a=n.l, b=n.l) %}{% endfor %}{{ n.l }}", LARGE),
    (TWICE + "{% set n.t = (n.t, n.t) %}{% endfor %}{{ {n.t: 1} | length }}", LARGE),
    (TEXT + "{% for i in range(9999) %}{% if a[1:] == a[2:] %}{% endif %}{% endfor %}", MUCH),
    (TEXT + "{% for i in range(99999) %}{% if 'y' in a %}{% endif %}{% endfor %}", "loop iterations and calls|seconds"),
    (
        TEXT + "{% for i in range(99999) %}{% if a is upper %}{% endif %}{% endfor %}",
        "loop iterations and calls|seconds",
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize(("template", "said"), SIBLINGS, ids=[str(i) for i in range(len(SIBLINGS))])
def test_a_template_that_takes_memory_or_time_in_another_way_is_refused(template: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(DataError, match=f"the chat template: is not allowed: .*({said})"):
        rendered(template)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("index", [0, 2, 7, 14, 21, 25, 26])
def test_memory_stays_below_the_limit(index: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            rendered(SIBLINGS[index][0])
        assert tracemalloc.get_traced_memory()[1] < 3e8
    finally:
        tracemalloc.stop()


def test_a_long_conversation_may_take_more() -> None:
    """What a rendering may make grows with its conversation."""
    text = "word " * 800000
    template = "{% for m in messages %}" + "{% set c = m.content | trim %}" * 100 + "{{ c }}{% endfor %}"
    long = checked_conversation_sample(chat(text, "a")["messages"], "messages")
    assert rendered(template, long).startswith("word word")


@pytest.mark.parametrize(("template", "said"), ENDLESS)
def test_a_template_without_end_is_refused_at_once(template: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(DataError, match=f"the chat template: is not allowed: .*{said}(.|\n)*--chat_template FILE"):
        rendered(template)
    assert time.process_time() - began < 2


def test_steps_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 5000)
    loops = "{% set r = range(90) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    calls = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    for template in (loops, calls, "{% for i in range(9999) %}{% endfor %}"):
        with pytest.raises(DataError, match="more than 5,000 loop iterations and calls"):
            rendered(template)
    monkeypatch.setattr(sandbox, "MOST_SECONDS", -1.0)
    with pytest.raises(DataError, match="seconds for one conversation"):
        rendered("{% for i in range(2000) %}{% endfor %}")


WRONG = [
    "{{ 1 / 0 }}",
    "{{ messages[9].x.y }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ x() }}",
    "{{ 'a' + 1 }}",
]
WRONG += [
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum() }}",
]


@pytest.mark.parametrize("template", WRONG)
def test_a_template_that_fails_refuses_the_row(template: str) -> None:
    with pytest.raises(RowError, match="the chat template rejects this conversation"):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "line"), [("{{ 1", 1), ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", 2), ("{% foo %}", 1)]
)
def test_a_template_with_a_syntax_error_is_refused_itself(template: str, line: int) -> None:
    """Not row by row: no row can be rendered, and `--strict false` must not skip them all."""
    with pytest.raises(DataError, match=rf"the chat template: is not valid Jinja: line {line}: ") as caught:
        rendered(template)
    assert "--chat_template FILE" in caught.value.problems[0].fix


SAME = [
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.last }}{{ loop.length }}{{ m.role ~ '\\n' }}{% endfor %}",
    "{% for m in messages %}{{ loop.revindex }}{{ loop.first }}{% endfor %}",
    "{% for k, v in messages[0].items() if v %}{{ k }}={{ v }}{% else %}none{% endfor %}",
    "{% for m in messages recursive %}{{ loop(m.parts) if m.parts else m.content }}{% endfor %}",
    "{% for a in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{% if a == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a * 2 ** 3 %}{% endfor %}{{ ns.a }}",
    "{{ '%05d|%s' % (3, 4) }}",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f(1) %}in{% endcall %}{{ '-' * 80 }}",
    "{{ '{:>5}|{}'.format(1, 1700000000) }}{{ messages | tojson(indent=2) }}{{ 'a,b' | replace(',', ';') }}",
    "{{ messages | map(attribute='role') | join(' ') }}{{ ', '.join(['a', 'b']) }}{{ range(5) | batch(2, 0) | list }}",
    "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | trim | length }}",
    "{% filter upper %}y{% endfilter %}{{ 'a\\nb' | indent(4) }}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a ~ b ~ ([a] + [b]) }}{% endfor %}{{ 'abc'[1:] ~ messages[::-1][0].role }}",
    "{{ 'a b c'.split(' ', 1) }}{{ 'a\\tb'.expandtabs(4) }}{{ '%s-%s' % ('a', 'b') }}{{ '{0} {x}'.format(1, x=2) }}",
    "{{ {'a': [1, {'b': none}]} }}{{ (1, 2) }}{{ [3, 1] | sort }}{{ [1, 2] | sum }}{{ 'b' in 'abc' }}{{ 1 in [1] }}",
    "{{ none }}{{ 1.5 }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'A' is upper }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(', ') %}{{ j() }}x{{ j() }}y",
    "{{ '<a>' | e }}{{ ('<a>' | safe) ~ '<b>' }}{{ {'a': 1}.items() | list }}{{ dict(a=1) | tojson }}",
]


@pytest.mark.parametrize("template", SAME)
def test_other_templates_render_as_in_the_plain_sandbox(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [*chat("q", "a")["messages"], {"role": "user", "content": "", "parts": [{"content": "z"}]}]

    def render() -> Any:
        chat_template_utils._compile_jinja_template.cache_clear()
        return chat_template_utils.render_jinja_template([messages], chat_template=template)[0]

    ours = render()
    with monkeypatch.context() as patch:
        plain = sandbox.ImmutableSandboxedEnvironment
        patch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", plain)
        assert render() == ours and ours[0]
        chat_template_utils._compile_jinja_template.cache_clear()


def test_the_limits_hold_for_transformers_own_calls_and_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = tokenizer("qwen")
    tok.chat_template = "{{ 'x' * 3000000 }}"
    with pytest.raises(TemplateError, match="more than 1,048,576"):
        tok.apply_chat_template(chat("q", "a")["messages"], tokenize=False)
    plain = sandbox.ImmutableSandboxedEnvironment
    assert len(plain().from_string(tok.chat_template).render()) == 3000000


BROKEN = [
    ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer.json", b"[]"),
    ("tokenizer.json", b"[" * 100000),
    ("tokenizer_config.json", b'{"model_max_length": "x"}'),
    ("tokenizer_config.json", b'{"tokenizer_class": 7}'),
    ("tokenizer_config.json", b"[" * 100000),
    ("chat_template.jinja", b"\xff\xfe{{"),
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_broken_tokenizer_files_are_one_message(tmp_path: Any, name: str, content: bytes) -> None:
    tokenizer("qwen", "qwen2_5").save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match="tokenizer in .*: cannot be read: .+\n    try: other files"):
        load_tokenizer(tmp_path, False, "other files")


def test_a_token_of_an_absurd_id_is_refused(tmp_path: Any) -> None:
    """tokenizers writes a table of every id up to the largest: minutes."""
    tokenizer("qwen", "qwen2_5").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"][next(reversed(content["model"]["vocab"]))] = 1 << 31
    path.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="token ID .* exceeds the maximum"):
        load_tokenizer(tmp_path, False, "other files")

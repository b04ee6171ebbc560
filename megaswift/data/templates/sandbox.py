"""Limits on computation and output of chat templates, which are untrusted input.

jinja2's sandbox limits `range` alone: `'x' * 10**9`, nested loops and texts that double have no end there. Owns the
environment that counts, which takes the place of the sandbox in transformers (`install_template_limits`), so that
every rendering of a process is limited: `apply_chat_template` too. What an operator, a filter or a method makes is
measured before it is made where its size follows from its arguments, and counted afterwards in any case; methods are
those of a list. A legitimate conversation is far below every limit.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import BuiltinFunctionType
from typing import Any, cast

import jinja2
from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

MOST_SOURCE = 1 << 20
"""Characters of a template; the longest published ones have some 20,000."""
MOST_TEXT = 1 << 26
"""Characters that one rendering may write, or keep in one value."""
MOST_NUMBER = 1 << 20
"""Characters or items that one operator, filter or method may make of a number."""
MOST_BYTES = 1 << 28
"""Memory of all that one rendering makes, kept or not, beyond what the conversation allows."""
BYTES_OF_INPUT = 64
"""What a rendering may make for each byte of its conversation."""
MOST_ITEMS = 1 << 22
"""Items of a list that one filter or method may make of a text."""
ITEM = 64
"""Bytes of a short text in a list."""
CONTAINER = 192
"""Bytes of a list or an object, besides those of an item."""
MOST_STEPS = 2_000_000
"""Iterations and calls of one rendering."""
MOST_SECONDS = 10.0
_CLOCK_EVERY = 1024
"""Steps between two looks at the clock."""
_TOGETHER = 64
"""Pieces of a text that are measured at a time."""
_PAGE = 12
"""Bits of the size of a text that takes about as long as a step of a loop."""
_WIDTH = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{7})|\{[^{}]*:[^{}]*(?:\{|\d{7})")
"""In a format string: a width of millions, or one from the arguments."""
_DIGITS = re.compile(r"\d+")
_PLAIN = frozenset({int, float, bool, type(None)})
"""Types of values that hold no others."""
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_METHODS_OF_TEXT = """
capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal
isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition
removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase
title upper zfill
"""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_METHODS_OF_TEXT.split()),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}
"""Methods of Python's own types that a template may call."""
LEFT_OUT = ("pprint", "urlize", "wordwrap", "xmlattr", "striptags")
"""Filters that no chat template needs and whose work is not bounded by their input."""
LISTING = ("list", "join", "sort", "unique", "groupby", "batch", "slice", "sum", "min", "max", "last", "reverse")
"""Filters that go through all items."""
GROWTH = {"escape": 5, "e": 5, "forceescape": 5, "urlencode": 12}
"""Filters whose output may be longer than their input by a factor."""
_TESTS = """
defined undefined none string mapping iterable sequence number integer float boolean true false callable sameas
divisibleby even odd filter test escaped
"""
CHEAP_TESTS = frozenset(_TESTS.split())
"""Tests that take no longer for a long text."""


class TemplateLimitExceeded(SecurityError):
    """A template that exceeds a limit: it is broken, or meant to do harm."""


class _Budget(threading.local):
    """What is left to the rendering of this thread."""

    steps = written = made = 0
    """Steps up to the last look at the clock, characters, and bytes of all that was made."""
    since = 0
    """Steps since then."""
    end = float("inf")
    inputs: Any = ()
    """The conversation and what else the template gets."""

    def begin(self, inputs: Any = ()) -> None:
        self.steps = self.written = self.made = self.since = 0
        self.end = time.monotonic() + MOST_SECONDS
        self.inputs = inputs

    def step(self, count: int = 1) -> None:
        since = self.since + count
        if since > _CLOCK_EVERY:
            self._look(since)
            since = 0
        self.since = since

    def take(self, size: int) -> None:
        """`size` bytes are made, or are about to be."""
        self.made += size
        if self.made > MOST_BYTES and self.made > MOST_BYTES + BYTES_OF_INPUT * _weight(self.inputs, self.made):
            raise TemplateLimitExceeded(f"more than {MOST_BYTES:,} bytes for one conversation")
        self.step(1 + (size >> _PAGE))

    def _look(self, since: int) -> None:
        self.steps += since
        if self.steps > MOST_STEPS:
            raise TemplateLimitExceeded(f"more than {MOST_STEPS:,} loop iterations and calls")
        if time.monotonic() > self.end:
            raise TemplateLimitExceeded(f"more than {MOST_SECONDS:.0f} seconds for one conversation")


BUDGET = _Budget()


def _weight(value: Any, most: int) -> int:
    """Bytes of a value with all that it holds, each as often as it is held; the count ends beyond `most`."""
    total = 0
    left = [value]
    while left and total <= most:
        one = left.pop()
        if isinstance(one, str):
            total += sys.getsizeof(one)
            continue
        total += ITEM
        if type(one) in _PLAIN:  # most items: a quicker answer than those of the abstract types below
            continue
        if isinstance(one, Namespace):
            one = object.__getattribute__(one, "_Namespace__attrs")
        if isinstance(one, (list, tuple)):
            total += CONTAINER
            left += one
        elif isinstance(one, Mapping):
            total += CONTAINER
            left += one
            left += one.values()
    return total


def _whole_weight(value: Any, most: int = MOST_TEXT) -> int:
    """The bytes of a value that is written, compared or copied as a whole; TemplateLimitExceeded where it is too
    large."""
    weight = _weight(value, most)
    if weight > most:
        raise TemplateLimitExceeded(f"a text or list of more than {most:,} characters or items")
    BUDGET.step(1 + (weight >> _PAGE))
    return weight


def _counted(value: Any) -> Any:
    """A value that an operator, a filter or a method has made."""
    if isinstance(value, str):
        BUDGET.take(sys.getsizeof(value))
    elif isinstance(value, (list, tuple, dict)):
        BUDGET.take(ITEM * len(value))
        if any(issubclass(kind, (list, tuple, dict, Namespace)) for kind in set(map(type, value))):
            _whole_weight(value)
    return value


def _size(size: int, most: int = MOST_NUMBER) -> None:
    if size > most:
        raise TemplateLimitExceeded(f"a text or list of more than {most:,} characters or items")


def _steps(items: Any) -> Iterable[Any]:
    """The items of a loop, each of which counts: of short lists all at once."""
    if isinstance(items, (list, tuple)) and len(items) < _CLOCK_EVERY:
        BUDGET.step(len(items))
        return items
    return _stepping(items)


def _stepping(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        BUDGET.step()
        yield item


def _kept(value: Any) -> Any:
    """A value that a template assigns to a name."""
    if isinstance(value, (str, list, tuple)):
        _size(len(value), MOST_TEXT)
    return value


def _written(value: Any) -> Any:
    """A value that is written: to a block's text, it is whole in memory before it can be measured."""
    if isinstance(value, (str, list, tuple, dict, Namespace)):
        BUDGET.written += len(value) if isinstance(value, str) else _whole_weight(value)
        _size(BUDGET.written, MOST_TEXT)
    return value


def _shown(value: Any) -> Any:
    """A value that is written where it is measured with the rest of the text; other values than texts become one."""
    if not isinstance(value, str):
        _whole_weight(value)
    return value


def _compared(value: Any) -> Any:
    """A value that is compared, which takes as long as it is."""
    _whole_weight(value)
    return value


def _together(values: Sequence[Any]) -> str:
    """What `~` makes."""
    _size(sum(len(v) if isinstance(v, str) else _whole_weight(v) for v in values), MOST_TEXT)
    return str(_counted("".join(map(str, values))))


def _bounded(items: Any) -> Any:
    """The items of a list, or of what a filter hands on one by one, as a list."""
    if not isinstance(items, (list, tuple, str, Mapping)) and isinstance(items, Iterable):
        items = list(islice(items, MOST_ITEMS + 1))
    if isinstance(items, (str, list, tuple)):
        _size(len(items), MOST_ITEMS)
    return items


def _joined_size(separator: Any, items: Any) -> None:
    """TemplateLimitExceeded where a text of `items` with `separator` between them is too long."""
    if isinstance(items, (str, list, tuple)):
        between = len(separator) if isinstance(separator, str) else 0
        _size(_whole_weight(items) + len(items) * between, MOST_TEXT)


def _formatted_size(text: str, mark: str, values: Any) -> None:
    """TemplateLimitExceeded where a format string makes too much of its values."""
    if _WIDTH.search(text):
        raise TemplateLimitExceeded("a format with a width of millions")
    widest = max((int(digits) for digits in _DIGITS.findall(text)), default=0)
    factor = 10 if "!" in text or "%r" in text or "%a" in text else 1
    _size(len(text) + text.count(mark) * (widest + factor * _whole_weight(values)), MOST_TEXT)


def _numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _size(abs(value))


def _pieces(text: str, name: str, values: Sequence[Any]) -> None:
    """TemplateLimitExceeded where a text is split into too many."""
    separator = next((v for v in values if isinstance(v, str) and v), None)
    if name == "splitlines":
        count = sum(map(text.count, LINE_ENDS))
    else:
        count = len(text) // 2 if separator is None else text.count(separator)
    _size(count, MOST_ITEMS)
    BUDGET.take(ITEM * count)


def _made_of_text(name: str, text: str, values: Sequence[Any]) -> None:
    """TemplateLimitExceeded where the method or filter `name` makes too much of a text."""
    if name in ("format", "format_map"):
        _formatted_size(text, "%" if "%" in text else "{", values)
        return
    _numbers(values)
    first, second = (*values, None, None)[:2]
    if name == "expandtabs":
        _size(len(text) + text.count("\t") * (first if isinstance(first, int) else 8), MOST_TEXT)
    elif name == "indent":
        width = first if isinstance(first, int) else 4
        if isinstance(first, str):
            width = len(first)
        _size(len(text) + (1 + text.count("\n")) * width, MOST_TEXT)
    elif name == "replace" and isinstance(first, str) and isinstance(second, str):
        _size(len(text) + text.count(first) * len(second), MOST_TEXT)
    elif name in ("split", "rsplit", "splitlines"):
        _pieces(text, name, values)
    elif name in GROWTH:
        _size(len(text) * GROWTH[name], MOST_TEXT)


def _made(name: str, first: Any, rest: Sequence[Any]) -> None:
    """TemplateLimitExceeded where the filter `name` makes too much of its arguments."""
    if name == "sum" and any(isinstance(v, (str, list, tuple)) for v in rest[1:]):
        raise TemplateLimitExceeded("a sum of texts or lists")
    if name == "join":
        _joined_size(next(iter(rest), ""), first)
    elif name == "tojson":
        _numbers(rest)
        widest = max((v for v in rest if isinstance(v, int)), default=0)
        _size(_whole_weight(first, MOST_TEXT >> 2) * (1 + widest), MOST_TEXT)
    elif isinstance(first, str):
        _made_of_text(name, first, rest)
    else:
        _numbers(rest)
        if name == "string":
            _whole_weight(first)


def _limited(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments before it works; jinja's marks of what is passed to it stay."""
    skipped = 1 if hasattr(plain, "jinja_pass_arg") else 0

    def limited(*args: Any, **options: Any) -> Any:
        first = args[skipped]
        rest = (*args[skipped + 1 :], *options.values())
        BUDGET.step(1 + (len(first) >> _PAGE if isinstance(first, (str, list, tuple)) else 0))
        if name in LISTING:
            first = _bounded(first)
        _made(name, first, rest)
        return _counted(plain(*args[:skipped], first, *args[skipped + 1 :], **options))

    limited.__dict__.update(getattr(plain, "__dict__", {}))
    return limited


def _timed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A test of values that may be long."""

    def timed(*args: Any, **options: Any) -> Any:
        for value in args:
            if isinstance(value, (str, list, tuple, dict)):
                _whole_weight(value)
        return plain(*args, **options)

    timed.__dict__.update(getattr(plain, "__dict__", {}))
    return timed


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each limited, whoever sets them."""

    def __setitem__(self, name: str, plain: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited(name, plain))


class _Counted(NodeTransformer):
    """Puts a count around each loop's items, and a look at the size around what is assigned, written, compared, cut or
    put into a list."""

    blocks = loops = 0

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.loops += 1
        self.generic_visit(node)
        self.loops -= 1
        node.iter = _through("_megaswift_steps", node.iter)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        self.generic_visit(node)
        node.node = _through("_megaswift_kept", node.node)
        return node

    def _block(self, node: nodes.Node) -> nodes.Node:
        around = self.loops
        self.loops = 0
        self.blocks += 1
        self.generic_visit(node)
        self.blocks -= 1
        self.loops = around
        return node

    visit_Macro = visit_CallBlock = visit_AssignBlock = visit_FilterBlock = _block

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        name = "_megaswift_written" if self.blocks and self.loops else "_megaswift_shown"
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _through(name, n) for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _through("_megaswift_together", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const) or "in" in operand.op:
                operand.expr = _through("_megaswift_compared", operand.expr)
        return node

    def _list(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"  # the names of `for a, b in ...`
        return node if stored else _through("_megaswift_counted", node)

    visit_List = visit_Tuple = visit_Dict = _list

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_megaswift_counted", node) if isinstance(node.arg, nodes.Slice) else node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class LimitedTemplate(Template):
    """Counts anew for each rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text; TemplateLimitExceeded for one without end."""
        BUDGET.begin((args, kwargs))
        return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """The text in pieces; TemplateLimitExceeded for one without end."""
        BUDGET.begin((args, kwargs))
        size = 0
        for piece in super().generate(*args, **kwargs):
            size += len(piece)
            if size > MOST_TEXT:  # no call for each of many short pieces
                _size(size, MOST_TEXT)
            yield piece


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    template_class = LimitedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.globals.pop("lipsum", None)
        filters = _Filters(
            _megaswift_steps=_steps,
            _megaswift_kept=_kept,
            _megaswift_written=_written,
            _megaswift_shown=_shown,
            _megaswift_together=_together,
            _megaswift_compared=_compared,
            _megaswift_counted=_counted,
        )
        for name, plain in self.filters.items():
            if name not in LEFT_OUT:
                filters[name] = plain
        self.filters = filters
        self.tests = {
            name: plain if name in CHEAP_TESTS else _timed(cast(Any, plain)) for name, plain in self.tests.items()
        }

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """The template; TemplateLimitExceeded for one of more than a megabyte."""
        if isinstance(source, str) and len(source) > MOST_SOURCE:
            raise TemplateLimitExceeded(f"a template of {len(source):,} characters; at most {MOST_SOURCE:,}")
        BUDGET.begin()  # what is constant is computed here
        return super().from_string(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        counted: nodes.Template = _Counted().visit(source)
        counted.set_environment(self)
        return super()._generate(counted, *args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        """The pieces as one text; TemplateLimitExceeded when it grows too long."""
        if isinstance(pieces, list):
            size = sum(map(len, pieces))
            _size(size, MOST_TEXT)
            BUDGET.take(size)
            return "".join(pieces)
        size = 0
        out = list[str]()
        left = iter(pieces)
        while some := list(islice(left, _TOGETHER)):
            size += sum(map(len, some))
            if size > MOST_TEXT:
                _size(size, MOST_TEXT)
            out += some
        BUDGET.take(size)
        return "".join(out)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A function, macro or method, which counts."""
        BUDGET.step()
        owner = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if isinstance(owner, type) or kind is None and isinstance(obj, BuiltinFunctionType):
            raise TemplateLimitExceeded(f"the method {name}")
        if kind is not None:
            if name not in METHODS[kind]:
                raise TemplateLimitExceeded(f"the method {name} of a {kind.__name__}")
            args = self._measured(owner, name, args, kwargs)
        elif not isinstance(obj, Macro):
            for value in (*args, *kwargs.values()):
                _kept(value)
                if isinstance(value, str) and name == "strftime_now":
                    _size(len(value))
        return _counted(super().call(context, obj, *args, **kwargs))

    @staticmethod
    def _measured(owner: Any, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a method; TemplateLimitExceeded where it makes too much of them."""
        if not isinstance(owner, str):
            _whole_weight(owner)
            return args
        BUDGET.step(1 + (len(owner) >> _PAGE))
        if name == "join":
            args = tuple(_bounded(value) for value in args)
            for items in args:
                _joined_size(owner, items)
        else:
            _made_of_text(name, owner, (*args, *options.values()))
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of bounded width."""
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        text = value.__self__
        plain = formatter

        def limited(*args: Any, **kwargs: Any) -> str:
            _formatted_size(text, "{", (*args, *kwargs.values()))
            return plain(*args, **kwargs)

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A sum, product, power or format of bounded size."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _size(len(left) + len(right), MOST_TEXT if isinstance(left, str) else MOST_ITEMS)
        elif operator == "%":
            if isinstance(left, str):
                _formatted_size(left, "%", right)
        elif operator == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
            _size(len(left) * right)
        elif operator == "*" and isinstance(right, (str, list, tuple)) and isinstance(left, int):
            _size(len(right) * left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            _size(bits, 4096)
        return _counted(super().call_binop(context, operator, left, right))


def install_template_limits() -> None:
    """Let transformers render with the limits. Twice is once."""
    if chat_template_utils.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()


REFUSED = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    SyntaxError,
    MemoryError,
)
"""What a template's expressions raise, and what compiling one does."""

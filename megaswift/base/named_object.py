"""Python objects as values of options: a function or class that a script gives, and the text that stands for it in
configuration files, logs and reports.

Owns the text, `module:NAME`, and finding the object of a text again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from megaswift.base.user_code import convert_user_code_errors
from megaswift.errors import ConfigError, Problem, did_you_mean_hint

MAIN = "__main__"
"""The module of a script or notebook."""


class NamedObject(str):
    """The text of an object, which has the object too. A copy of the text alone stands for the object elsewhere: in
    another process and in a file."""

    thing: Any

    def __deepcopy__(self, memo: object) -> NamedObject:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def named_object(thing: Any) -> NamedObject:
    """Return `module:NAME` of a function or class, with the object; an instance of a class is `module:Class()`."""
    inner = thing
    while isinstance(inner, functools.partial):
        inner = inner.func
    owner = getattr(inner, "__self__", None)
    module = getattr(inner, "__module__", None) or type(inner).__module__
    if hasattr(inner, "__qualname__") and not inspect.ismethod(inner):
        text = f"{module}:{inner.__qualname__}" + ("" if inner is thing else "()")
    elif owner is not None:
        text = f"{module}:{type(owner).__qualname__}().{inner.__name__}"
    else:
        text = f"{type(inner).__module__}:{type(inner).__qualname__}()"
    named = NamedObject(text)
    named.thing = thing
    return named


def short_name(thing: Any) -> str:
    """Return the name of an object without its module, as TRL names functions: that of the class for an instance."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__))


def names_module(text: str) -> bool:
    """Whether a text is `module:NAME` and not `FILE.py:NAME`."""
    module, separator, name = text.rpartition(":")
    named = all(part.isidentifier() for part in module.split("."))
    return bool(separator) and bool(name) and named and not module.endswith(".py")


def find_object(text: str, option: str) -> Any:
    """Return the object of `module:NAME`, which is imported where it is not here yet.

    Raises:
        ConfigError: There is none, with what to do.
    """
    flag = f"--{option} {text}"
    module, _, name = text.rpartition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        rule = "is an object that a script made; it has no name of its own, by which another process could import it"
        fix = f"run the script again, or define a function in a file, and give --{option} FILE.py:NAME"
        raise ConfigError(Problem(flag, rule, fix))
    names = _names_of(module, flag, option)
    found: Any = names.get(name.partition(".")[0])
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if found is not None:
        return found
    if module == MAIN:
        rule = f"is {name} of a script or notebook, and this process, which is another program, has none"
        fix = f"run the script again, or move it into a file, and give --{option} FILE.py:{name}"
        raise ConfigError(Problem(flag, rule, fix))
    own = [n for n, thing in names.items() if callable(thing) and not n.startswith("_")]
    rule = f"module {module} has no {name}; it has {', '.join(own) or 'no function'}"
    raise ConfigError(Problem(flag, rule, did_you_mean_hint(name, own)))


def _names_of(module: str, flag: str, option: str) -> Mapping[str, Any]:
    """The names of a module; modules in the working folder are found too, after installed ones."""
    if module in sys.modules:
        return vars(sys.modules[module])
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with convert_user_code_errors(lambda trace: ConfigError(Problem(flag, f"importing {module} failed\n{trace}"))):
            return vars(importlib.import_module(module))
    except ConfigError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or not f"{module}.".startswith(f"{missing.name}."):
            raise
    rule = f"no module {module} can be imported"
    fix = f"run this in the folder of the module, set PYTHONPATH to it, or give --{option} FILE.py:NAME"
    raise ConfigError(Problem(flag, rule, fix))

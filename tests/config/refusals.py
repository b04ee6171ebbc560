"""What the options of a command line are refused for; how a rule of either kind shows."""

from __future__ import annotations

from megaswift.config import load_config
from megaswift.config.rules import IGNORED
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError


def problems(words: str, task: str = "sft") -> list[str]:
    """Every mistake, without what to do instead. `words` may begin with the name of their own task."""
    options = words.split()
    task, options = (task, options) if words.startswith("--") else (options[0], options[1:])
    try:
        load_config(task, options, environ={})
    except ConfigError as error:
        typed = [word.partition("=")[0] for word in options]
        for p in error.problems:
            assert p.what.split()[0].rstrip(":") in typed, f"{p.what} was not typed: {words}"
        return [p.what + ": " + p.rule for p in error.problems]
    return []


def assert_idle(idle: str, used: str, task: str = "sft") -> None:
    """The first option of `idle` is refused because it would be ignored, or left out with a notice where the rule says
    so; in `used` it means something."""
    found, option = problems(idle, task), next(word for word in idle.split() if word.startswith("--"))
    if not found:  # left out with a notice
        name = NAMES[option[2:]]
        taken = load_config(task, idle.split(), environ={})
        assert any(rule.notice for rule in IGNORED if rule.option == name)
        assert name not in taken.given and any(n.startswith(option) and "has no effect: " in n for n in taken.notices)
        assert name in load_config(task, used.split(), environ={}).given
        return
    assert len(found) == 1 and found[0].startswith((f"{option} ", f"{option}:")) and "would be ignored" in found[0], (
        found
    )
    assert problems(used, task) == []


def assert_contradiction(name: str, words: str, task: str = "sft") -> None:
    """One mistake, which names this option."""
    found = problems(words, task)
    assert len(found) == 1 and "ignored" not in found[0], found
    typed = found[0].startswith((f"--{name} ", f"--{name}:"))
    assert typed or (f"--{name}" not in words and f": {name} defaults to " in found[0]), found

"""YAML of files: numbers as people write them, and no more values than a file of options has.

YAML 1.1 reads `010` as 8, `1:30` as 90 and `0x10` as 16. Here these are texts: an option takes `010` as 10, as on the
command line, and refuses the others. Aliases may name a value that names another ten times, and so on: the values are
counted as if each were written out.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(0|[1-9][0-9_]*)$",
    "tag:yaml.org,2002:float": r"^[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$",
}
"""What a number looks like: in the base 10."""
MOST_VALUES = 20_000
"""Maximum values of a file, each counted as often as aliases repeat it: some seconds' work."""
TOO_MANY = f"contains more than {MOST_VALUES:,} values, with its aliases expanded"


class TooManyValuesError(ValueError):
    """A text with more values than `MOST_VALUES`."""

    def __init__(self) -> None:
        super().__init__(TOO_MANY)


@cache
def _loader_class() -> Any:
    import yaml  # 20 ms that --help need not pay

    class BoundedLoader(yaml.SafeLoader):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            if self.nodes > MOST_VALUES:
                raise TooManyValuesError
            return super().compose_node(parent, index)

    BoundedLoader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in rows if tag not in NUMBERS]
        for letter, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in NUMBERS.items():
        BoundedLoader.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))
    return BoundedLoader


def compose_yaml(text: str) -> tuple[Any, Any]:
    """Returns a loader of the text, and the root node or None.

    Raises:
        TooManyValuesError: It has too many values once aliases are written out.
        yaml.YAMLError, RecursionError: It is not YAML, or is nested too deeply.
    """
    loader = _loader_class()(text)
    root = loader.get_single_node()
    if root is not None and _expanded(root, {}) > MOST_VALUES:
        raise TooManyValuesError
    return loader, root


def read_yaml(text: str) -> Any:
    """Returns the value of a text; raises as `compose_yaml` does, and ValueError for a value Python does not have."""
    loader, root = compose_yaml(text)
    return None if root is None else loader.construct_document(root)


def _expanded(node: Any, counts: dict[int, int]) -> int:
    """Values below a node once aliases are written out. `counts`: of the nodes that were counted already."""
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES + 1  # what a node counts inside itself
        parts = node.value if isinstance(node.value, list) else ()
        children = (child for part in parts for child in (part if isinstance(part, tuple) else (part,)))
        counts[id(node)] = 1 + sum(_expanded(child, counts) for child in children)
    return counts[id(node)]

"""Names of the files that call a collective.

Covers: megaswift/simulator/calls.py.
"""

from __future__ import annotations

import pytest

from megaswift.simulator import calls


@pytest.mark.parametrize(
    ("inside", "shown"),
    [
        (
            ".venv/lib/python3.11/site-packages/megatron/core/tensor_parallel/layers.py",
            "megatron/core/tensor_parallel/layers.py",
        ),
        ("megaswift/engine/objective.py", "megaswift/engine/objective.py"),
    ],
)
def test_files_are_named_within_their_package(inside: str, shown: str) -> None:
    """Also where the environment is a folder of the checkout."""
    assert calls._short(f"{calls.PACKAGE.parent}/{inside}") == shown
    assert calls._short(f"/opt/lib/site-packages/{shown}") == shown

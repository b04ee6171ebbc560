"""Memory of `convert verify`: some blocks, whatever the size of the models, also where they differ.

Covers: megaswift/commands/verify.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megaswift.bridge import HfSource
from tests.bridge.peaks import printed
from tests.bridge.sparse import write_sparse

PROGRAM = """
from megaswift.commands.convert import convert_command
import megaswift.commands.verify
before = peak()
code = convert_command(["verify", *sys.argv[1:]])
print(code, before, peak())
"""


@pytest.mark.process
def test_models_beyond_the_allowed_growth(tmp_path: Path) -> None:
    """Twice 0.3 GB, one tensor different in one byte: growth by at most 128 MiB."""
    write_sparse(
        tmp_path / "a",
        1 << 28,
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with HfSource(tmp_path / "b").file("model.embed_tokens.weight").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    told = printed(PROGRAM, tmp_path / "a", tmp_path / "b")
    code, before, end = map(int, told.splitlines()[-1].split())
    weights = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    assert code == 1 and "1 different" in told, told
    assert end - before <= 128 << 20 < weights / 2, end - before

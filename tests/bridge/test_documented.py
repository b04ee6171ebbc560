"""The page on families shows code; it has to run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.trainers.inputs import write_model


@pytest.mark.process
def test_the_page_s_python_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    found = re.search(r"## Python API\n\n```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    code = f"folder = {str(write_model(tmp_path / 'model'))!r}\n{found[1]}\nprint(sorted(full))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "kqv"]
    assert done.returncode == 0 and done.stdout.strip() == str(names), done.stderr

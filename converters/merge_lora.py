"""A model's folder and a PEFT folder into a Hugging Face folder: `megaswift convert merge-lora` from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from megaswift.commands.convert import run_converter_script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(run_converter_script("merge-lora"))

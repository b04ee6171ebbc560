"""A Hugging Face folder into a sharded Megatron checkpoint: `megaswift convert hf-to-megatron` from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from megaswift.commands.convert import run_converter_script  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(run_converter_script("hf-to-megatron"))

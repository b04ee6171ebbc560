"""Writes the figures of docs/simulate.md: output of the commands, with their wall time and memory.

python scripts/simulate_figures.py          # rewrite all blocks
python scripts/simulate_figures.py 8b       # rewrite one
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.page_blocks import replaced  # noqa: E402

SCRIPT = "simulate_figures.py"
PAGE = ROOT / "docs/simulate.md"
SIZES = "configs/by_size"
COMMANDS = {
    "8b": "Qwen/Qwen3-8B --world 16 --tp 2 --pp 2 --max_length 4096 --gradient_accumulation_steps 8 --gpu h100",
    "671b": f"{SIZES}/pt_671b_a37b_ep64_128x8x80gb.yaml --model deepseek-ai/DeepSeek-V3 --task pt --world 1024 "
    "--global_batch_size 1024 --steps 1 --gpu h100",
    "235b": f"{SIZES}/pt_235b_a22b_ep32_32x8x80gb.yaml --model Qwen/Qwen3-235B-A22B --task pt --world 256 "
    "--global_batch_size 256 --steps 1 --gpu h100",
}
"""Blocks of the page by name, and the words behind `megaswift simulate`."""
PICTURED = "671b"
WIDEST = 160


def simulated(name: str) -> str:
    """Return the output of a command, with its wall time, processor time and the most memory that it had."""
    picture = ROOT / "docs/images/simulation.json"
    words = [*COMMANDS[name].split(), *(["--output", str(picture)] if name == PICTURED else [])]
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "megaswift", "simulate", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    assert os.waitstatus_to_exitcode(status) == 0, name
    picture.unlink(missing_ok=True)
    screen = text[: text.index("not simulated:")].rstrip()
    lines = [line if len(line) < WIDEST else line[: WIDEST - 3] + "..." for line in screen.splitlines()]
    own = (
        f"this took {seconds:.0f} s on one core ({usage.ru_utime + usage.ru_stime:.0f} s of processor time, imports "
        f"included) and {usage.ru_maxrss / 2**20:.1f} GiB"
    )
    return "```text\n" + "\n".join([*lines, "", own]) + "\n```"


def main(names: list[str]) -> int:
    """Write the blocks."""
    for name in names or COMMANDS:
        block = simulated(name)
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), name, block, SCRIPT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

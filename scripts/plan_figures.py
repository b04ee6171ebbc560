"""Writes the figures of docs/plan.md: output of the commands, and forecasts beside published figures. Writes below the
command `megaswift plan` in the comment of a file of configs/by_size its forecast.

    python scripts/plan_figures.py            # rewrite the blocks, the comments and the pictures
    python scripts/plan_figures.py --check    # only say whether they are up to date (exit code 1: not)
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.cli import main as megaswift  # noqa: E402
from megaswift.commands.plan import described_model  # noqa: E402
from megaswift.config import load_config  # noqa: E402
from megaswift.parallel.hardware import FITTED, Shares, planned_gpu  # noqa: E402
from megaswift.planner.machine import Machine  # noqa: E402
from megaswift.run.checks.layout_plan import plan_run, row_text  # noqa: E402
from scripts.page_blocks import replaced  # noqa: E402
from scripts.published_steps import FAR, Forecast, judged, prepared, published  # noqa: E402

PAGE = ROOT / "docs/plan.md"
SCRIPT = "plan_figures.py"
CONFIGS = ROOT / "configs/by_size"
PICTURES = ROOT / "docs/images"
CLAIMED = "h100"
"""Rows of other GPUs are shown, and no figure is claimed for them."""
PLAN = "#   megaswift plan "
FORECAST = "# Forecast, experts 1.25 times as full as evenly: "
COMMANDS = {
    "8b": "Qwen/Qwen3-8B --gpus 8 --gpu h100 --task sft --max_length 4096",
    "dpo": "Qwen/Qwen3-8B --gpus 8 --gpu h100 --task dpo --max_length 4096 --top 5",
    "fsdp2": "meta-llama/Llama-3.1-8B --gpus 8 --gpu h100 --engine fsdp2 --max_length 4096",
    "grpo": "Qwen/Qwen3-8B --gpus 16 --gpu h100 --task grpo --reward_funcs length --rollout_sleep true "
    "--max_length 4096 --top 5",
    "235b": "Qwen/Qwen3-235B-A22B --gpus 256 --gpu h100 --task pt --max_length 4096 --global_batch_size 2048 "
    "--storage_gbps 800 --top 5",
}
"""Blocks of the page by name, and the words behind `megaswift plan`."""


CAUSES: tuple[tuple[str, str, str], ...] = (
    ("h100 fp8", "deepseek-v3", "a token goes once to each node there (DeepEP), once to each expert here"),
    (
        "h100 fp8",
        "qwen3-30b-a3b",
        "each of many small experts casts its rows to FP8 by kernels of its own, with a launch of the host for each",
    ),
    (
        "h100 bf16",
        "gpt-oss-120b",
        "products of small experts reach less than the assumed 70%; no other model to fit to",
    ),
    ("bf16", "gpt-oss-120b", "products of small experts reach less than those of dense models"),
    ("bf16", "deepseek-v2", "experts of 1,536 columns reach less than the products of the other models"),
    ("bf16", "deepseek-v3, 4 layers", "short steps: fixed costs of a step that four layers do not hide"),
    ("bf16", "deepseek-v3", "exchanges within NVLink's 72 GPUs are faster than a share fitted to nodes of 8"),
    ("bf16", "qwen3-235b-a22b", "exchanges within NVLink's 72 GPUs are faster than a share fitted to nodes of 8"),
    ("bf16", "llama-3.1-405b", "products of 16,384 columns reach more of the peak than those of smaller models"),
    ("bf16", "llama-3.1-70b", "products cut for eight ranks reach less of the peak, and exchanges more of the step"),
    ("fp8", "deepseek-v3", "exchanges over the network between nodes of 8, and recomputation that is not published"),
    ("fp8", "llama-3.1-405b", "products of 16,384 columns reach more of the peak than those of smaller models"),
    ("fp8", "llama-3.1-70b", "FSDP there: weights are gathered for each pass"),
    (
        "fp8",
        "qwen3-235b-a22b",
        "exchanges over the network between nodes of 8, and recomputation that is not published",
    ),
    ("fp8", "qwen3-30b-a3b", "each of many small experts casts its rows to FP8 by kernels of its own"),
)
"""GPU and precision, or precision; the beginning of a row's name; what is suspected where its forecast is far."""


def suspected(one: Forecast) -> str:
    """Return a possible cause of a forecast that is far from the published figure."""
    step = one.step
    where = f"{step.gpu} {step.group[1]}"
    return next(c for place, name, c in CAUSES if where.endswith(place) and step.name.startswith(name))


def constants_text() -> str:
    """The table of fitted constants."""
    lines = [
        "| GPUs | precision | products | attention | links | host, a kernel | fitted to |",
        "|---|---|---|---|---|---|---|",
    ]
    for (generation, precision), shares in FITTED.items():
        steps = [step for step in published() if step.group == (generation, precision)]
        rows = f"{len(steps)} rows of {len({step.model for step in steps})} models"
        lines.append(f"| {generation} | {precision} | {_shares_text(shares)} | {rows} |")
    lines.append(f"| others | | {_shares_text(Shares())} | assumed |")
    return "\n".join(lines)


def _shares_text(shares: Shares) -> str:
    *parts, host = astuple(shares)
    return " | ".join([*(f"{part:.0%}" for part in parts), f"{host:g} us"])


def errors_text(found: Sequence[Forecast]) -> str:
    """Errors by generation and precision; all rows of the claimed GPU; rows of the others that are far."""
    lines = ["| GPUs | precision | rows | median error | worst | within 15% |", "|---|---|---|---|---|---|"]
    for group in sorted({one.step.group for one in found}, reverse=True):
        own = [one for one in found if one.step.group == group]
        worst = max(own, key=lambda one: abs(one.error))
        near = sum(abs(one.error) <= FAR for one in own)
        median = statistics.median(abs(one.error) for one in own)
        figures = f"{median:.0%} | {worst.error:+.0%} ({worst.step.model}) | {near}"
        lines.append(f"| {group[0]} | {group[1]} | {len(own)} | {figures} |")
    lines += [
        "",
        f"All rows of {CLAIMED}, in tokens/s/GPU:",
        "",
        "| run | published | forecast | error | largest parts | suspected cause |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        if one.step.gpu == CLAIMED:
            total = one.time.total
            parts = sorted(one.time.parts().items(), key=lambda part: -part[1])[:3]
            text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)
            cause = suspected(one) if abs(one.error) > FAR else ""
            rates = f"{one.step.tokens_per_second_per_gpu:.0f} | {one.tokens:.0f} | {one.error:+.0%}"
            lines.append(f"| {one.step.name} | {rates} | {text} | {cause} |")
    lines += ["", "Rows of other GPUs outside 15%:", "", "| run | error | suspected cause |", "|---|---|---|"]
    for one in found:
        if one.step.gpu != CLAIMED and abs(one.error) > FAR:
            lines.append(f"| {one.step.name} | {one.error:+.0%} | {suspected(one)} |")
    return "\n".join(lines)


def memory_text() -> str:
    """Allocated memory of published rows beside the formulas; a layout once, whatever its micro-batches."""
    lines = ["| run | allocated, GiB | forecast, GiB | error |", "|---|---|---|---|"]
    errors = []
    seen = set()
    for step in published():
        if step.allocated_gib is None or (key := (step.model, step.layout, step.length)) in seen:
            continue
        seen.add(key)
        run, options = prepared(step)
        gib = run.estimate(options).total / 2**30
        errors.append(gib / step.allocated_gib - 1)
        lines.append(f"| {step.name} | {step.allocated_gib:.1f} | {gib:.1f} | {errors[-1]:+.1%} |")
    middle = statistics.median(errors)
    return "\n".join([*lines, "", f"Median {middle:+.1%}, from {min(errors):+.1%} to {max(errors):+.1%}."])


def output(words: str) -> str:
    """Return the output of `megaswift plan`."""
    text = io.StringIO()
    with redirect_stdout(text):
        code = megaswift(["plan", *words.split()])
    assert code == 0, words
    lines = [
        line if len(line) < 160 else line[:156].rpartition(" ")[0] + " ..."
        for line in text.getvalue().rstrip().splitlines()
    ]
    return "```text\n" + "\n".join(lines) + "\n```"


def with_forecast(text: str) -> str:
    """A configuration with the forecast of its own command below it."""
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(PLAN)), None)
    if at is None:
        return text
    words = lines[at].removeprefix(PLAN).split()
    words[0] = str(ROOT / words[0])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    cfg = load_config(None, [words[0], "--model", options["--model"]], environ={})
    machine = Machine(planned_gpu(options["--gpu"]), 8, cfg.model.fp8_format is not None)
    plan = plan_run(cfg, described_model(cfg), machine, int(options["--gpus"]), 1)
    row = row_text(plan.rows[0], plan.question.usable)
    return "\n".join([*lines[: at + 1], FORECAST + row, *lines[at + 2 :]]) + "\n"


def draw(found: Sequence[Forecast], picture: Path) -> None:
    """Forecast against published figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.4), dpi=120, layout="constrained")
    axis = figure.subplots()
    for gpu, color in zip(dict.fromkeys(one.step.gpu for one in found), COLORS, strict=True):
        own = [one for one in found if one.step.gpu == gpu]
        x = [one.step.tokens_per_second_per_gpu for one in own]
        axis.scatter(x, [one.tokens for one in own], color=color, label=gpu, s=26, alpha=0.85)
    ends = [200, 60000]
    axis.plot(ends, ends, color="#333a45", linewidth=1)
    for factor in (1 - FAR, 1 + FAR):
        axis.plot(ends, [factor * end for end in ends], color="#9aa3af", linewidth=0.8, linestyle="--")
    axis.set(xscale="log", yscale="log", xlabel="published tokens/s/GPU", ylabel="forecast tokens/s/GPU")
    axis.legend(frameon=False)
    axis.grid(color="#e3e6ea", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


COLORS = ("#1f5fb4", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b")


def main(argv: list[str] | None = None) -> int:
    """Writes or checks; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is out of date")
    check = parser.parse_args(argv).check
    found = judged()
    text = fresh = PAGE.read_text(encoding="utf-8")
    for name, words in COMMANDS.items():
        fresh = replaced(fresh, name, output(words), SCRIPT)
    fresh = replaced(fresh, "constants", constants_text(), SCRIPT)
    fresh = replaced(fresh, "errors", errors_text(found), SCRIPT)
    fresh = replaced(fresh, "allocated", memory_text(), SCRIPT)
    files = {PAGE: (text, fresh)}
    for file in sorted(CONFIGS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        files[file] = (text, with_forecast(text))
    stale = [file for file, (text, fresh) in files.items() if text != fresh]
    if check:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is out of date; run python scripts/plan_figures.py")
        return int(bool(stale))
    for file in stale:
        file.write_text(files[file][1], encoding="utf-8")
    draw(found, PICTURES / "plan-times.png")
    with redirect_stdout(io.StringIO()):
        megaswift(["plan", *COMMANDS["235b"].split(), "--output", str(PICTURES / "plan.json")])
    (PICTURES / "plan.json").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

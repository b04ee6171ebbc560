"""Writes the figures of docs/plan.md: output of the commands, and forecasts of time against published ones. Writes the
forecast of each file of configs/by_size whose comment has a command `megaswift plan` below that command.

    python scripts/plan_figures.py            # rewrite the blocks, the comments and the pictures
    python scripts/plan_figures.py --check    # only say whether they are up to date (exit code 1: not)

`published_steps.csv` has rows of the performance summary in Megatron-Bridge's documentation and of its archive
(containers 25.09 to 26.02): those in bfloat16 and FP8 with all sizes and a dense or dropless model.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.cli import main as megaswift  # noqa: E402
from megaswift.commands.plan import described_model  # noqa: E402
from megaswift.config import SwiftConfig, load_config  # noqa: E402
from megaswift.families import family_of  # noqa: E402
from megaswift.memory.estimate import TrainedModel  # noqa: E402
from megaswift.models.published.sizes import MODELS  # noqa: E402
from megaswift.parallel.hardware import planned_gpu  # noqa: E402
from megaswift.parallel.layout import Layout  # noqa: E402
from megaswift.parallel.pipeline_split import PipelineSplit, balanced_pipeline_layout_string  # noqa: E402
from megaswift.planner.machine import Machine  # noqa: E402
from megaswift.planner.step_time import StepTime, TimeModel  # noqa: E402
from megaswift.run.checks.fit import micro_batch_options  # noqa: E402
from megaswift.run.checks.layout_plan import plan_run, planned_kernels, row_text  # noqa: E402

PAGE = ROOT / "docs/plan.md"
ROWS = ROOT / "scripts/published_steps.csv"
CONFIGS = ROOT / "configs/by_size"
PICTURES = ROOT / "docs/images"
CLAIMED = "h100"
"""Rows of other GPUs are shown, and no figure is claimed for them."""
FAR = 0.15
PLAN = "#   megaswift plan "
FORECAST = "# Forecast, experts 1.25 times as full as evenly: "
COMMANDS = {
    "8b": "Qwen/Qwen3-8B --gpus 8 --gpu h100 --task sft --max_length 4096",
    "dpo": "Qwen/Qwen3-8B --gpus 8 --gpu h100 --task dpo --max_length 4096 --top 5",
    "235b": "Qwen/Qwen3-235B-A22B --gpus 256 --gpu h100 --task pt --max_length 4096 --global_batch_size 2048 "
    "--storage_gbps 800 --top 5",
}
"""Blocks of the page by name, and the words behind `megaswift plan`."""


@dataclass(frozen=True)
class Published:
    """A published row, and its forecast."""

    row: dict[str, str]
    forecast: StepTime
    tokens: float

    @property
    def measured(self) -> float:
        """Tokens per second and GPU."""
        return float(self.row["tokens_per_second_per_gpu"])

    @property
    def error(self) -> float:
        """The error of the forecast, as a share of the measured value."""
        return self.tokens / self.measured - 1

    @property
    def name(self) -> str:
        """The row in few words."""
        r = self.row
        axes = " ".join(f"{a.upper()}{r[a]}" for a in ("tp", "pp", "vpp", "cp", "ep") if r[a] != "1")
        return f"{r['model']}, {r['gpus']} x {r['gpu']}, {r['precision']}, {axes or 'DP'} ({r['container']})"


def forecasts() -> list[Published]:
    """Every row of the file with its forecast."""
    with ROWS.open(encoding="utf-8") as file:
        return [forecast(row) for row in csv.DictReader(file)]


def forecast(row: dict[str, str]) -> Published:
    """The time of a row, with gradients and weights as this project has them: no FSDP, main gradients in float32, no
    recomputation."""
    config = MODELS[row["model"]][0]
    spec = family_of(config).spec(config)
    sizes = {axis: int(row[axis]) for axis in ("tp", "pp", "vpp", "cp", "ep")}
    recipe = {"fp8": "tensorwise", "mxfp8": "mxfp8"}.get(row["precision"])
    fp8 = {} if recipe is None else {"fp8_format": "hybrid", "fp8_recipe": recipe}
    cfg = SwiftConfig(task="pt", model=row["model"], max_length=int(row["length"]), **fp8)
    layout = Layout(int(row["gpus"]), **sizes, sequence_parallel=sizes["tp"] > 1)
    chunks = layout.pp * layout.vpp
    even = spec.num_layers % chunks == 0
    split = PipelineSplit() if even else PipelineSplit(custom=balanced_pipeline_layout_string(spec.num_layers, chunks))
    run = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)).on(layout, split)
    rows = int(row["micro_batch"])
    options = micro_batch_options(cfg, rows, int(row["global_batch"]) // (rows * layout.dp))
    time = TimeModel(Machine(planned_gpu(row["gpu"]), 8)).on(run).step(options)
    tokens = int(row["global_batch"]) * int(row["length"]) / layout.world_size / time.total
    return Published(row, time, tokens)


def errors_text(found: list[Published]) -> str:
    """The table of errors by GPU, and all rows of the claimed GPU."""
    lines = ["| GPU | rows | median error | worst | within 15% |", "|---|---|---|---|---|"]
    for gpu in dict.fromkeys(one.row["gpu"] for one in found):
        own = [one for one in found if one.row["gpu"] == gpu]
        worst = max(own, key=lambda one: abs(one.error))
        near = sum(abs(one.error) <= FAR for one in own)
        median = statistics.median(abs(one.error) for one in own)
        lines.append(f"| {gpu} | {len(own)} | {median:.0%} | {worst.error:+.0%} ({worst.row['model']}) | {near} |")
    lines += [
        "",
        f"All rows of {CLAIMED}, in tokens/s/GPU:",
        "",
        "| run | published | forecast | error | largest parts |",
    ]
    lines += ["|---|---|---|---|---|"]
    for one in found:
        if one.row["gpu"] == CLAIMED:
            total = one.forecast.total
            parts = sorted(one.forecast.parts().items(), key=lambda part: -part[1])[:3]
            text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)
            lines.append(f"| {one.name} | {one.measured:.0f} | {one.tokens:.0f} | {one.error:+.0%} | {text} |")
    return "\n".join(lines)


def output(words: str) -> str:
    """Return the output of `megaswift plan`."""
    text = io.StringIO()
    with redirect_stdout(text):
        code = megaswift(["plan", *words.split()])
    assert code == 0, words
    lines = [line if len(line) < 160 else line[:157] + "..." for line in text.getvalue().rstrip().splitlines()]
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
    cfg = load_config(options["--task"], [words[0], "--model", options["--model"]], environ={})
    machine = Machine(planned_gpu(options["--gpu"]), 8)
    plan = plan_run(cfg, described_model(cfg), machine, int(options["--gpus"]), 1)
    row = row_text(plan.rows[0], plan.question.usable)
    return "\n".join([*lines[: at + 1], FORECAST + row, *lines[at + 2 :]]) + "\n"


def draw(found: list[Published], picture: Path) -> None:
    """Forecast against published figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.4), dpi=120, layout="constrained")
    axis = figure.subplots()
    for gpu, color in zip(dict.fromkeys(one.row["gpu"] for one in found), COLORS, strict=False):
        own = [one for one in found if one.row["gpu"] == gpu]
        axis.scatter([o.measured for o in own], [o.tokens for o in own], color=color, label=gpu, s=26, alpha=0.85)
    ends = [200, 50000]
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


def replaced(text: str, name: str, block: str) -> str:
    """The page with a block between its marks."""
    begin = f"<!-- {name}: scripts/plan_figures.py writes this -->"
    end = f"<!-- end of {name} -->"
    assert begin in text and end in text, f"{PAGE} has no place for {name}"
    return text[: text.index(begin) + len(begin)] + f"\n\n{block}\n\n" + text[text.index(end) :]


def main(argv: list[str] | None = None) -> int:
    """Writes or checks; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is out of date")
    check = parser.parse_args(argv).check
    found = forecasts()
    text = fresh = PAGE.read_text(encoding="utf-8")
    for name, words in COMMANDS.items():
        fresh = replaced(fresh, name, output(words))
    fresh = replaced(fresh, "errors", errors_text(found))
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

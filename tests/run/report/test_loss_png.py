"""loss.png shows the run: pixels are looked at, not only the file's presence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megaswift.run.report import loss_png
from megaswift.trainers.hooks.metrics import strict_json_text

pytestmark = pytest.mark.wide


def write_run(folder: Path, losses: list[float], evals: dict[int, float] | None = None) -> tuple[Path, Path, Path]:
    folder.mkdir(exist_ok=True)
    metrics, evaluation, picture = folder / "metrics.jsonl", folder / "eval.jsonl", folder / "loss.png"
    lines = [
        {"step": i, "loss": v, "grad_norm": 1 + v / 10, "learning_rate": 1e-3 / i} for i, v in enumerate(losses, 1)
    ]
    metrics.write_text("".join(strict_json_text(line) + "\n" for line in lines))
    if evals:
        evaluation.write_text("".join(strict_json_text({"step": s, "loss": v}) + "\n" for s, v in evals.items()))
    return metrics, evaluation, picture


def colors(picture: Path) -> np.ndarray:
    return np.asarray(Image.open(picture).convert("RGB")).astype(int)


def near(image: np.ndarray, color: str) -> np.ndarray:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return np.argwhere(np.abs(image - wanted).max(-1) < 30)


def test_the_loss_falls_on_the_picture_and_evaluations_are_marked(tmp_path: Path) -> None:
    losses = [5 * math.exp(-i / 60) + 0.3 * math.sin(i) for i in range(200)]
    files = write_run(tmp_path, losses, {50: 3.0, 100: 2.0, 200: 1.0})
    loss_png.draw_loss_png(*files, "a run")
    image = colors(files[2])
    assert image.shape[0] > 700 and image.shape[1] > 1000 and image.std() > 10
    upper = near(image[: image.shape[0] // 2], loss_png.MEAN)
    left, right = upper[upper[:, 1] < 350][:, 0], upper[upper[:, 1] > 1000][:, 0]
    assert len(left) > 50 and len(right) > 50 and left.mean() + 150 < right.mean()  # rows count downwards
    marks = near(image, loss_png.EVAL)
    assert len(marks[marks[:, 1] < 800]) > 60  # left of the legend
    assert len(near(image[image.shape[0] // 2 :], loss_png.MEAN)) > 200  # learning rate and gradient norm


def test_other_numbers_make_another_picture_and_no_numbers_none(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", [3.0, 2.0, 1.0]), write_run(tmp_path / "b", [1.0, 2.0, 3.0])
    loss_png.draw_loss_png(*first, "t")
    loss_png.draw_loss_png(*second, "t")
    assert (colors(first[2]) != colors(second[2])).any()
    empty = write_run(tmp_path / "c", [])
    loss_png.draw_loss_png(*empty, "t")
    assert not empty[2].exists()


@pytest.mark.parametrize("losses", [[2.0], [math.nan, math.nan], [2.0, math.nan, 1.0], [2.0, 2.0]])
def test_odd_runs_are_drawn_too(tmp_path: Path, losses: list[float]) -> None:
    files = write_run(tmp_path, losses)
    loss_png.draw_loss_png(*files, "t")
    assert colors(files[2]).std() > 5


def test_steps_are_whole_numbers_on_the_axis_of_a_single_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
    loss_png.draw_loss_png(*write_run(tmp_path, [2.0]), "t")
    low, high = drawn[0].axes[2].get_xlim()
    assert [t for t in drawn[0].axes[2].get_xticks() if low <= t <= high] == [1]


def test_a_spike_does_not_move_the_median() -> None:
    values = [2.0] * 10 + [50.0] + [1.0] * 10
    smoothed = loss_png.median_smooth(values, 6)
    assert max(smoothed) == 2.0 and smoothed[0] == 2.0 and smoothed[-1] == 1.0
    assert math.isnan(loss_png.median_smooth([1.0, math.nan, 3.0], 3)[1])
    # as many lines as the legend says
    assert [loss_png.smoothing_window(n) for n in (1, 59, 60, 90, 120)] == [
        1,
        1,
        3,
        3,
        5,
    ]


def test_the_range_leaves_out_a_first_spike_of_a_long_curve() -> None:
    low, high = loss_png.plot_limits([100.0] + [1 + i / 1000 for i in range(300)]) or (0, 0)
    assert low < 1 and high < 3
    assert (loss_png.plot_limits([1.0, 100.0]) or (0, 0))[1] > 100
    assert loss_png.plot_limits([math.nan]) is None
    assert loss_png.plot_limits([0.0] * 20) == (0.0, 1.0), "a constant 0 has no axis of 1e-09, and none below 0"
    assert loss_png.plot_limits([-2.0, -2.0]) == (-2.1, -1.9)


def scales(picture: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str], str]:
    """The scale of the upper axis, its visible labels, and the title."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
    loss_png.draw_loss_png(*picture, "run · sft of model")
    upper = drawn[0].axes[0]
    low, high = upper.get_ylim()
    texts = [text.get_text() for text in upper.get_yticklabels() if low <= text.get_position()[1] <= high]
    return upper.get_yscale(), texts, upper.get_title(loc="left")


def test_a_loss_near_the_end_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 7.9 to 0.06 on a logarithmic axis; a reward, and a loss that falls less, on a linear one."""
    falling = [7.9 * math.exp(-i / 20) for i in range(98)]
    scale, texts, title = scales(write_run(tmp_path / "a", falling), monkeypatch)
    assert scale == "log" and {"0.1", "0.2", "0.5", "1", "2", "5"} <= {*texts} and title == "run · sft of model"
    assert scales(write_run(tmp_path / "b", [4.0, 3.0, 2.0]), monkeypatch)[0] == "linear"
    files = write_run(tmp_path / "c", [1.0, 2.0])
    files[0].write_text(
        "".join(strict_json_text({"step": i, "loss": 1.0, "reward": 0.01 * i**2}) + "\n" for i in range(1, 9))
    )
    assert scales(files, monkeypatch)[0] == "linear"

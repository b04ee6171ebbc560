"""Learning rates against transformers' schedulers, and by hand where it has none."""

import itertools
import json

import pytest
import torch
from transformers import get_scheduler

from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.trainers.options.schedule import ScheduleConfig as Schedule
from megaswift.trainers.schedule import check_schedule_length, lr_at, warmup_steps, weight_decay_at

STEPS = 37

PEAK = 3e-4


def rates(**given):
    return [lr_at(i, STEPS, Schedule(**given), PEAK) for i in range(STEPS)]


def theirs(name, warm, **specific):
    """The rate that each optimizer step of a training with transformers' scheduler takes."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warm, num_training_steps=STEPS, scheduler_specific_kwargs=specific
    )
    out = []
    for _ in range(STEPS):
        out.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return out


NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "inverse_sqrt": "inverse_sqrt"}


@pytest.mark.parametrize(("kind", "warm"), list(itertools.product(NAMES, (0, 1, 5))))
def test_rates_are_those_of_transformers(kind, warm):
    assert rates(lr_scheduler_type=kind, warmup_steps=warm) == pytest.approx(
        theirs(NAMES[kind], warm), rel=1e-12, abs=0
    )


@pytest.mark.parametrize("warm", [0, 5])
def test_cosine_with_a_lowest_rate(warm):
    expected = theirs("cosine_with_min_lr", warm, min_lr=3e-5)
    assert rates(min_lr=3e-5, warmup_steps=warm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warm", [0, 5])
def test_a_lowest_rate_as_a_fraction(warm):
    expected = theirs("cosine_with_min_lr", warm, min_lr_rate=0.1)
    assert rates(min_lr_ratio=0.1, warmup_steps=warm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warm", "start"), [(0, None), (5, None), (1, None), (5, 0.2), (1, 0.2)])
def test_cosine_with_a_warm_up_that_begins_above_0(warm, start):
    expected = theirs("cosine_warmup_with_min_lr", warm, min_lr_rate=0.1, warmup_lr_rate=start)
    given = {"min_lr_ratio": 0.1, "warmup_steps": warm, "lr_warmup_init": (start or 0) * 3e-4}
    assert rates(lr_scheduler_type="cosine_warmup_with_min_lr", **given) == pytest.approx(expected, rel=1e-12)


def test_decay_steps_of_wsd():
    expected = theirs("warmup_stable_decay", 5, num_decay_steps=9)
    assert rates(lr_scheduler_type="wsd", wsd_decay_steps=9, warmup_steps=5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "style"),
    [("linear", "linear"), ("cosine", "cosine"), ("inverse_sqrt", "inverse-square-root"), ("wsd", "WSD")],
)
@pytest.mark.parametrize("until", [20, 50])
def test_a_schedule_that_ends_before_or_after_the_run_is_megatron_s(kind, style, until):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    fall = {"wsd_decay_steps": 8, "lr_wsd_decay_style": "linear"} if kind == "wsd" else {}
    scheduler = OptimizerParamScheduler(optimizer, 1e-5, 3e-4, 2e-5, 5, until, style, 0.0, 0.0, 1, "constant", **fall)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    own = {"wsd_decay_steps": 8, "wsd_decay_style": "linear"} if kind == "wsd" else {}
    got = rates(lr_scheduler_type=kind, min_lr=2e-5, lr_warmup_init=1e-5, warmup_steps=5, lr_decay_iters=until, **own)
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_decay_steps": 9, "num_stable_steps": 6},
        {"num_decay_steps": 9, "num_stable_steps": 0, "min_lr_ratio": 0.1},
        {"num_decay_steps": 8, "min_lr_ratio": 0.2, "decay_type": "1-sqrt"},
        {"num_decay_steps": 40, "num_stable_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.1},
        {"num_decay_steps": 4, "num_stable_steps": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("warm", [0, 1, 5])
def test_keys_of_wsd_are_transformers(kwargs, warm):
    """As a user types them, in lr_scheduler_kwargs."""
    words = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", json.dumps(kwargs), "--lr", "3e-4"]
    schedule = load_config("sft", [*words, "--warmup_steps", str(warm)], environ={}).schedule
    expected = theirs("warmup_stable_decay", warm, **kwargs)
    assert [lr_at(i, STEPS, schedule, PEAK) for i in range(STEPS)] == pytest.approx(expected, rel=1e-12)


def test_a_warmup_rate_of_transformers_is_a_fraction():
    words = ["--lr_scheduler_type", "cosine_warmup_with_min_lr", "--lr", "3e-4", "--warmup_steps", "5"]
    kwargs = {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}
    schedule = load_config("sft", [*words, "--lr_scheduler_kwargs", json.dumps(kwargs)], environ={}).schedule
    expected = theirs("cosine_warmup_with_min_lr", 5, **kwargs)
    assert [lr_at(i, STEPS, schedule, PEAK) for i in range(STEPS)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_weight_decay_is_megatron_s(style):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4, weight_decay=0.0)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 3e-4, 0.0, 0, STEPS, "cosine", 0.05, 0.3, STEPS, style)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step(1)
    words = ["--start_weight_decay", "0.05", "--end_weight_decay", "0.3", "--weight_decay_incr_style", style]
    schedule = load_config("sft", words, environ={}).schedule
    assert [weight_decay_at(i, STEPS, schedule) for i in range(STEPS)] == pytest.approx(expected, rel=1e-12)
    assert weight_decay_at(0, STEPS, load_config("sft", [], environ={}).schedule) is None


@pytest.mark.parametrize("warm", [0, 5])
def test_wsd_is_transformers(warm):
    decay = 8  # 0.2 x 37 rounded up
    expected = theirs("warmup_stable_decay", warm, num_decay_steps=decay)
    assert rates(lr_scheduler_type="wsd", wsd_decay_ratio=0.2, warmup_steps=warm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("style", "kind"), [("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt")])
def test_wsd_styles_are_transformers(style, kind):
    expected = theirs("warmup_stable_decay", 5, num_decay_steps=8, decay_type=kind)
    got = rates(lr_scheduler_type="wsd", wsd_decay_ratio=0.2, wsd_decay_style=style, warmup_steps=5)
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "cosine", "minus_sqrt", "exponential"])
def test_wsd_styles_are_megatron_s(style):
    """Step by step, with a warm-up that begins above 0 and a lowest rate."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = OptimizerParamScheduler(
        optimizer,
        1e-5,
        3e-4,
        2e-5,
        5,
        STEPS,
        "WSD",
        0.0,
        0.0,
        1,
        "constant",
        wsd_decay_steps=8,
        lr_wsd_decay_style=style,
    )
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    options = {"wsd_decay_ratio": 0.2, "wsd_decay_style": style, "warmup_steps": 5, "lr_warmup_init": 1e-5}
    assert rates(lr_scheduler_type="wsd", min_lr=2e-5, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warm", "cycles"), [(0, 1), (5, 1), (0, 3), (5, 4)])
def test_restarts_are_transformers(warm, cycles):
    got = rates(lr_scheduler_type="cosine_with_restarts", warmup_steps=warm, lr_num_cycles=cycles)
    assert got == pytest.approx(theirs("cosine_with_restarts", warm, num_cycles=cycles), rel=1e-12)


@pytest.mark.parametrize(("warm", "power"), [(0, 1.0), (5, 2.0), (0, 0.5)])
def test_polynomial_is_transformers(warm, power):
    got = rates(lr_scheduler_type="polynomial", warmup_steps=warm, lr_power=power, min_lr=1e-7)
    assert got == pytest.approx(theirs("polynomial", warm, power=power, lr_end=1e-7), rel=1e-12)


def test_wsd_by_hand():
    schedule = Schedule(min_lr=0.2, lr_scheduler_type="wsd", warmup_steps=2, wsd_decay_ratio=0.4)
    got = [lr_at(i, 10, schedule, 1.0) for i in range(11)]
    fall = [1.0, 0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 0.5**0.5) / 2, 0.2]
    assert got == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, *fall])


def test_wsd_that_decays_all_along_starts_after_the_warm_up():
    schedule = Schedule(lr_scheduler_type="wsd", warmup_steps=4, wsd_decay_ratio=1.0)
    assert [lr_at(i, 8, schedule, 1.0) for i in (3, 4, 6)] == pytest.approx([0.75, 1.0, 0.5])


def test_linear_falls_to_the_lowest_rate_and_stays():
    schedule = Schedule(min_lr=0.5, lr_scheduler_type="linear")
    assert [lr_at(i, 4, schedule, 1.0) for i in range(6)] == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


def test_inverse_sqrt_has_a_floor():
    schedule = Schedule(min_lr=0.5, lr_scheduler_type="inverse_sqrt", warmup_steps=4)
    assert [lr_at(i, 99, schedule, 1.0) for i in (2, 4, 9, 16, 98)] == pytest.approx([0.5, 1.0, 2 / 3, 0.5, 0.5])


def test_full_and_lowest_rates_are_exact():
    schedule = Schedule(min_lr=1e-5, warmup_steps=3)
    assert lr_at(3, 10, schedule, PEAK) == 3e-4
    assert lr_at(10, 10, schedule, PEAK) == 1e-5


def test_warmup_steps():
    assert warmup_steps(37, Schedule(warmup_ratio=0.1)) == 4
    assert warmup_steps(37, Schedule(warmup_ratio=0.1, warmup_steps=2)) == 2
    assert warmup_steps(37, Schedule()) == 0


def test_a_warm_up_that_outlasts_the_run_is_refused():
    with pytest.raises(ConfigError, match="--warmup_steps 11: is longer than the run of 10 steps"):
        check_schedule_length(10, SwiftConfig(warmup_steps=11).schedule)
    assert (
        check_schedule_length(10, SwiftConfig(warmup_steps=10).schedule)
        is check_schedule_length(1, SwiftConfig(warmup_ratio=0.9).schedule)
        is None
    )


def test_every_kind_of_the_configuration_has_a_rate():
    from megaswift.config.sections import OPTIONS

    for kind in OPTIONS["lr_scheduler_type"].details["choices"]:
        assert 0 <= lr_at(1, 10, Schedule(lr_scheduler_type=kind), PEAK) <= 3e-4


def test_a_decay_longer_than_the_schedule() -> None:
    """Of the run's steps, known once the data are read, or of `lr_decay_iters`."""
    with pytest.raises(ConfigError, match=r"wsd_decay_steps 6: is longer than the schedule of 5 steps"):
        check_schedule_length(5, SwiftConfig(lr_scheduler_type="wsd", wsd_decay_steps=6).schedule)
    with pytest.raises(ConfigError, match=r"is longer than the schedule of 4 steps"):
        check_schedule_length(9, SwiftConfig(lr_scheduler_type="wsd", wsd_decay_steps=6, lr_decay_iters=4).schedule)
    assert check_schedule_length(6, SwiftConfig(lr_scheduler_type="wsd", wsd_decay_steps=6).schedule) is None

"""Rules for learning-rate schedules: which options a schedule reads. The formulas are in
`megaswift.trainers.schedule`."""

from __future__ import annotations

from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections
from megaswift.trainers.options.schedule import PLATEAU

_SCHEDULE = ("lr_scheduler_type",)


def reads_decay_steps(c: Sections) -> bool:
    """Return whether a schedule has an end, or a warmup that is a share of the steps up to it."""
    return c.schedule.lr_scheduler_type not in ("constant", PLATEAU) or bool(c.schedule.warmup_ratio)


SCHEDULE_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "num_train_epochs",
        ("max_steps",),
        lambda c: c.train.max_steps is not None,
        "max_steps {max_steps} already sets the length of the run",
        ONE_OF,
        notice=True,
    ),
    IgnoredOption(
        "wsd_decay_ratio",
        ("wsd_decay_steps",),
        lambda c: c.schedule.wsd_decay_steps is not None,
        "wsd_decay_steps {wsd_decay_steps} already sets the length of the decay phase",
        ONE_OF,
    ),
    IgnoredOption(
        "weight_decay",
        ("weight_decay_incr_style", "start_weight_decay"),
        lambda c: c.schedule.weight_decay_incr_style != "constant" and c.schedule.start_weight_decay is not None,
        "start_weight_decay and end_weight_decay set the weight decay",
        "--weight_decay_incr_style constant",
        notice=True,
    ),
    IgnoredOption(
        "warmup_ratio",
        ("warmup_steps",),
        lambda c: c.schedule.warmup_steps > 0,
        "warmup_steps {warmup_steps} already sets the length of the warmup",
        ONE_OF,
    ),
)


def _typed_warmup(c: Sections) -> int:
    """Warmup steps that a short run does not shorten."""
    return 0 if c.schedule.warmup_fits_run else c.schedule.warmup_steps


SCHEDULE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("warmup_steps", "max_steps"),
        lambda c: c.train.max_steps is not None and _typed_warmup(c) > c.train.max_steps,
        "is longer than the run of {max_steps} steps",
        "--warmup_steps {max_steps}",
    ),
    ConflictingOptions(
        ("lr_warmup_init", "learning_rate"),
        lambda c: c.schedule.lr_warmup_init > c.optim.learning_rate,
        "is above learning_rate {learning_rate}",
        "--lr_warmup_init 0",
    ),
    ConflictingOptions(
        ("lr_warmup_init_ratio", "lr_warmup_init"),
        lambda c: c.schedule.lr_warmup_init_ratio is not None and c.schedule.lr_warmup_init > 0,
        "conflicts with lr_warmup_init {lr_warmup_init}: both set the learning rate of the first warmup step",
        ONE_OF,
    ),
    ConflictingOptions(
        ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
        lambda c: (
            c.schedule.weight_decay_incr_style != "constant"
            and None in (c.schedule.start_weight_decay, c.schedule.end_weight_decay)
        ),
        "needs start_weight_decay and end_weight_decay",
        "--start_weight_decay 0.0 --end_weight_decay 0.1",
    ),
    ConflictingOptions(
        ("min_lr_ratio", "min_lr"),
        lambda c: c.schedule.min_lr_ratio is not None and c.schedule.min_lr > 0,
        "conflicts with min_lr {min_lr}: both set the final learning rate",
        ONE_OF,
    ),
    ConflictingOptions(
        ("lr_decay_iters", "warmup_steps"),
        lambda c: c.schedule.lr_decay_iters is not None and _typed_warmup(c) >= c.schedule.lr_decay_iters,
        "ends the schedule within the {warmup_steps} warmup steps",
        "give more steps than --warmup_steps {warmup_steps}",
    ),
    ConflictingOptions(
        ("min_lr", "learning_rate"),
        lambda c: c.schedule.min_lr > c.optim.learning_rate,
        "is above learning_rate {learning_rate}",
        "--min_lr 0",
    ),
)

"""Every option alone, and with every value of every selector: accepted, or which options the refusal names.

`options.txt` lists the options: name | command | values | companions that let the option be used. The first value is
the one that meets the selectors. `alone.txt` has the outcome of every value; `pairs.txt` has the refused pairs, every
other pair is accepted. `python -m tests.net.options --write` rewrites both.
"""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.net.front import ACCEPTED, PARSED, outcome
from tests.net.record import FOLDER, read_record, write_record

TASKS = ("sft", "pt", "dpo", "kto", "orpo", "cpo", "simpo", "rm", "grpo", "ppo")
SELECTORS = {
    "engine": "auto megatron ddp zero0 zero1 zero2 zero3 zero2_offload zero3_offload fsdp2",
    "optimizer": "adam sgd adafactor muon galore_adamw galore_adamw_8bit galore_adafactor adamw_8bit paged_adamw_32bit"
    " paged_adamw_8bit lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit",
    "lr_scheduler_type": "constant linear cosine cosine_with_restarts cosine_warmup_with_min_lr polynomial inverse_sqrt"
    " wsd reduce_lr_on_plateau",
    "train_type": "full lora qlora adalora boft delora fourierft gralora hra ia3 loha lokr miss oft randlora road shira"
    " vblora vera waveft",
    "report_to": "tensorboard wandb swanlab mlflow trackio",
    "launcher": "torchrun ray",
}
"""Selectors of every task."""
SELECTORS_OF_TASK = {
    ("dpo", "loss_type"): "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero"
    " apo_down discopop sft sigmoid_norm",
    ("kto", "loss_type"): "kto apo_zero_unpaired bco",
    ("orpo", "loss_type"): "odds_ratio",
    ("cpo", "loss_type"): "sigmoid hinge ipo simpo alphapo",
    ("rm", "loss_type"): "bradley_terry",
    ("grpo", "loss_type"): "dapo grpo bnpo dr_grpo cispo sapo luspo vespo rloo clip_cov kl_cov",
    ("grpo", "advantage_estimator"): "grpo rloo reinforce_plus_plus opo remax pass_at_k",
    ("grpo", "rollout_backend"): "transformers vllm vllm_server sglang",
    ("ppo", "rollout_backend"): "transformers vllm vllm_server sglang",
    ("infer", "infer_backend"): "transformers vllm",
    ("deploy", "infer_backend"): "transformers vllm",
}
COMPANIONS = {"--launcher ray": "--num_workers 2"}
"""What a value of a selector cannot be used without."""
SEED = 46


@dataclass(frozen=True)
class Case:
    """A command line of a case."""

    command: str
    words: str

    def __str__(self) -> str:
        return f"{self.command} {self.words}".rstrip()

    def outcome(self) -> str:
        """What the code does with it now."""
        return outcome(self.command, shlex.split(self.words))


@dataclass(frozen=True)
class ListedOption:
    """A line of `options.txt`."""

    name: str
    command: str
    values: tuple[str, ...]
    companions: str

    def words(self, value: str, without: str = "") -> str:
        """The option as it is typed, behind its companions but for one."""
        needed = [c.strip() for c in self.companions.split("--") if c and c.split()[0] != without]
        return " ".join([*(f"--{c}" for c in needed), f"--{self.name} {value}"])

    def alone(self) -> Iterator[Case]:
        """Every value: in training also without the companions."""
        for value in self.values:
            if self.command not in PARSED:
                yield Case(self.command, f"--{self.name} {value}")
            if self.companions or self.command in PARSED:
                yield Case(self.command, self.words(value))


@dataclass(frozen=True)
class Selected:
    """A value of a selector in a task."""

    command: str
    name: str = ""
    value: str = ""

    @property
    def words(self) -> str:
        """The selector as it is typed."""
        typed = f"--{self.name} {self.value}" if self.name else ""
        return f"{COMPANIONS.get(typed, '')} {typed}".strip()


def listed_options() -> list[ListedOption]:
    """Return the options of `options.txt`."""
    found = []
    for line in (FOLDER / "options.txt").read_text(encoding="utf-8").splitlines():
        name, command, values, *companions = line.split(" | ")
        found.append(ListedOption(name, command, tuple(values.split(" ; ")), " ".join(companions)))
    return found


def selected(command: str) -> list[Selected]:
    """Return what an option of this command is combined with."""
    own = [s for s in _of_tasks() if s.command == command]
    if command in PARSED:
        return own
    common = [Selected(command, name, value) for name, values in SELECTORS.items() for value in values.split()]
    tasks = [Selected(task) for task in TASKS]
    return [*tasks, *common, *(s for s in _of_tasks() if s.command not in PARSED)]


def _of_tasks() -> list[Selected]:
    return [
        Selected(task, name, value) for (task, name), values in SELECTORS_OF_TASK.items() for value in values.split()
    ]


def alone_cases() -> list[Case]:
    """Return the cases of `alone.txt`: options, then selectors."""
    cases = [case for option in listed_options() for case in option.alone()]
    for task in (*TASKS, *PARSED):
        cases += [Case(s.command, s.words) for s in selected(task)]
    return list(dict.fromkeys(cases))


def paired_cases() -> list[Case]:
    """Return the cases of `pairs.txt`, those that are accepted included."""
    return [pair(option, s) for option in listed_options() for s in selected(option.command) if s.name != option.name]


def pair(option: ListedOption, s: Selected) -> Case:
    """Return an option with a value of a selector, which replaces the option's companion of that name."""
    return Case(s.command, f"{option.words(option.values[0], without=s.name)} {s.words}".strip())


def sampled_pairs(count: int) -> list[Case]:
    """Return pairs that have every option and every value of a selector at least once, the same ones every time."""
    draw = random.Random(SEED)
    options = listed_options()
    chosen: dict[Case, None] = {}
    for option in options:
        if choices := [s for s in selected(option.command) if s.name != option.name]:
            chosen[pair(option, draw.choice(choices))] = None
    for task in (*TASKS, *PARSED):
        of_task = [option for option in options if option.command == task]
        for s in selected(task) if of_task else ():
            option = draw.choice([option for option in of_task if option.name != s.name])
            chosen[pair(option, s)] = None
    everything = paired_cases()
    while len(chosen) < count:
        chosen[draw.choice(everything)] = None
    return list(chosen)


def outcomes(cases: Iterable[Case]) -> dict[str, str]:
    """Return what the code does now, by case."""
    return {str(case): case.outcome() for case in cases}


def recorded_pairs(cases: Iterable[Case]) -> dict[str, str]:
    """Return the recorded outcomes of pairs: those without a line are accepted."""
    refused_ones = read_record("pairs.txt")
    return {str(case): refused_ones.get(str(case), ACCEPTED) for case in cases}


def refused(found: dict[str, str]) -> dict[str, str]:
    """Return the refused ones."""
    return {case: result for case, result in found.items() if result != ACCEPTED}


def main() -> int:
    """Rewrite the records."""
    if sys.argv[1:] != ["--write"]:
        print(__doc__)
        return 2
    write_record("alone.txt", outcomes(alone_cases()))
    write_record("pairs.txt", refused(outcomes(paired_cases())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

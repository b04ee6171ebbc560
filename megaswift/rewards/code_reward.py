"""Rewards for programs: the last fenced code block of a completion, run in the sandbox once per test of the row.

`code_reward` is the share of tests that pass, `code_all_reward` is 1 where all do. The expected answers stay in this
process: a program sees its input only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megaswift import log
from megaswift.errors import Problem, RewardError
from megaswift.rewards.code_tests import CodeTest, read_tests
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.sandbox import JobLimits, JobOutcome, Sandbox, self_test_sandbox
from megaswift.rewards.scoring import BuiltInRewardParameters, reward_function_flag

TESTS = "tests"
CHUNK = 64
"""Jobs whose outputs are held at a time."""
_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


def extract_program(text: str) -> str | None:
    """The last fenced block, of Python or of no named language."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


@dataclass(frozen=True)
class CodeReward:
    """A reward for passing tests."""

    name: str
    sandbox: Sandbox
    all_or_nothing: bool = False
    columns: frozenset[str] = frozenset({TESTS})
    whole_groups: bool = False
    flag: str = ""
    """As typed."""

    def __call__(self, samples: Sequence[RewardInput]) -> list[float]:
        """One value a sample."""
        tests = [self._tests(i, sample) for i, sample in enumerate(samples)]
        passed = self._passed([extract_program(sample.text) for sample in samples], tests)
        shares = [count / len(of) for count, of in zip(passed, tests, strict=True)]
        return [float(share == 1) for share in shares] if self.all_or_nothing else shares

    def _tests(self, number: int, sample: RewardInput) -> list[CodeTest]:
        try:
            return read_tests(sample.columns.get(TESTS))
        except (ValueError, RecursionError) as error:
            rule = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RewardError(
                Problem(
                    reward_function_flag(self),
                    f"the column {TESTS} of sample {number} {rule}",
                    '[{"input": "1 2", "output": "3"}], or another form described in docs/rewards.md',
                )
            ) from None

    def _passed(self, programs: Sequence[str | None], tests: Sequence[Sequence[CodeTest]]) -> list[int]:
        """Tests that each program passes. One after the other: a program that hangs or attacks has no second chance to
        do so."""
        passed = [0] * len(programs)
        alive = [(i, program) for i, program in enumerate(programs) if program is not None]
        turn = 0
        while alive := [(i, program) for i, program in alive if turn < len(tests[i])]:
            going = []
            for start in range(0, len(alive), CHUNK):
                part = alive[start : start + CHUNK]
                for (i, program), outcome in zip(
                    part, self.sandbox.run([tests[i][turn].job(p) for i, p in part]), strict=True
                ):
                    passed[i] += self._right(tests[i][turn], outcome)
                    if outcome.how in ("ended", "failed"):
                        going.append((i, program))
            alive = going
            turn += 1
        return passed

    @staticmethod
    def _right(test: CodeTest, outcome: JobOutcome) -> bool:
        return outcome.how == "ended" and test.passed(outcome.out, outcome.result)


@functools.cache
def _sandbox(limits: JobLimits, locked: bool) -> Sandbox:
    return Sandbox("program", limits, locked)


def _built(name: str, options: BuiltInRewardParameters, all_or_nothing: bool) -> CodeReward:
    sandbox = _sandbox(JobLimits(options.code_timeout, options.code_memory), not options.allow_unsafe_code)
    if options.allow_unsafe_code:
        log.warn("--allow_unsafe_code true: generated programs run here with resource limits, but without a sandbox")
    else:
        self_test_sandbox(sandbox, f"--reward_funcs {name}")
    return CodeReward(name, sandbox, all_or_nothing)


def code_reward(options: BuiltInRewardParameters) -> CodeReward:
    """The share of tests that pass."""
    return _built("code", options, all_or_nothing=False)


def code_all_reward(options: BuiltInRewardParameters) -> CodeReward:
    """1 where all tests pass, else 0."""
    return _built("code_all", options, all_or_nothing=True)

"""Reward classes of files written for ms-swift, run as they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters

BUILT_IN = BuiltInRewardParameters(max_completion_length=8)
PLUGIN = """
import json
from typing import List
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

logger = get_logger()


class Exact(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        assert all(isinstance(c, str) for c in completions)
        return [float(c == s) for c, s in zip(completions, solution)]


class Turns(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)
        self.factor = 2

    def __call__(self, completions, messages, **kwargs):
        return [self.factor * len(m) for m in messages]


class Slow(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [0.5 for _ in completions]


class Needy(ORM):
    def __init__(self, args, **kwargs):
        self.tokens = args.max_tokens


class Scheduler(MultiTurnScheduler):
    def step(self):
        pass


orms["exact"], orms["turns"], orms["slow"], orms["needy"] = Exact, Turns, Slow, Needy
orms["plain"] = lambda completions, **kwargs: [1.0] * len(completions)
orms["engine"] = TransformersEngine
rm_plugins["mine"] = DefaultRMPlugin
multi_turns["mine"] = Scheduler
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return str(tmp_path / "plugin.py")


def samples() -> list[RewardInput]:
    chat = [{"role": "user", "content": "1+1?"}]
    answers = ([{"role": "assistant", "content": text}] for text in ("2", "3"))
    return [RewardInput(chat, answer, [1], True, {"solution": "2"}) for answer in answers]


def test_classes_and_functions(plugin: str) -> None:
    names = ["exact", "turns", "plain", "format"]
    exact, turns, plain, built_in = load_reward_functions(names, BUILT_IN, [plugin])
    assert [f.name for f in (exact, turns, plain)] == names[:3] and built_in.name == "format"
    assert exact(samples()) == [1.0, 0.0] and exact.columns == {"solution"}
    assert turns(samples()) == [4, 4] and turns.columns == frozenset()
    assert plain(samples()) == [1.0, 1.0]
    assert "swift" not in sys.modules and "swift.rewards" not in sys.modules


def test_an_async_class(plugin: str) -> None:
    import asyncio

    (slow,) = load_reward_functions(["slow"], BUILT_IN, [plugin])
    assert asyncio.run(slow.wait(samples())) == [0.5, 0.5]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("needy", "its class needs ms-swift's arguments"),
        ("engine", "TransformersEngine is part of ms-swift; only reward classes of orms run here"),
        ("exct", "is unknown"),
    ],
)
def test_what_cannot_run_is_named(name: str, said: str, plugin: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_reward_functions([name], BUILT_IN, [plugin])


def test_files_that_are_missing_or_fail(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--external_plugins .*no such file"):
        load_reward_functions([], BUILT_IN, [str(tmp_path / "plugni.py")])
    (tmp_path / "bad.py").write_text("from swift.rewards import ORM, orms\nraise ValueError('no key')\n")
    with pytest.raises(ConfigError, match="importing the file failed"):
        load_reward_functions([], BUILT_IN, [str(tmp_path / "bad.py")])
    assert "swift" not in sys.modules


def test_an_installed_swift_is_left_alone(plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "swift").mkdir(parents=True)
    (tmp_path / "site" / "swift" / "__init__.py").write_text("own = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    import swift

    load_reward_functions(["exact"], BUILT_IN, [plugin])
    assert sys.modules["swift"] is swift and swift.own == 1
    del sys.modules["swift"]


def test_the_option() -> None:
    words = ["--reward_funcs", "exact", "--external_plugins", "a.py", "b.py"]
    assert load_config("grpo", words, environ={}).train.external_plugins == ("a.py", "b.py")
    assert load_config("sft", ["--custom_register_path", "a.py"], environ={}).train.external_plugins == ("a.py",)

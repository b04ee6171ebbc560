"""`--external_plugins`: every recipe of docs/plugins.md does what it says, against formulas by hand and runs without
it; files that fail, names that are taken, files that are not named.

Covers: megaswift/options/plugins.py, megaswift/base/user_code.py.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift import plugins
from megaswift.config import SwiftConfig, load_config
from megaswift.data import tokenization
from megaswift.data.build import load_document_splits
from megaswift.data.options.loss_scale import NAMED
from megaswift.errors import ConfigError, DataError, PluginError
from megaswift.losses import kto
from megaswift.losses.advantage_estimators import estimate_advantage_fields
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import DpoSettings
from megaswift.losses.options.loss_table import PLUGIN_LOSSES
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings
from megaswift.models.family import FAMILIES
from megaswift.options import plugins as options_of_plugins
from megaswift.options.plugins import PLUGINS
from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters
from megaswift.run.checks.data import data_problems
from megaswift.run.checks.rl import reward_environment_and_model_problems
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.environment import load_environment_class
from tests.data.makers import jsonl, tokenizer
from tests.losses.bigram import documents, pairs, reference_of
from tests.losses.bigram import run as run_loss
from tests.losses.rollouts import models, rollouts
from tests.losses.test_advantage_estimators import inputs
from tests.registered_plugins import kept_registrations
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

RECIPES = re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", (Path(__file__).parents[1] / "docs/plugins.md").read_text(),
                     re.MULTILINE | re.DOTALL)  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test has registered goes with it."""
    with kept_registrations():
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], str]:
    """The file of a recipe, by its heading."""

    def write(heading: str) -> str:
        file = tmp_path / f"{heading.lower().replace(' ', '_')}.py"
        file.write_text(dict(RECIPES)[heading])
        return str(file)

    return write


def test_every_registration_has_a_recipe() -> None:
    public = {name for name, thing in vars(plugins).items() if callable(thing) and thing.__module__ == plugins.__name__}
    text = "".join(code for _, code in RECIPES)
    assert {name for name in public if name[0] != "_"} == set(re.findall(r"plugins\.(\w+)\(", text))


def test_a_reward(recipe: Callable[[str], str]) -> None:
    words = ["--external_plugins", recipe("Reward functions"), "--reward_funcs", "shorter"]
    cfg = load_config("grpo", words, environ={})
    (reward,) = load_reward_functions(
        cfg.rewards.reward_funcs, BuiltInRewardParameters(max_completion_length=8), cfg.train.external_plugins
    )
    assert reward([RewardInput("q", "x" * 50, [1], True, {})]) == [-0.5]


def tokens(tmp_path: Path, data: str, *words: str) -> list[list[int]]:
    """Of the rows of a file."""
    given = ["--model", "m", "--dataset", data, "--dataset_cache_dir", str(tmp_path / "cache"), *words]
    cfg = load_config("sft", given, environ={})
    docs, _ = load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
    return [docs.read(i)[0].tolist() for i in range(len(docs))]


def tickets(tmp_path: Path, count: int) -> tuple[str, str]:
    """(rows of the recipe's format, the same as questions and answers)."""
    rows = [{"product": "router", "problem": f"light {i} is red", "solution": f"press {i}"} for i in range(count)]
    plain = [{"query": f"[{r['product']}] {r['problem']}", "response": r["solution"]} for r in rows]
    return jsonl(tmp_path / "tickets.jsonl", rows), jsonl(tmp_path / "plain.jsonl", plain)


def test_a_data_format(recipe: Callable[[str], str], tmp_path: Path) -> None:
    """The tokens of rows that are written as messages; others when the file changes."""
    (data, plain), file = tickets(tmp_path, 9), recipe("Data formats")
    with pytest.raises(DataError, match="no format has these columns"):
        tokens(tmp_path, data)
    words = ["--external_plugins", file]
    assert tokens(tmp_path, data, *words) == tokens(tmp_path, plain, *words)
    Path(file).write_text(Path(file).read_text().replace("[{row['product']}] ", ""))
    assert tokens(tmp_path, data, *words) != tokens(tmp_path, plain, *words)
    Path(file).write_text(Path(file).read_text().replace('row["solution"]', 'row["solutoins"]'))
    with pytest.raises(DataError, match=r"tickets.jsonl:1 and (.|\n)*ticket failed(.|\n)*KeyError: 'solutoins'"):
        tokens(tmp_path, data, *words)


@pytest.mark.slow
def test_a_data_format_of_workers(
    recipe: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that tokenize read the file too."""
    monkeypatch.setattr(tokenization, "WORKER_BYTES", 1)
    work, counts = tokenization._run_workers, []
    monkeypatch.setattr(tokenization, "_run_workers", lambda *how: counts.append(how[-1]) or work(*how))
    data, plain = tickets(tmp_path, 2000)
    words = ["--external_plugins", recipe("Data formats"), "--dataset_num_proc", "2"]
    assert tokens(tmp_path, data, *words) == tokens(tmp_path, plain) and counts == [2]


@pytest.mark.wide
def test_a_data_format_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tokenized in this process, whose format it is, and again when another function is registered."""
    data, plain = tickets(tmp_path, 2000)

    def register(mark: str) -> None:
        @plugins.data_format("ticket", ("product", "problem", "solution"))
        def ticket(row: Any) -> Any:
            turns = [{"role": "user", "content": f"{mark}{row['product']}] {row['problem']}"}]
            return {"messages": [*turns, {"role": "assistant", "content": row["solution"]}]}

    monkeypatch.setattr(tokenization, "WORKER_BYTES", 1)
    monkeypatch.setattr(tokenization, "_run_workers", lambda *_: pytest.fail("has no such format"))
    monkeypatch.setattr(options_of_plugins, "defined_at", lambda _: "<a cell of a notebook>:1")
    register("[")
    assert tokens(tmp_path, data, "--dataset_num_proc", "2") == tokens(tmp_path, plain)
    register("(")
    assert tokens(tmp_path, data) != tokens(tmp_path, plain)


def test_a_script_s_file_tells_whether_its_format_has_changed(tmp_path: Path) -> None:
    """The same on every rank, and in another process."""
    digests = []
    for text in ("def parse(row): return row", "def parse(row): return row", "def parse(row): return {**row}"):
        (tmp_path / "script.py").write_text(text)
        names = runpy.run_path(str(tmp_path / "script.py"))
        digests.append(options_of_plugins.digest_of_script(names["parse"]))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("heading", ["Reward functions", "Environments", "Advantage estimators", "Losses"])
def test_a_script_needs_no_file(heading: str, recipe: Callable[[str], str]) -> None:
    """What the recipes register is there when they have run in this process."""
    runpy.run_path(recipe(heading), run_name="__main__")
    options = {
        "Reward functions": {"reward_funcs": "shorter"},
        "Environments": {"environment": "echo"},
        "Advantage estimators": {"advantage_estimator": "median"},
        "Losses": {"loss_type": "unclipped"},
    }[heading]
    cfg = SwiftConfig(task="grpo", **options)
    assert not reward_environment_and_model_problems(cfg)
    assert [name for _, name in PLUGINS.of_script][-1] == [*options.values()][0]
    if heading == "Environments":
        echo = load_environment_class("echo")()
        assert echo.reset("1+1=") is None and echo.step("2") == ([{"role": "user", "content": "2"}], 0.5, False)


def test_a_decorator_registers_what_follows() -> None:
    @plugins.kto_loss("mine", needs_kl=True)
    def mine(rewards: torch.Tensor, desirable: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return rewards - zero

    assert mine(torch.ones(2), torch.ones(2), torch.zeros(())).tolist() == [1, 1], "the function is as it was"
    assert PLUGIN_LOSSES["kto", "mine"].needs and "mine" in kto.LOSS_TYPES
    with pytest.raises(ConfigError, match="megaswift.plugins: registers reward accuracy, which megaswift has"):
        plugins.reward("accuracy", len)


def test_a_loss_scale(recipe: Callable[[str], str], tmp_path: Path) -> None:
    """As the same table in a JSON file."""
    load_config("sft", ["--external_plugins", recipe("Loss scales")], environ={})
    (tmp_path / "t.json").write_text(json.dumps(NAMED["formula"]))
    row = {"query": "q", "response": "As an AI model, I say $a+b$ is right."}
    data, found = jsonl(tmp_path / "d.jsonl", [row]), []
    for scale in ("formula", f"default+{tmp_path / 't.json'}"):
        words = ["--model", "m", "--dataset", data, "--dataset_cache_dir", str(tmp_path / "cache")]
        cfg = load_config("sft", [*words, "--loss_scale", scale], environ={})
        docs, _ = load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
        found.append(docs.read(0)[1].tolist())
    assert found[0] == found[1] and {*found[0]} == {0.0, 1.0, 2.0}


def test_losses_by_hand(recipe: Callable[[str], str]) -> None:
    words = ["--external_plugins", recipe("Losses"), "--loss_type"]
    assert load_config("dpo", [*words, "squared_hinge"], environ={}).preference.loss_type == ("squared_hinge",)
    with pytest.raises(ConfigError, match="squared_hinge"):
        load_config("grpo", [*words, "squared_hinge", "--reward_funcs", "format"], environ={})
    policy, reference = models()
    docs = documents([(3, 5), (3, 2), (1, 1), (1, 7)])
    batches = [reference_of(reference, pairs(docs, True))]
    value, _, _ = run_loss(DPO(("squared_hinge",), settings=DpoSettings(0.3)), policy, batches)

    def logp(model: Any, doc: Any) -> float:
        table = torch.log_softmax(model.weight.detach(), -1)
        return sum(float(table[a, b]) for a, b in zip(doc.ids[doc.begin - 1 :], doc.ids[doc.begin :], strict=False))

    ratios = [logp(policy, doc) - logp(reference, doc) for doc in docs]
    margins = [0.3 * (a - b) for a, b in zip(ratios[::2], ratios[1::2], strict=True)]
    assert value == pytest.approx(sum(max(0.0, 1 - m) ** 2 for m in margins) / len(margins), rel=1e-9)
    given = rollouts(policy, reference).batch(True)
    cfg = load_config("grpo", [*words, "unclipped", "--reward_funcs", "format"], environ={})
    assert cfg.preference.loss_type == ("unclipped",)
    unclipped = run_loss(PolicyLoss("unclipped"), policy, [given])
    never = run_loss(PolicyLoss("dapo", PolicySettings(epsilon=1e6, epsilon_high=1e6)), policy, [given])
    clipped = run_loss(PolicyLoss("dapo", PolicySettings(epsilon=0.01)), policy, [given])
    assert unclipped[0] == pytest.approx(never[0], rel=1e-12) and unclipped[0] != pytest.approx(clipped[0], rel=1e-6)


def test_an_advantage_estimator_by_hand(recipe: Callable[[str], str]) -> None:
    words = ["--external_plugins", recipe("Advantage estimators"), "--advantage_estimator", "median"]
    cfg = load_config("grpo", [*words, "--reward_funcs", "format", "--num_generations", "2"], environ={})
    assert cfg.rl.advantage_estimator == "median"
    found = estimate_advantage_fields("median", inputs([1.0, 5.0, 2.0, 0.0, 0.0, 9.0], 3))["advantages"]
    assert found[:, 0].tolist() == [-1.0, 3.0, 0.0, 0.0, 0.0, 9.0]
    with pytest.raises(ConfigError, match="advantage_estimator"):
        load_config("ppo", [*words, "--reward_funcs", "format"], environ={})


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("0.0", "returned float, not a tensor"),
        ("torch.tensor(1.0)", r"returned a tensor of shape \[\]"),
        ("torch.ones(1)", r"returned a tensor of shape \[1\]"),
        ("x.totals.unsqueeze(1)", r"returned a tensor of shape \[6, 1\]"),
        ("x.totals.tolist()", "returned list, not a tensor"),
        ("None", "returned NoneType, not a tensor"),
        ("x.totals * float('nan')", "returned numbers that are not finite"),
        ("x.totals > 0", "returned a tensor of bool"),
        ("{'returns': x.totals}", "returned a mapping without advantages, with 'returns'"),
        ("{'advantages': x.totals, 'returns': x.totals[:1]}", r"returned returns as a tensor of shape \[1\]"),
        ("x.missing", "failed\n(.*\n)*.*AttributeError"),
        ("sys.exit(0)", "failed\n(.*\n)*.*SystemExit"),
    ],
)
def test_an_advantage_estimator_that_returns_nonsense(returned: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "import sys\nimport torch\nfrom megaswift import plugins\n\n\ndef odd(x):\n    return "
        f"{returned}\n\n\nplugins.advantage_estimator('odd', odd)\n",
        encoding="utf-8",
    )
    load_config("grpo", ["--external_plugins", str(file), "--reward_funcs", "format"], environ={})
    with pytest.raises(PluginError, match=told) as error:
        estimate_advantage_fields("odd", inputs([1.0, 5.0, 2.0, 0.0, 0.0, 9.0], 3))
    assert "--advantage_estimator odd: the estimator of" in str(error.value) and str(file) in str(error.value)


def test_an_advantage_estimator_may_return_tokens_and_change_its_input(tmp_path: Path) -> None:
    file = tmp_path / "fine.py"
    text = "def fine(x):\n    found = x.mask * x.totals.unsqueeze(1)\n    x.mask.zero_()\n    return found\n\n\n"
    file.write_text(
        f"from megaswift import plugins\n\n\n{text}plugins.advantage_estimator('fine', fine)\n", encoding="utf-8"
    )
    load_config("grpo", ["--external_plugins", str(file), "--reward_funcs", "format"], environ={})
    given = inputs([1.0, 5.0], 2)
    assert estimate_advantage_fields("fine", given)["advantages"].tolist() == [[1.0] * 3, [5.0] * 3]
    assert given.mask.all()


def test_a_family(recipe: Callable[[str], str]) -> None:
    from transformers import Qwen2Config

    config = json.loads(Qwen2Config(num_hidden_layers=2, architectures=["Qwen2ForCausalLM"]).to_json_string(False))
    load_config("sft", ["--external_plugins", recipe("Model families")], environ={})
    ours = FAMILIES.get("our_qwen").spec(config | {"model_type": "our_qwen",
                                                         "architectures": ["OurQwenForCausalLM"]})  # fmt: skip
    theirs = FAMILIES.get("qwen2").spec(config)
    assert ours.transformer == theirs.transformer and ours.features == theirs.features and ours.family == "our_qwen"


def test_files_that_fail_and_names_that_are_taken(tmp_path: Path) -> None:
    for text, said in [
        ("raise RuntimeError('no key')", r"importing the file failed\n(.|\n)*bad.py(.|\n)*no key"),
        ("import sys; sys.exit(3)", "importing the file failed"),
        ("from megaswift import plugins; plugins.loss_scale('react', {})", "loss scale react, which megaswift has"),
        ("from megaswift import plugins; plugins.optimizer('adam', None, ())", "optimizer adam, which megaswift has"),
        ("from megaswift import plugins\nplugins.data_format('alpaca', (), None)", "data format alpaca, which"),
    ]:
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_config("sft", ["--external_plugins", str(tmp_path / "bad.py")], environ={})
    cfg = load_config("sft", ["--model", "m", "--dataset", "rows.jsonl", "--external_plugins", "none.py"], environ={})
    assert any("--external_plugins none.py: no such file" in str(p) for p in data_problems(cfg))


def test_files_that_are_not_named_are_not_run(tmp_path: Path) -> None:
    """Not of a model folder, nor beside a file that is named; a named one is run once."""
    for name in ("plugin.py", "external_plugins.py", "other.py"):
        (tmp_path / name).write_text("raise RuntimeError('was run')")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    for _ in range(2):
        load_config("sft", ["--model", str(tmp_path), "--external_plugins", str(tmp_path / "mine.py")], environ={})
    assert (tmp_path / "count").read_text() == "x"


@pytest.mark.process
@pytest.mark.slow
def test_a_run_with_an_optimizer_and_a_callback(recipe: Callable[[str], str], tmp_path: Path) -> None:
    """AdamW as a plugin's optimizer is --optimizer adam, step by step and over a checkpoint."""
    given = write_inputs(tmp_path, "1e-3")
    words = [
        "--engine",
        "ddp",
        "--max_steps",
        4,
        "--save_steps",
        2,
        "--report_to",
        "none",
        "--lr_scheduler_type",
        "constant",
    ]
    run(given, tmp_path / "adam", *words)
    file = tmp_path / "adamw.py"
    text = dict(RECIPES)["Optimizers"].replace("RAdam", "AdamW").replace('"radam"', '"mine"')
    file.write_text(text.replace("(0.9, 0.99)", "(0.9, 0.95)"))
    ours = [*words, "--optimizer", "mine", "--external_plugins", file, recipe("Callbacks")]
    said = run(given, tmp_path / "mine", *ours)
    losses = [[line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("adam", "mine")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and f"largest loss {max(losses[1]):.4f}" in said
    run(given, tmp_path / "again", *ours[:3], 2, *ours[4:])
    last = run(given, tmp_path / "again", *ours, "--resume_from_checkpoint", "latest")
    resumed = [line["loss"] for line in read_lines(tmp_path / "again" / "metrics.jsonl")]
    assert resumed == pytest.approx(losses[1], rel=1e-6) and f"largest loss {max(losses[1]):.4f}" in last

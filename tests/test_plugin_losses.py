"""Losses that a file of `--external_plugins` registers for kto, cpo, orpo and rm: runs of docs/plugins.md's recipe,
packed and over two ranks, step by step beside Hugging Face models and the formulas written out in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megaswift import plugins
from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.losses.kto import KTO
from megaswift.run.build import forward_pass_count_before_step
from megaswift.run.dataset_task import make_batch_transform
from megaswift.trainers.batch_fields import KtoBaseline
from megaswift.trainers.hooks.metrics import read_lines
from tests.losses.bigram import Bigram, batch, documents, outputs, reference_of
from tests.test_plugins import RECIPES, as_before, recipe  # noqa: F401 (fixtures)
from tests.trainers.inputs import preference_inputs, write_preferences
from tests.trainers.runs import run

ROWS, STEPS, RATE = 8, 3, 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a model with a causal head and one with a score."""
    made = tmp_path_factory.mktemp("losses")
    write_preferences(made, rows=ROWS * STEPS)
    torch.manual_seed(5)
    scored = AutoModelForSequenceClassification.from_pretrained(made / "model", num_labels=1)
    scored.save_pretrained(made / "scored")
    AutoTokenizer.from_pretrained(made / "model").save_pretrained(made / "scored")
    (made / "losses.py").write_text(dict(RECIPES)["Losses"])
    return made


class ByHand:
    """A Hugging Face model, and rows as their texts say."""

    def __init__(self, folder: Path, task: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        kind: Any = AutoModelForSequenceClassification if task == "rm" else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder / ("scored" if task == "rm" else "model"))
        self.reference = kind.from_pretrained(folder / "model") if task == "kto" else None

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def score(self, row: dict[str, Any], answer: str) -> Tensor:
        """[]: of the whole conversation."""
        text = f"<u>{row['messages'][0]['content']}<e><a>{answer}<e>"
        logits: Tensor = self.model(torch.tensor([self.ids(text)])).logits
        return logits.squeeze()

    def tokens(self, row: dict[str, Any], answer: str, model: Any = None) -> tuple[Tensor, int]:
        """(log-probabilities of all tokens but the first, how many of them are the answer's)."""
        prompt, end = self.ids(f"<u>{row['messages'][0]['content']}<e><a>"), self.ids(f"{answer}<e>")
        given = torch.tensor([prompt + end])
        logp = (model or self.model)(given).logits[0, :-1].log_softmax(-1)
        return logp.gather(1, given[0, 1:, None])[:, 0], len(end)

    def logp(self, row: dict[str, Any], answer: str, model: Any = None) -> Tensor:
        """[]: the sum over the answer's tokens."""
        values, count = self.tokens(row, answer, model)
        return values[-count:].sum()


def kto(hand: ByHand, rows: list[dict[str, Any]]) -> Tensor:
    losses = []
    for row in rows:
        answer = row["messages"][1]["content"]
        with torch.no_grad():
            base = hand.logp(row, answer, hand.reference)
        reward = 0.3 * (hand.logp(row, answer) - base)
        losses.append((1.0 if row["label"] else 0.5) * (1 + ((-1 if row["label"] else 1) * reward).exp()).log())
    return torch.stack(losses).mean()


def cpo(hand: ByHand, rows: list[dict[str, Any]]) -> Tensor:
    losses, likely, count = [], torch.zeros(()), 0
    for row in rows:
        (good, n), (bad, m) = (hand.tokens(row, a) for a in (row["messages"][1]["content"], row["rejected_response"]))
        losses.append((1 + (0.7 - 2.0 * (good[-n:].mean() - bad[-m:].mean())).exp()).log())
        likely, count = likely + good[-n:].sum(), count + n
    return torch.stack(losses).mean() - 0.2 * likely / count


def orpo(hand: ByHand, rows: list[dict[str, Any]]) -> Tensor:
    losses, likely, count = [], torch.zeros(()), 0
    for row in rows:
        (good, n), (bad, m) = (hand.tokens(row, a) for a in (row["messages"][1]["content"], row["rejected_response"]))
        losses.append((1 + (bad[-m:].mean() - good[-n:].mean()).exp()).log())
        likely, count = likely + good.sum(), count + good.numel()
    return 0.4 * torch.stack(losses).mean() - likely / count


def rm(hand: ByHand, rows: list[dict[str, Any]]) -> Tensor:
    losses = []
    for row in rows:
        good, bad = (hand.score(row, a) for a in (row["messages"][1]["content"], row["rejected_response"]))
        losses.append((1 - (good - bad)).clamp(min=0) + 0.01 * (good + bad) ** 2)
    return torch.stack(losses).mean()


CASES: dict[str, tuple[Any, tuple[object, ...]]] = {
    "kto": (kto, ("--loss_type", "logistic", "--beta", 0.3, "--undesirable_weight", 0.5)),
    "cpo": (
        cpo,
        ("--loss_type", "soft_margin", "--beta", 2, "--simpo_gamma", 0.7, "--cpo_alpha", 0.2, "--engine", "ddp"),
    ),
    "orpo": (orpo, ("--loss_type", "log_ratio", "--beta", 0.4, "--tp", 2)),
    "rm": (rm, ("--loss_type", "hinge_of_scores", "--center_rewards_coefficient", 0.01)),
}


@pytest.mark.process
@pytest.mark.parametrize("task", CASES)
def test_runs_beside_plain_torch(task: str, folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of each step; Adam moves the weights by the gradients between them. Packed; kto, cpo and
    rm over two ranks, orpo with tensor parallelism."""
    formula, options = CASES[task]
    inputs = preference_inputs(folder, task, model=False)
    model = folder / ("scored" if task == "rm" else "model")
    words = ["--model", model, "--max_steps", STEPS, "--shuffle", "false", "--report_to", "none", "--lr", RATE]
    words += ["--per_device_train_batch_size", 4, "--global_batch_size", ROWS, "--max_grad_norm", 0, "--adam_epsilon"]
    words += [1e-6, "--lr_scheduler_type", "constant", "--weight_decay", 0]
    run(inputs, tmp_path / "out", *words, "--external_plugins", folder / "losses.py", *options, task=task)
    found = [(line["loss"], line["grad_norm"]) for line in read_lines(tmp_path / "out" / "metrics.jsonl")]
    hand, file = ByHand(folder, task), folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    adam, expected = torch.optim.AdamW(hand.model.parameters(), RATE, (0.9, 0.95), 1e-6, 0.0), []
    for step in range(STEPS):
        adam.zero_grad()
        loss = formula(hand, rows[step * ROWS : (step + 1) * ROWS])
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in hand.model.parameters() if p.grad is not None]).norm()
        expected.append((loss.item(), norm.item()))
        adam.step()
    assert expected[0][0] != pytest.approx(expected[2][0], rel=1e-2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_loss_of_kto_that_needs_kl(tmp_path: Path) -> None:
    """The run scores mismatched pairs, and `zero` is beta x their KL; without `needs_kl` it is 0 and they are not
    scored."""
    text = "from megaswift import plugins\ndef f(rewards, desirable, zero):\n    return zero - rewards\n"
    file, policy, reference = tmp_path / "f.py", Bigram(20, 1), Bigram(20, 2)
    file.write_text(f"{text}plugins.kto_loss('with_kl', f, needs_kl=True)\nplugins.kto_loss('without', f)")
    given = reference_of(reference, batch(documents([(3, 5), (2, 2), (1, 7)]), True))
    fields = given.fields | {"examples": torch.arange(3), "label": torch.tensor([True, False, True])}
    given = type(given)(**{**vars(given), "fields": {**fields, "kl": torch.tensor(0.4)}})
    values = {}
    for name, transform, passes in (("with_kl", KtoBaseline, 3), ("without", object, 1)):
        cfg = load_config("kto", ["--external_plugins", str(file), "--loss_type", name], environ={})
        assert isinstance(make_batch_transform(cfg, lambda batches, _: list(batches), {}), transform)
        assert forward_pass_count_before_step(cfg) == passes
        loss = KTO(name, 0.3)
        terms, metrics = loss(outputs(policy, given, loss.needs), given)
        values[name] = float(terms[0].sum)
        assert ("kl" in metrics) == (name == "with_kl")
    assert values["with_kl"] - values["without"] == pytest.approx(3 * 0.3 * 0.4)


def test_losses_are_of_their_task(recipe: Any) -> None:  # noqa: F811 (the fixture)
    file = recipe("Losses")
    names = {"kto": "logistic", "cpo": "soft_margin", "orpo": "log_ratio", "rm": "hinge_of_scores"}
    for task, name in names.items():
        words = ["--external_plugins", file, "--loss_type"]
        assert load_config(task, [*words, name], environ={}).preference.loss_type == (name,)
        for other in {*names.values()} - {name}:
            with pytest.raises(ConfigError, match=other):
                load_config(task, [*words, other], environ={})
        with pytest.raises(ConfigError, match="accepts a single type"):
            load_config(
                task,
                [*words, name, {"kto": "bco", "cpo": "hinge", "orpo": "odds_ratio", "rm": "bradley_terry"}[task]],
                environ={},
            )
    with pytest.raises(ConfigError, match="registers orpo loss odds_ratio, which megaswift has"):
        plugins.orpo_loss("odds_ratio", F.relu)

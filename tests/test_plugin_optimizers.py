"""An optimizer that a file of `--external_plugins` registers, on every engine: runs step by step beside torch's own in
a plain loop over the Hugging Face model, and over a change of the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS, OptimConfig, PluginOptimizerParts
from megaswift.engine.torch.optim.states import LocalShardOptimizer
from megaswift.engine.torch.vision_parts import VIT
from megaswift.trainers.hooks.metrics import read_lines
from tests.test_plugins import RECIPES
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

ROWS, STEPS, RATE, DECAY = 8, 6, 1e-2, 0.1
WITHOUT_COUNTER = """
import torch
from megaswift import plugins

class SignOfMean(torch.optim.Optimizer):
    def __init__(self, groups, rate):
        super().__init__(groups, {"lr": rate, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.tanh())

make = lambda groups, options: SignOfMean(groups, options.learning_rate)
plugins.optimizer("sign", make, ("mean",), elementwise=True)
"""
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "plugins.py").write_text(dict(RECIPES)["Optimizers"] + WITHOUT_COUNTER)
    given = [*write_inputs(folder, str(RATE)), "--external_plugins", str(folder / "plugins.py"), "--shuffle", "false"]
    given += ["--lr_scheduler_type", "constant", "--weight_decay", str(DECAY), "--report_to", "none"]
    return [*given, "--global_batch_size", str(ROWS), "--max_grad_norm", "0"]


class TanhOfMean:
    """The second plugin, of one tensor after another."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.all = [(p, group["weight_decay"], torch.zeros_like(p)) for group in groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        """As its formula says."""
        for p, decay, mean in self.all:
            assert p.grad is not None
            mean.copy_(0.5 * mean + 0.5 * p.grad)
            p.copy_(p * (1 - RATE * decay) - RATE * torch.tanh(mean))


def by_hand(folder: Path, optimizer: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss of each step, weights at the end): matrices decay, vectors do not."""
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = [json.loads(line)["messages"] for line in (folder / "data.jsonl").read_text().splitlines()]
    every = [*model.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0},
    ]
    made: Any = torch.optim.RAdam(groups, lr=RATE, betas=(0.9, 0.99)) if optimizer == "radam" else TanhOfMean(groups)
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for ask, answer in rows[step * ROWS : (step + 1) * ROWS]:
            texts = (f"<u>{ask['content']}<e><a>", f"{answer['content']}<e>")
            prompt, end = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
            ids = torch.tensor([prompt + end])
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            total, count = total - logp[-len(end) :].sum(), count + len(end)
        model.zero_grad()
        (total / count).backward()
        losses.append(total.item() / count)
        made.step()
    return losses, model.state_dict()


def assert_same(out: Path, folder: Path, optimizer: str) -> None:
    """Loss of each step, and the exported weights."""
    losses, weights = by_hand(folder, optimizer)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-2)
    assert [line["loss"] for line in read_lines(out / "metrics.jsonl")] == pytest.approx(losses, rel=1e-4)
    found = load_file(out / "hf" / "model.safetensors")
    for name, weight in weights.items():
        assert (found[name] - weight).abs().max() < 3e-4 * weight.abs().max(), name


def test_parts_have_the_learning_rates_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --vit_lr sets them."""
    parts = PluginOptimizerParts(lambda groups, _: torch.optim.SGD(groups, RATE), (), None, True)
    monkeypatch.setitem(PLUGIN_OPTIMIZERS, "mine", parts)
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in ("encoder", "model")]
    setattr(named[0][1], "vision_part", VIT)  # noqa: B010 (as the engine marks it)
    optimizer = LocalShardOptimizer(named, OptimConfig(optimizer="mine", learning_rate=1e-2, vit_lr=1e-3))
    rates = {p: group["lr_mult"] for group in optimizer.inner.param_groups for p in group["params"]}
    assert [rates[optimizer.parts[p]] for _, p in named] == pytest.approx([0.1, 1.0])


@pytest.mark.process
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("radam", ("--tp", 2)),
        ("sign", ("--engine", "fsdp2")),
        ("radam", ("--engine", "zero2")),
        *(
            pytest.param(optimizer, layout, marks=SLOW)
            for optimizer in ("radam", "sign")
            for layout in (
                ("--pp", 2),
                (),
                ("--cp", 2),
                ("--engine", "ddp"),
                ("--engine", "fsdp2", "--fsdp", "full_shard", "offload"),
                *(("--engine", kind) for kind in ("zero0", "zero1", "zero3", "zero2_offload", "zero3_offload")),
            )
        ),
    ],
)
def test_steps_are_torch_s(optimizer: str, layout: tuple[object, ...], inputs: list[str], tmp_path: Path) -> None:
    text = run(inputs, tmp_path / "out", "--optimizer", optimizer, "--max_steps", STEPS, *layout)
    assert ("transformers, " in text) == ("--engine" in layout), "another engine"
    assert_same(tmp_path / "out", Path(inputs[1]).parent, optimizer)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("optimizer", ["radam", "sign"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--tp", 2), ()),
        ((), ("--pp", 2)),
        (("--engine", "zero2"), ("--engine", "zero3")),
        (("--engine", "zero3"), ("--engine", "fsdp2")),
        (("--engine", "fsdp2"), ("--engine", "zero1")),
    ],
)
def test_a_checkpoint_has_the_states(
    optimizer: str, first: tuple[object, ...], second: tuple[object, ...], inputs: list[str], tmp_path: Path
) -> None:
    """Three steps on one layout, three on another: those of a plain loop."""
    words = [*inputs, "--optimizer", optimizer, "--save_steps", "3"]
    run(words, tmp_path / "out", "--max_steps", 3, *first)
    run(words, tmp_path / "out", "--max_steps", STEPS, "--resume_from_checkpoint", "latest", *second)
    assert_same(tmp_path / "out", Path(inputs[1]).parent, optimizer)

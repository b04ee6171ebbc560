"""Trainer and sampler on one device, in whole runs of PPO: what leaves is gone, comes back bit by bit, and the peak is
that of one of them.

A CPU stands for the device. Bytes are those that malloc has given out on the rank (mallinfo2: torch's tensors lie
there); what is parked goes to a mapped file, which malloc knows nothing of. Runs are without oneDNN: on CPUs with bf16
instructions it generates code for each shape of a product and caches it (in bfloat16 3.7 weights of this model after
the first completions, 7.1 after the second), which a device's memory does not hold.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import shared
from tests.trainers.inputs import write_model
from tests.trainers.test_grpo_run import REWARDS, SLOW, completions

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc before 2.33 does not tell what malloc has given out"
    ),
]
BATCH, KEPT = 8, 3
USUAL = (
    "--lr",
    "1e-3",
    "--report_to",
    "none",
    "--max_completion_length",
    6,
    "--max_length",
    32,
    "--beta",
    0,
    "--max_steps",
    2,
    "--global_batch_size",
    BATCH,
    "--shuffle",
    "false",
)
MOVED = (
    "--offload_optimizer",
    "true",
    "--offload_model",
    "true",
    "--rollout_sleep",
    "true",
    "--num_completions_to_print",
    KEPT,
)
NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """What mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def given_out() -> int:
    """Bytes that malloc has given out, mapped blocks included."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Mallinfo
    told = ask()
    return int(told.uordblks + told.hblkhd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 MiB, beside which all else is small; prompts, rewards."""
    made = tmp_path_factory.mktemp("colocated")
    write_model(made / "model", hidden_size=128, intermediate_size=1024, head_dim=32)
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3), "number": i} for i in range(2 * BATCH)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (made / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return made


def phases(folder: Path, out: Path, *options: object, ranks: int = 1, task: str = "ppo") -> list[tuple[str, float]]:
    """The phases of a run, each with the bytes on rank 0 at its beginning, as multiples of the model's weights."""
    inputs = [
        "--model",
        folder / "model",
        "--dataset",
        folder / "rows.jsonl",
        "--dataset_cache_dir",
        folder / "cache",
        "--reward_funcs",
        f"{folder / 'rewards.py'}:digits",
        "--output_dir",
        out,
    ]
    out.mkdir()
    usual = [
        w
        for pair in (("--per_device_train_batch_size", BATCH), ("--torch_dtype", "float32"))
        if pair[0] not in options
        for w in pair
    ]
    words = [str(w) for w in (*inputs, *USUAL, *usual, *options)]
    shared().logged("tests.trainers.test_colocated:work", (task, words, str(out)), ranks, timeout=240.0)
    weights = sum(t.nbytes for t in load_file(folder / "model" / "model.safetensors").values())
    lines = [json.loads(line) for line in (out / "phases.jsonl").read_text().splitlines()]
    return [(phase, count / weights) for phase, count in lines]


def trained(folder: Path, out: Path, *options: object, ranks: int = 1, task: str = "ppo") -> dict[str, list[float]]:
    """Bytes while the sampler is built, and in each phase of the last step."""
    lines = phases(folder, out, *options, ranks=ranks, task=task)
    begins = [i for i, (phase, _) in enumerate(lines) if phase == "generating"]
    assert len(begins) == 2
    # by then the optimizers have their moments
    last = lines[max(i for i in range(begins[1]) if lines[i][0] == "training") + 1 :]
    return {
        name: [count for phase, count in last if phase == name] for name in ("streaming", "generating", "training")
    } | {"building": [count for phase, count in lines if phase == "building"]}


def work(rank: int, world: int, command: tuple[str, list[str], str]) -> None:
    """The life of a worker (on the ranks): a run that writes down what malloc has given out in each phase."""
    from megaswift import device_copy
    from megaswift.commands.training import main
    from megaswift.engine import storage_offload
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.rollout.backends.transformers_sampler import TransformersSampler
    from megaswift.run import policy_task
    from megaswift.run.policy_task import build_sampler

    task, words, out = command
    host = iter(Path(out) / f"host-{rank}-{i}" for i in range(10**6))

    def allocate(size: int) -> torch.Tensor:
        return torch.from_file(str(next(host)), True, size, dtype=torch.uint8)

    storage_offload.is_host_storage, device_copy.allocate_host_memory = lambda storage: False, allocate
    generate, update, train = (
        TransformersSampler.generate,
        TransformersSampler.update_weights,
        MegatronEngine.train_batch,
    )

    def tell(phase: str) -> None:
        if rank == 0:
            with (Path(out) / "phases.jsonl").open("a") as file:
                file.write(json.dumps([phase, given_out()]) + "\n")

    def generated(self: TransformersSampler, *values: Any) -> Any:
        tell("generating")
        return generate(self, *values)

    def updated(self: TransformersSampler, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        def streamed() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in weights:
                tell("streaming")
                yield pair

        update(self, streamed())

    def stepped(self: MegatronEngine, *values: Any) -> Any:
        found = train(self, *values)
        tell("training")
        return found

    def built(*values: Any) -> Any:
        tell("building")
        return build_sampler(*values)

    policy_task.build_sampler = built  # type: ignore[assignment]
    TransformersSampler.generate, TransformersSampler.update_weights = generated, updated  # type: ignore[method-assign]
    MegatronEngine.train_batch = stepped  # type: ignore[method-assign]
    sys.argv = [f"megaswift/{task}.py", *words]
    with torch.backends.mkldnn.flags(enabled=False):
        code = main(task, words)
    assert code == 0, f"exit code {code}"
    others = {"vllm", "sglang", *(f"megaswift.inference.rollout_{name}" for name in ("vllm", "vllm_server", "sglang"))}
    assert not others & sys.modules.keys(), "backends that were not chosen"


HALF = ("--tp", 2)
SPREAD = ("--per_device_train_batch_size", BATCH // 2)


@pytest.mark.parametrize(
    ("task", "layout", "ranks", "held"),
    [
        ("ppo", (), 1, 8.0),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("grpo", ("--num_generations", 4), 1, 4.0),
                ("ppo", HALF, 2, 4.0),
                ("ppo", ("--pp", 2), 2, 4.0),
                ("ppo", SPREAD, 2, 6.0),
                ("ppo", (*SPREAD, "--torch_dtype", "bfloat16"), 2, 6.0),
            )
        ),
    ],
)
def test_memory_changes_hands(
    task: str, layout: tuple[object, ...], ranks: int, held: float, folder: Path, tmp_path: Path
) -> None:
    """`held`: what policy and critic have on a rank, in weights of the model: weights, gradients, two moments each.

    While weights stream, the policy's own are there beside the sampler's; while completions are written, only the
    sampler's.
    """
    told = {
        name: trained(folder, tmp_path / name, *layout, *options, ranks=ranks, task=task)
        for name, options in (("stays", ()), ("moved", MOVED))
    }
    stays, moved = told["stays"], told["moved"]
    print(task, layout, {name: {phase: (min(c), max(c)) for phase, c in t.items()} for name, t in told.items()})
    assert completions(tmp_path / "moved") == [
        line for i, line in enumerate(completions(tmp_path / "stays")) if i % BATCH < KEPT
    ]
    mine, theirs = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("moved", "stays"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)
    assert [line["loss"] for line in read_lines(tmp_path / "moved/metrics.jsonl")] == [
        line["loss"] for line in read_lines(tmp_path / "stays/metrics.jsonl")
    ]
    sampler = 1.0 if "bfloat16" not in layout else 0.5
    base = moved["generating"][0] - sampler
    assert stays["generating"][0] - base == pytest.approx(held + sampler, abs=0.35)
    assert max(moved["training"]) - base == pytest.approx(held, abs=0.35), "the sampler sleeps"
    divided = ranks if layout[:1] in (("--tp",), ("--pp",)) else 1
    assert stays["building"][0] - moved["building"][0] > 0.9 * 2.0 / divided, (
        "weights and gradients have left before a sampler that takes its share of the memory at once is built"
    )
    own = sampler / divided
    assert max(moved["streaming"]) - base == pytest.approx(own + sampler, abs=0.35), (
        "the policy's weights and the sampler's, nothing else"
    )
    assert max(map(max, moved.values())) < max(map(max, stays.values())) - 0.65 * sampler


@SLOW
def test_a_resumed_run_builds_its_sampler_in_freed_memory_too(folder: Path, tmp_path: Path) -> None:
    """The checkpoint's moments come to the device after the sampler has taken its share; the run ends as a whole one
    does."""
    phases(folder, tmp_path / "whole", *MOVED, "--save_steps", 1)
    go_on = ("--resume_from_checkpoint", tmp_path / "whole" / "checkpoints" / "step-1")
    building = {}
    for name, options in (("stays", ()), ("moved", MOVED)):
        lines = phases(folder, tmp_path / name, *options, *go_on)
        assert [phase for phase, _ in lines].count("generating") == 1, "one step is left"
        (building[name],) = (count for phase, count in lines if phase == "building")
    assert building["stays"] - building["moved"] > 0.9 * 2.0, "weights and gradients are elsewhere"
    wanted, found = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("whole", "moved"))
    assert wanted.keys() == found.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)

"""Runs whose samplers get adapters alone: the completions of merged weights, on every layout, and nothing but adapters
on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import shared
from tests.rollout.sampling_server import Backend, Sglang, Vllm, serving
from tests.trainers.test_grpo_run import BATCH, FOUR, SLOW, SPREAD, USUAL, completions, figures, folder

__all__ = ["folder"]
pytestmark = pytest.mark.process
RANK = 4
LORA = ("--train_type", "lora", "--lora_rank", RANK)
THREE = ("--max_steps", 3)
SENT = "sent.jsonl"


def trained(
    folder: Path, out: Path, *options: object, ranks: int = 1, usual: Sequence[object] = USUAL
) -> list[dict[str, Any]]:
    """Metrics of a run with adapters, whose ranks write down what goes to samplers."""
    width = () if "--per_device_train_batch_size" in options else ("--per_device_train_batch_size", BATCH)
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
    words = [str(w) for w in (*inputs, *usual, *LORA, *width, *options)]
    out.mkdir(exist_ok=True)
    shared().logged("tests.trainers.test_lora_sync:work", (words, str(out / SENT)), ranks, timeout=240.0)
    return read_lines(out / "metrics.jsonl")


def work(rank: int, world: int, command: tuple[list[str], str]) -> None:
    """The life of a worker (on the ranks): a run that lists the files of each round, and each stream of all weights."""
    from megaswift.commands.training import main
    from megaswift.rollout.sync_folders import SyncRounds
    from megaswift.trainers.rl.generation import CompletionGenerator

    words, sent = command
    taken, synchronize = SyncRounds.taken, CompletionGenerator.synchronize

    def tell(line: object) -> None:
        with Path(sent).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def told(self: SyncRounds, folder: Path) -> None:
        taken(self, folder)
        tell(
            {
                "files": {f.name: f.stat().st_size for f in sorted(folder.iterdir())},
                "kept": len(list(self.root.iterdir())),
            }
        )

    def streamed(self: CompletionGenerator) -> None:
        if rank == 0 and self.adapters is None:
            tell({"files": "all weights"})
        synchronize(self)

    SyncRounds.taken, CompletionGenerator.synchronize = told, streamed  # type: ignore[method-assign]
    sys.argv = ["megaswift/grpo.py", *words]
    code = main("grpo", words)
    assert code == 0, f"exit code {code}"


@pytest.fixture(scope="module")
def merged(folder: Path) -> Path:
    """A run that streams merged weights, as it says."""
    trained(folder, folder / "merged", "--rollout_lora", "false", *THREE)
    assert read_lines(folder / "merged" / SENT) == [{"files": "all weights"}] * 3
    return folder / "merged"


def assert_like_merged(out: Path, merged: Path) -> None:
    """The same words, the same numbers to rounding; at the first step the sampler's probabilities are the trainer's."""
    assert [line["completion"] for line in completions(out)] == [line["completion"] for line in completions(merged)]
    assert len({line["completion"] for line in completions(out)}) > 2 * BATCH
    for mine, wanted in zip(read_lines(out / "metrics.jsonl"), read_lines(merged / "metrics.jsonl"), strict=True):
        names = ("loss", "grad_norm", "kl", "reward", "entropy")
        assert {k: mine[k] for k in names} == pytest.approx({k: wanted[k] for k in names}, rel=1e-4, abs=1e-6)
    lines = read_lines(out / "metrics.jsonl")
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-6 and abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]
    assert all(line["sampling/sampling_logp_difference/max"] < 2e-6 for line in lines)


def assert_adapters_alone(out: Path, rounds: int) -> None:
    """Each round is one PEFT folder of the adapters' size; the one before is gone, and in the end all are."""
    lines, adapter = read_lines(out / SENT), out / "adapter" / "adapter_model.safetensors"
    assert len(lines) == rounds
    for line in lines:
        assert line["files"].keys() == {"adapter_config.json", "adapter_model.safetensors"} and line["kept"] == 1
        assert line["files"]["adapter_model.safetensors"] == adapter.stat().st_size
    assert adapter.stat().st_size < sum(t.numel() * 4 for t in load_file(adapter).values()) + 8192
    assert not (out / "sync").exists()


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2), 2),
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                ((), 1),
                (("--tp", 2, "--pp", 2), 4),
                (SPREAD, 2),
                (("--tp", 2, *SPREAD), 4),
                (("--rollout_sleep", "true"), 1),
            )
        ),
    ],
)
def test_adapters_alone_make_the_completions_of_merged_weights(
    layout: tuple[object, ...], ranks: int, folder: Path, merged: Path, tmp_path: Path
) -> None:
    trained(folder, tmp_path / "out", *THREE, *layout, ranks=ranks)
    assert_like_merged(tmp_path / "out", merged)
    assert_adapters_alone(tmp_path / "out", 3)


@SLOW
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_engines_of_torch_send_adapters_too(engine: str, folder: Path, tmp_path: Path) -> None:
    """PEFT draws their first numbers there, so the run to compare with is the engine's own."""
    layout = ("--engine", engine, *SPREAD, *THREE)
    trained(folder, tmp_path / "merged", *layout, "--rollout_lora", "false", ranks=2)
    trained(folder, tmp_path / "out", *layout, ranks=2)
    assert_like_merged(tmp_path / "out", tmp_path / "merged")
    assert_adapters_alone(tmp_path / "out", 3)


def test_going_on_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    """In the middle of a generation: the next one is by adapters that a new process has sent."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    trained(folder, whole, *FOUR)
    trained(folder, out, *FOUR, "--resume_from_checkpoint", whole / "checkpoints/step-2")
    assert completions(out) == [line for line in completions(whole) if line["step"] > 2]
    assert figures(read_lines(out / "metrics.jsonl")) == figures(read_lines(whole / "metrics.jsonl"))[2:]
    mine, theirs = (load_file(o / "adapter" / "adapter_model.safetensors") for o in (out, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)
    assert len(read_lines(whole / SENT)) == 2 and len(read_lines(out / SENT)) == 1


@SLOW
def test_in_bfloat16_adapters_alone_are_nearer_to_the_trainer(folder: Path, tmp_path: Path) -> None:
    """Merged weights are rounded once more. Both samplers start alike, as new adapters add nothing."""
    half = [word if word != "float32" else "bfloat16" for word in USUAL]
    found = [trained(folder, tmp_path / name, *THREE, "--rollout_lora", name, usual=half) for name in ("true", "false")]
    alone, merged = ([line["sampling/sampling_logp_difference/mean"] for line in lines] for lines in found)
    assert alone[0] == merged[0] > 0 and max(alone[1:]) < min(merged[1:])


@contextmanager
def servers(kind: type[Backend], model: Path, count: int) -> Iterator[tuple[list[Backend], list[str]]]:
    """Some that listen."""
    made = [kind(model, rank=RANK) for _ in range(count)]
    with serving(made[0]) as first, serving(made[1]) as second:
        yield made, [first, second]


@SLOW
@pytest.mark.parametrize(("name", "kind"), [("vllm_server", Vllm), ("sglang", Sglang)])
@pytest.mark.parametrize("where", [(2, *SPREAD), (4, "--tp", 2, "--pp", 2, "--async_generation", "true")])
def test_servers_get_adapters_once_for_all_ranks(
    name: str, kind: type[Backend], where: tuple[Any, ...], folder: Path, merged: Path, tmp_path: Path
) -> None:
    """Stand-ins that answer by the model's own weights and what they are sent."""
    ranks, *layout = where
    with servers(kind, folder / "model", 2) as (backends, urls):
        trained(
            folder,
            tmp_path / "out",
            *THREE,
            *layout,
            "--rollout_backend",
            name,
            "--rollout_server_url",
            *urls,
            "--importance_sampling_correction",
            "false",
            ranks=ranks,
        )
    if "--async_generation" not in layout:
        assert_like_merged(tmp_path / "out", merged)
        assert_adapters_alone(tmp_path / "out", 3)
    for backend in backends:
        loads = [body["lora_path"] for path, body in backend.calls if path.endswith("/load_lora_adapter") and body]
        assert len(set(loads)) == len(loads) == len(read_lines(tmp_path / "out" / SENT)) >= 3
        assert {path for path, _ in backend.calls} & {"/collective_rpc", "/update_weights_from_disk"} == set()

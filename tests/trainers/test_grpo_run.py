"""Whole runs of GRPO, sampled by the model in training: one set of completions on every layout, the same run after
every end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.lora import ATTENTION, MLP, make_adapter
from tests.parity.pool import RankError
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

SLOW = pytest.mark.slow
BATCH, GROUP = 8, 4
USUAL = (
    "--lr",
    "1e-2",
    "--report_to",
    "none",
    "--num_generations",
    GROUP,
    "--max_completion_length",
    6,
    "--max_length",
    32,
    "--num_completions_with_tokens",
    2,
    "--beta",
    0.1,
    "--global_batch_size",
    BATCH,
    "--torch_dtype",
    "float32",
    "--shuffle",
    "false",
)
FOUR = ("--generation_batch_size", 2 * BATCH, "--num_iterations", 2, "--max_steps", 6, "--save_steps", 2)
"""Steps of a generation; of six the last two are on the second one."""
LORA = ("--train_type", "lora", "--adapters")
REWARDS = '''"""Rewards, and what may come between."""

import os
import signal
from pathlib import Path


def digits(completions, number, **_):
    """The share of digits. In the second generation it may meet a signal that a file beside this one names."""
    asked = Path(__file__).with_name("signal")
    if 5 in number and asked.exists():
        name = asked.read_text()
        asked.unlink()
        os.kill(os.getpid(), getattr(signal, name))
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


def wrong(completions, number, **_):
    """What the file beside this one says, of the last prompt only, which another rank than the first one judges."""
    values = [0.5] * len(completions)
    if 3 in number:
        values = {"short": values[1:], "nan": [*values[1:], float("nan")], "none": None, "text": [*values[1:], "0.5"]}[
            Path(__file__).with_name("kind").read_text()]
    return values
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, prompts of plain text with their number, rewards."""
    made = tmp_path_factory.mktemp("grpo")
    write_model(made / "model")
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3), "number": i} for i in range(12)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (made / "rewards.py").write_text(REWARDS, encoding="utf-8")
    make_adapter(made / "model", made / "adapter", (*ATTENTION, *MLP))
    return made


def trained(folder: Path, out: Path, *options: object, ranks: int = 2, reward: str = "digits") -> list[dict[str, Any]]:
    """A run's metrics."""
    width = () if "--per_device_train_batch_size" in options else ("--per_device_train_batch_size", BATCH)
    inputs = [
        "--model",
        str(folder / "model"),
        "--dataset",
        str(folder / "rows.jsonl"),
        "--dataset_cache_dir",
        str(folder / "cache"),
        "--reward_funcs",
        f"{folder / 'rewards.py'}:{reward}",
    ]
    run(inputs, out, *USUAL, *width, *options, ranks=ranks, task="grpo")
    return read_lines(out / "metrics.jsonl")


def completions(out: Path) -> list[dict[str, Any]]:
    """Lines of the table."""
    return read_lines(out / "completions.jsonl")


def to_rounding(line: dict[str, Any]) -> dict[str, Any]:
    """The line of another layout: numbers of tokens are written with three decimals."""
    numbers = {"advantage": pytest.approx(line["advantage"], abs=1e-6)}
    if "token_logprobs" in line:
        numbers["token_logprobs"] = pytest.approx(line["token_logprobs"], abs=1.001e-3)
    return {**line, **numbers}


def figures(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but times and memory."""
    words = ("time", "wait", "second", "memory", "_per_")
    return [{k: v for k, v in line.items() if not any(word in k for word in words)} for line in lines]


SPREAD = ("--per_device_train_batch_size", BATCH // 2)
ONE: dict[str, Path] = {}


def alone(folder: Path) -> Path:
    """A run on one process, once."""
    if "out" not in ONE or not ONE["out"].is_relative_to(folder):
        ONE["out"] = folder / "alone"
        trained(folder, ONE["out"], "--max_steps", 3, ranks=1)
    return ONE["out"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2, *SPREAD), 4),
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                (("--tp", 2), 2),
                (("--pp", 2), 2),
                (("--cp", 2), 2),
                (SPREAD, 2),
                (("--engine", "ddp", *SPREAD), 2),
                (("--engine", "fsdp2", *SPREAD), 2),
                (("--packing", "false"), 1),
                (("--rollout_batch_size", 3), 1),
            )
        ),
    ],
)
def test_the_same_completions_on_every_layout(
    layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """Three generations, each by a policy that has moved. The sampler's log-probabilities are the trainer's to
    float32's last digits."""
    lines, others = (
        trained(folder, tmp_path / "out", "--max_steps", 3, *layout, ranks=ranks),
        read_lines(alone(folder) / "metrics.jsonl"),
    )
    assert len(completions(alone(folder))) == 3 * BATCH and len(lines) == 3
    assert ["token_texts" in line for line in completions(alone(folder))] == 3 * ([True] * 2 + [False] * (BATCH - 2))
    assert completions(tmp_path / "out") == [*map(to_rounding, completions(alone(folder)))]
    assert len({line["completion"] for line in completions(tmp_path / "out")}) > 2 * BATCH
    for mine, wanted in zip(lines, others, strict=True):
        assert mine["sampling/sampling_logp_difference/max"] < 1e-6
        assert {k: mine[k] for k in ("loss", "grad_norm", "kl", "reward", "entropy")} == pytest.approx(
            {k: wanted[k] for k in ("loss", "grad_norm", "kl", "reward", "entropy")}, rel=1e-4, abs=1e-6
        )
    assert abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]


@pytest.mark.process
def test_a_model_of_gated_delta_nets_and_experts(folder: Path, tmp_path: Path) -> None:
    """Sampled with a recurrent cache: three generations, whose log-probabilities are the native engine's, two ranks."""
    write_model(tmp_path / "model")
    hybrid = AutoConfig.for_model("qwen3_5_moe_text", **HYBRID)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(hybrid).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    lines = trained(tmp_path, tmp_path / "out", "--max_steps", 3, "--tp", 2)
    assert len(lines) == 3 and len({line["completion"] for line in completions(tmp_path / "out")}) > 2 * BATCH
    assert all(line["sampling/sampling_logp_difference/max"] < 5e-6 for line in lines)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]


HYBRID = {
    "vocab_size": 45,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

FORMULAS = {
    "remax": ("--advantage_estimator", "remax", "--kl_in_reward", "true"),
    "opo": ("--advantage_estimator", "opo"),
    "pass_at_k": ("--advantage_estimator", "pass_at_k", "--pass_at_k", 2),
    "clip_cov": ("--loss_type", "clip_cov", "--clip_cov_ratio", 0.2, "--clip_cov_lb", -9, "--clip_cov_ub", 9),
    "kl_cov": ("--loss_type", "kl_cov", "--kl_cov_ratio", 0.2),
    "remax kl_cov": ("--advantage_estimator", "remax", "--loss_type", "kl_cov", "--kl_cov_ratio", 0.2),
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("formula", "layout", "ranks"),
    [
        ("remax kl_cov", SPREAD, 2),
        *(pytest.param(name, ("--tp", 2, *SPREAD), 4, marks=SLOW) for name in FORMULAS),
        *(pytest.param(name, ("--engine", "ddp", *SPREAD), 2, marks=SLOW) for name in FORMULAS),
    ],
)
def test_estimators_and_selections_are_the_same_on_every_layout(
    formula: str, layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """What is compared within a group, selected over a step, or drawn a second time, whichever rank has it."""
    many = trained(folder, tmp_path / "many", "--max_steps", 2, *FORMULAS[formula], *layout, ranks=ranks)
    one = trained(folder, tmp_path / "one", "--max_steps", 2, *FORMULAS[formula], ranks=1)
    assert completions(tmp_path / "many") == [*map(to_rounding, completions(tmp_path / "one"))]
    names = ("loss", "grad_norm", "reward", *(("reward_baseline",) if "remax" in formula else ()))
    for mine, wanted in zip(many, one, strict=True):
        assert {k: mine[k] for k in names} == pytest.approx({k: wanted[k] for k in names}, rel=1e-4, abs=1e-6)
    assert one[0]["grad_norm"] > 0
    if "remax" in formula:
        assert one[0]["reward_baseline"] == pytest.approx(greedy_reward(folder), abs=1e-6)


def greedy_reward(folder: Path) -> float:
    """The mean reward of transformers' own greedy completions of the first prompts, by the model before training."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rewards = []
    for line in (folder / "rows.jsonl").read_text().splitlines()[: BATCH // GROUP]:
        ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        rewards.append(sum(c.isdigit() for c in text) / (1 + len(text)))
    return sum(rewards) / len(rewards)


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Path:
    """LoRA on one process of the native engine."""
    trained(folder, folder / "adapted", "--max_steps", 3, *LORA, folder / "adapter", ranks=1)
    return folder / "adapted"


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2), 2),
        *((("--engine", engine, *SPREAD), 2) for engine in ("ddp", "fsdp2", "zero2", "zero3")),
        (("--engine", "ddp"), 1),
    ],
)
def test_adapters_on_every_engine(
    layout: tuple[object, ...], ranks: int, folder: Path, adapted: Path, tmp_path: Path
) -> None:
    """The sampler has them, and the reference has those that the run began with."""
    lines = trained(folder, tmp_path / "out", "--max_steps", 3, *layout, *LORA, folder / "adapter", ranks=ranks)
    others = read_lines(adapted / "metrics.jsonl")
    assert [line["completion"] for line in completions(tmp_path / "out")] == [
        line["completion"] for line in completions(adapted)
    ]
    for mine, wanted in zip(lines, others, strict=True):
        assert mine["sampling/sampling_logp_difference/max"] < 1e-6
        assert {k: mine[k] for k in ("loss", "grad_norm", "kl", "reward", "entropy")} == pytest.approx(
            {k: wanted[k] for k in ("loss", "grad_norm", "kl", "reward", "entropy")}, rel=1e-4, abs=1e-6
        )
    assert abs(lines[0]["kl"]) < 1e-6 < lines[1]["kl"]


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    "options",
    [
        ("--train_type", "qlora"),
        ("--train_type", "lora", "--quantization_bit", 8),
        ("--train_type", "dora"),
        ("--train_type", "boft"),
        ("--train_type", "adalora", "--init_r", 4, "--target_r", 2, "--total_step", 6, "--tfinal", 1),
        ("--train_type", "lora", "--modules_to_save", "lm_head"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_other_adapters_go_on_and_sample_what_trains(options: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    lines = trained(folder, tmp_path / "whole", "--engine", "ddp", *SPREAD, *FOUR, *options)
    far = 1e-6 if "--quantization_bit" not in options else 0.1
    assert all(line["sampling/sampling_logp_difference/max"] < far for line in (lines[0], lines[4]))
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6) and lines[4]["kl"] != lines[0]["kl"], (
        "the policy has not moved"
    )
    trained(
        folder,
        tmp_path / "out",
        "--engine",
        "ddp",
        *SPREAD,
        *FOUR,
        *options,
        "--resume_from_checkpoint",
        tmp_path / "whole/checkpoints/step-2",
    )
    assert figures(read_lines(tmp_path / "out/metrics.jsonl")) == figures(lines)[2:]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Six steps without an end between."""
    trained(folder, folder / "whole", "--tp", 2, *FOUR)
    return folder / "whole"


def assert_same_run(out: Path, whole: Path, since: int = 0) -> None:
    """Metrics, completions and weights, bit by bit."""
    lines, wanted = (figures(read_lines(o / "metrics.jsonl")) for o in (out, whole))
    assert [line["step"] for line in wanted] == [1, 2, 3, 4, 5, 6] and lines == wanted[since:]
    assert completions(out) == [line for line in completions(whole) if line["step"] > since]
    mine, theirs = (load_file(o / "hf" / "model.safetensors") for o in (out, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)


@pytest.mark.process
@pytest.mark.parametrize("step", [2, pytest.param(4, marks=SLOW)])
def test_going_on_is_the_same_run(step: int, folder: Path, whole: Path, tmp_path: Path) -> None:
    """In the middle of a generation, and at the end of one."""
    trained(folder, tmp_path / "out", "--tp", 2, *FOUR, "--resume_from_checkpoint", whole / f"checkpoints/step-{step}")
    assert_same_run(tmp_path / "out", whole, step)
    assert [line["step"] for line in completions(whole)] == [1] * 2 * BATCH + [5] * 2 * BATCH


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "told"), [("SIGTERM", "InterruptedBySignal: 143"), pytest.param("SIGKILL", "exit status -9", marks=SLOW)]
)
def test_a_signal_while_a_generation_is_judged(name: str, told: str, folder: Path, whole: Path, tmp_path: Path) -> None:
    """SIGTERM: the step is finished and the generation saved with what is left of it. SIGKILL: back to the checkpoint
    before it."""
    (folder / "signal").write_text(name)
    with pytest.raises(RankError, match=told):
        trained(folder, tmp_path / "out", "--tp", 2, *FOUR)
    saved = 5 if name == "SIGTERM" else 4
    assert json.loads((tmp_path / "out/checkpoints/latest.json").read_text())["step"] == saved
    trained(folder, tmp_path / "out", "--tp", 2, *FOUR, "--resume_from_checkpoint", "latest")
    assert_same_run(tmp_path / "out", whole)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("engine", [("--tp", 2), ("--engine", "ddp", *SPREAD)])
def test_a_reference_that_moves_goes_on_where_it_was(engine: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    moves = (*engine, *FOUR, "--sync_ref_model", "true", "--ref_model_sync_steps", 1, "--ref_model_mixup_alpha", 0.5)
    lines = trained(folder, tmp_path / "whole", *moves)
    still = trained(folder, tmp_path / "still", *engine, *FOUR)
    assert figures(lines)[0] == figures(still)[0] and lines[4]["kl"] != still[4]["kl"]
    trained(folder, tmp_path / "out", *moves, "--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-2")
    assert_same_run(tmp_path / "out", tmp_path / "whole", 2)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("nan", "returned nan for sample"),
        *(
            pytest.param(*pair, marks=SLOW)
            for pair in (("short", "values for"), ("none", "returned None"), ("text", "returned '0.5' (str)"))
        ),
    ],
)
def test_what_is_no_reward_ends_the_run(kind: str, told: str, folder: Path, tmp_path: Path) -> None:
    """Only the second rank sees it; both end, with the exit code of a mistake, and one tells."""
    (folder / "kind").write_text(kind)
    with pytest.raises(RankError) as error:
        trained(
            folder, tmp_path / "out", "--max_steps", 1, "--generation_batch_size", 2 * BATCH, *SPREAD, reward="wrong"
        )
    text = str(error.value)
    assert "exit status 2" in text and told in text and "rewards.py:wrong" in text and "Traceback" not in text, text[
        -3000:
    ]


TRL = {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/digits/mean",
    "rewards/digits/std",
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "step_time",
    "grad_norm",
    "loss",
    "epoch",
}


@pytest.mark.process
def test_metrics_have_trl_s_names(folder: Path) -> None:
    """Those that GRPOTrainer logs, and the gap to the sampler."""
    for line in read_lines(alone(folder) / "metrics.jsonl"):
        assert set(line) >= TRL, TRL - set(line)
        parts = [line[f"time/{part}"] for part in ("generation", "weight_sync", "rewards", "scoring", "training")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(line["step_time"] - line["data_wait"], abs=1e-6)

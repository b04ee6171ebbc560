"""Recorded steps of tiny models against Hugging Face: without a fault nothing differs, with one its place is named.

Covers: megaswift/bisection/recorder.py, megaswift/bisection/recording.py, megaswift/bisection/reference.py,
megaswift/bisection/judge.py, megaswift/bisection/compare.py, megaswift/bisection/joined.py,
megaswift/bisection/report.py, megaswift/bisection/page.py, megaswift/commands/bisection.py.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megaswift.bisection.compare import Comparison
from megaswift.bisection.judge import compare_with, judge, other_step, references_of
from megaswift.bisection.page import color, page
from megaswift.bisection.report import layer_ranges, report_json, screen
from megaswift.bisection.trace_folder import KINDS, OF_PARAMETERS, RECOMPUTED, Trace
from megaswift.commands import bisection
from megaswift.commands.bisection import DIFFERENT
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, UserError
from megaswift.parallel.layout import Layout
from tests.bisection.count_faults import Planted
from tests.bisection.faults import CORE, FC1, PROJ, QKV, Fault
from tests.bisection.lora_faults import LORA, LORA_FAULTS
from tests.bisection.ranks import Task, explained, options_of, verdict
from tests.parity import check, models
from tests.parity.cases import Case, parse
from tests.parity.compare import number
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.trainers.inputs import write_conversations, write_inputs, write_model
from tests.trainers.runs import run as sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, traces and reports."""
    return tmp_path_factory.mktemp("bisect")


def recorded(text: str, folder: Path, pool: Pool, **options: object) -> tuple[Task, Comparison]:
    """A case's step, and what bisect says of it."""
    case = parse(text)
    model = models.build(case.variant, folder / "models" / case.variant)
    task = Task(case, model, folder / text.replace(" ", "-"), options=options)
    pool.run("tests.bisection.ranks:record", task, case.world)
    return task, verdict(task)


@pytest.mark.process
@pytest.mark.parametrize("text", [pytest.param("dense tp2 pp2", marks=pytest.mark.slow), "moe tp2 sp ep2 do"])
def test_no_difference(text: str, folder: Path, pool: Pool) -> None:
    _, found = recorded(text, folder, pool)
    assert found.first is None and not found.skipped
    kinds = {v.kind for v in found.verdicts}
    assert kinds == set(KINDS) - {RECOMPUTED}
    names = {v.name for v in found.verdicts if v.kind == "output"}
    assert {f"layers.3.{CORE}", f"layers.0.{CORE}.query", f"layers.1.{PROJ}", "embedding", "head", "layers.2"} <= names
    assert all(v.expected < 1e-4 for v in found.verdicts if v.kind in ("output", "output_gradient", "gradient"))


@pytest.mark.slow
@pytest.mark.process
def test_no_difference_with_adapters(folder: Path, pool: Pool) -> None:
    """Only adapters train; those of experts share a parameter on a rank. Their B is not zero."""
    task, found = recorded("moe tp2 sp ep2 do", folder / "lora", pool, **dict(LORA))
    assert found.first is None and not found.skipped
    names = {kind: {v.name for v in found.verdicts if v.kind == kind} for kind in OF_PARAMETERS}
    assert all(".lora_" in name for name in names["gradient"]) and len(set(map(frozenset, names.values()))) == 1
    expert = "layers.1.mlp.experts.3.linear_fc1.up_proj"
    assert {f"layers.0.{QKV}.{leaf}_proj.lora_B.weight" for leaf in "qkv"} | {f"{expert}.lora_A.weight"} <= names[
        "weight"
    ]
    gradients = [
        tensor
        for rank in Trace.open(task.trace).ranks()
        for entry, tensor in rank.tensors.items()
        if entry.kind == "gradient" and "lora_A" in entry.name and "experts" not in entry.name
    ]
    assert gradients and all(gradient.any() for gradient in gradients)


@pytest.mark.process
def test_two_layouts_against_each_other(folder: Path, pool: Pool) -> None:
    """A trace in parts is joined; bfloat16 has the tolerance of its dtype."""
    text = "dense cp2"
    case = parse(text)
    model = models.build(case.variant, folder / "models" / case.variant)
    task = Task(case, model, folder / "own", options={"torch_dtype": "bfloat16"})
    other = replace(task, case=parse("dense tp2 packed"), trace=folder / "other")
    for one in (task, other):
        pool.run("tests.bisection.ranks:record", one, 2)
    cfg = SwiftConfig(task="sft", model=str(model), **case.config(**options_of(task)))
    trace = Trace.open(task.trace)
    steps = references_of(trace, model, cfg)
    steps = replace(steps, perturbed=list(steps.perturbed))
    found = compare_with(trace, model, steps)
    assert found.first is None
    assert 1e-3 < max(v.expected for v in found.verdicts if v.kind == "output") < 0.5
    against = compare_with(trace, model, steps, other_step(trace, Trace.open(other.trace), model, steps))
    assert against.first is None and len(against.verdicts) == len(found.verdicts)
    assert any(v.difference for v in against.verdicts if v.kind == "output"), "other roundings"
    fault = Fault("dense cp2", "wrong_shard", 1, QKV, "cp", 1, factor=2.0)
    wrong = replace(task, trace=folder / "wrong", fault=fault)
    pool.run("tests.bisection.ranks:record", wrong, 2)
    faulty = Trace.open(wrong.trace)
    first = compare_with(faulty, model, steps, other_step(faulty, Trace.open(other.trace), model, steps)).first
    assert first is not None and (first.name, first.kind, first.place.cp) == (f"layers.1.{QKV}", "output", 1)
    shutil.copytree(task.trace, folder / "shorter")
    for file in (folder / "shorter").glob("rank-*.json"):
        file.write_text(file.read_text().replace('"loss_weights"', '"labels"'))
    with pytest.raises(UserError, match="lacks inputs: loss_weights"):
        judge(Trace.open(folder / "shorter"), model, cfg)


@pytest.mark.process
def test_no_difference_in_layers_for_multi_token_prediction(folder: Path, pool: Pool) -> None:
    """Two layers behind each other, whose tokens at the ends of documents do not count."""
    _, found = recorded("deepseek_v3-mtp tp2 sp packed", folder, pool)
    assert found.first is None
    kinds = {v.kind for v in found.verdicts if v.name.startswith("mtp.layers.1.")}
    assert kinds == set(KINDS) - {"input", "loss", RECOMPUTED}
    names = {v.name.removeprefix("mtp.layers.1.") for v in found.verdicts if v.kind == "output_gradient"}
    inside = ("mlp", "mlp.router", "self_attention.linear_proj", "self_attention.core_attention")
    joining = ("enorm", "hnorm", "eh_proj", "final_layernorm", "head", "transformer_layer")
    assert {*joining, *(f"transformer_layer.{name}" for name in inside)} <= names
    assert all(name.endswith("expert_bias (gathered_weight)") for name in found.skipped), "which no gradient moves"
    assert "MTP 2" in page(found, Layout(2, tp=2), "hf")


WRONG_SHARD = Fault("dense tp2 pp2", "wrong_shard", 1, QKV, "tp", 1)
FAULTS = [
    Fault("dense tp2 pp2", "no_backward_reduction", 3, FC1, answers=(f"layers.3.{FC1}",)),
    Fault("dense tp2 pp2", "local_norm", answers=("@clipped_gradient",)),
    Fault("dense recompute=full", "recomputed_from_fp8", answers=("layers.3",), dtype="bfloat16"),
]


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named(fault: Fault, planted: Planted) -> None:
    answer = planted.answer(fault)
    assert answer.right, f"{answer.name}: {answer.text}"


@pytest.fixture(scope="module")
def planted(folder: Path, pool: Pool) -> Planted:
    """Plants faults in the session's ranks."""
    return Planted(pool, folder)


@pytest.mark.process
def test_the_report(planted: Planted) -> None:
    """The example of the page: the text, the JSON and the picture name the first tensor."""
    found = planted.comparison(WRONG_SHARD)
    layout = Layout(4, tp=2, pp=2)
    text = screen(found, layout, "Hugging Face").splitlines()
    assert text[1].startswith(
        f"first difference: layers.1.{QKV}, output, micro-batch 0, rank 1 (tp 1, pp 0): 1.0e-02, "
    )
    assert text[2].startswith("ranks differ along tp; no layer agrees everywhere; outputs of layers 0 agree")
    assert layer_ranges(found)[1] == "0"
    facts = report_json(found, layout, "Hugging Face")
    assert facts["first"]["rank"] == 1 and facts["suspect"] == f"layers.1.{QKV}" and not facts["agrees"]
    drawn = page(found, layout, "<hf>")
    assert (
        f"layers.1.{QKV}, output, micro-batch 0" in drawn
        and "&lt;hf&gt;" in drawn
        and drawn.count('stroke-width="3"') == 1
    )


def test_colors() -> None:
    """Green within the tolerance; beyond, red grows by powers of ten."""
    hues = [int(color(ratio).split("(")[1].split()[0]) for ratio in (0.0, 1.0, 2.0, 100.0, 1e9, float("inf"))]
    assert hues[:2] == [140, 140] and hues[2] > hues[3] > hues[4] == hues[5] == 0


def run_command(rank: int, world: int, words: list[str]) -> int:
    """The command, in a process that may start others (on a rank)."""
    import os

    from megaswift.cli import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return main(["bisect", *words])


class Known:
    """A model's folder in place of the parity tests' references."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, case: Case) -> tuple[Path, Recipe, None]:
        """Without the oracle's numbers."""
        return self.folder, Recipe(max_grad_norm=0.5), None


@pytest.mark.process
def test_a_failed_parity_test_shows_the_answer(folder: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("dense", folder / "models" / "dense")
    monkeypatch.setattr(check, "against_hugging_face", lambda *_: [number("loss", 1.0, 2.0, 0.1)])
    with pytest.raises(AssertionError, match="no difference beyond rounding"):
        check.check(parse("dense tp2"), pool, Known(model))  # type: ignore[arg-type]
    fault = Fault("dense tp2", "scaled_weight_gradient", 1, FC1)
    text = explained(parse("dense tp2"), pool, model, {}, fault, without="a head")
    assert text.startswith("megaswift bisect, on a language-model step of the same layout, without a head:\n")
    assert f"first difference: layers.1.{FC1}.weight" in text
    assert text.endswith("\nthis step is wrong too, so look at the layout")


@pytest.mark.process
def test_a_failed_parity_test_of_adapters_shows_the_answer(folder: Path, pool: Pool) -> None:
    model = models.build("dense", folder / "models" / "dense")
    case = parse("dense tp2")
    with pytest.raises(AssertionError, match="no difference beyond rounding\nthis step is right, so look at a head$"):
        check.assert_within_limits([number("loss", 1.0, 2.0, 0.1)], case, pool, model, dict(LORA), without="a head")
    fault = next(fault for fault in LORA_FAULTS if (fault.case, fault.kind) == ("dense tp2", "scaled_adapter"))
    text = explained(case, pool, model, dict(LORA), fault)
    assert f"first difference: layers.2.{FC1}, output, micro-batch 0, rank 1" in text


@pytest.mark.process
def test_an_error_of_bisect_does_not_hide_the_table(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "explained", lambda *_, **__: {}["trace"])
    with pytest.raises(KeyError, match="trace") as raised:
        check.assert_within_limits([number("loss", 1.0, 2.0, 0.1)], parse("dense single"), pool, Path("model"), {})
    assert "1 of 1 comparisons fail" in str(raised.value.__context__)


def test_what_is_not_recorded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    data = write_conversations(tmp_path / "data.jsonl")
    run = tmp_path / "run.yaml"
    run.write_text(f"task: sft\nmodel: {model}\ndataset: [{data}]\ntrain_type: lora\nlora_dropout: 0.1\n")
    with pytest.raises(ConfigError, match="--lora_dropout 0$"):
        bisection.main([str(run)])
    with pytest.raises(ConfigError, match="leave --layers out"):
        bisection.main([str(run), "--lora_dropout", "0", "--adapters", str(tmp_path), "--layers", "1"])
    with pytest.raises(ConfigError, match="--train_type lora, or full"):
        bisection.main([str(run), "--lora_dropout", "0", "--train_type", "qlora"])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("words", [["--init_weights", "pissa"], ["--use_dora", "true"], ["--lorap_lr_ratio", "8"]])
def test_the_command_with_adapters(words: list[str], tmp_path: Path, pool: Pool) -> None:
    """Adapters that start otherwise, that have magnitudes, that learn at two rates."""
    model = write_model(tmp_path / "model", layers=3)
    data = write_conversations(tmp_path / "data.jsonl")
    run = tmp_path / "run.yaml"
    run.write_text(
        f"task: sft\nmodel: {model}\ndataset: [{data}]\ndataset_cache_dir: {tmp_path}/cache\ntrain_type: lora\n"
        "per_device_train_batch_size: 2\nglobal_batch_size: 4\nlearning_rate: 1e-3\nmodules_to_save: [lm_head]\n"
    )
    out = tmp_path / "report"
    words = [str(run), "--layout", "tp2 pp2", "--layers", "2", "--output", str(out), *words]
    [code] = pool.run("tests.bisection.test_steps:run_command", [*words, "--torch_dtype", "float32"], 1)
    facts = json.loads((out / "bisect.json").read_text())
    names = {row["name"] for row in facts["tensors"] if row["kind"] == "weight"}
    assert code == 0 and facts["agrees"] and {"output_layer.weight", f"layers.1.{PROJ}.o_proj.lora_A.weight"} <= names
    assert not facts["without_counterpart"]


@pytest.mark.process
def test_the_command(tmp_path: Path, pool: Pool) -> None:
    """A user's own file and data, the first layers of the model, and the trace that is left."""
    model = write_model(tmp_path / "model", layers=3)
    data = write_conversations(tmp_path / "data.jsonl")
    run = tmp_path / "run.yaml"
    run.write_text(
        f"task: sft\nmodel: {model}\ndataset: [{data}]\ndataset_cache_dir: {tmp_path}/cache\ntrain_type: full\n"
        "per_device_train_batch_size: 2\nglobal_batch_size: 4\nlearning_rate: 1e-3\n"
    )
    out = tmp_path / "report"
    words = [str(run), "--layout", "tp2 dp2", "--layers", "2", "--output", str(out), "--keep_trace"]
    [code] = pool.run("tests.bisection.test_steps:run_command", [*words, "--torch_dtype", "float32"], 1)
    facts = json.loads((out / "bisect.json").read_text())
    assert code == 0 and facts["agrees"] and facts["layout"] == "TP2 SP DP2" and facts["layers_that_agree"] == "0 to 1"
    assert {row["name"] for row in facts["tensors"]} >= {"layers.1.mlp.linear_fc2", "input_ids"}
    assert "No difference" in (out / "bisect.html").read_text()
    other = shutil.copytree(out / "trace", tmp_path / "other")
    wrong = scale_output(other, 1, "layers.1.mlp.linear_fc1")
    words = [str(out / "trace"), "--model", str(model), "--against", str(other), "--output", str(out)]
    [code] = pool.run("tests.bisection.test_steps:run_command", words, 1)
    facts = json.loads((out / "bisect.json").read_text())
    assert (code, facts["against"]) == (DIFFERENT, str(other))
    assert (facts["first"]["name"], facts["first"]["rank"], facts["first"]["kind"]) == (wrong, 1, "output")


def scale_output(trace: Path, rank: int, name: str) -> str:
    """Make an output of a rank's first micro-batch a little too large, in a trace on disk; returns its name."""
    rows = json.loads((trace / f"rank-{rank}.json").read_text())["tensors"]
    [key] = [row["key"] for row in rows if (row["kind"], row["name"], row["microbatch"]) == ("output", name, 0)]
    file = trace / f"rank-{rank}.safetensors"
    tensors = load_file(file)
    tensors[key] *= 1.001
    save_file(tensors, file)
    return name


@pytest.mark.slow
@pytest.mark.process
def test_against_the_folder_of_a_run(tmp_path: Path, pool: Pool) -> None:
    """A run in a layout of its own computes the same; one with another loss does not."""
    inputs = [*write_inputs(tmp_path), "--global_batch_size", "8"]
    sft(inputs, tmp_path / "same", "--pp", 2, "--max_steps", 1)
    sft(inputs, tmp_path / "smoothed", "--max_steps", 1, "--label_smoothing_factor", "0.1")
    run = tmp_path / "same" / "config.yaml"
    report = tmp_path / "report"
    given = Namespace(against=str(tmp_path / "same"), layout="tp2", layers=None)
    _, other = bisection._other(given, [], tmp_path / "scratch")
    assert other is not None and other[1].describe() == "PP2 DP1"
    found = {}
    for name in ("same", "smoothed"):
        words = [str(run), "--layout", "tp2", "--against", str(tmp_path / name), "--output", str(report)]
        [code] = pool.run("tests.bisection.test_steps:run_command", [*words, "--torch_dtype", "float32"], 1)
        facts = json.loads((report / "bisect.json").read_text())
        assert facts["against"] == str(tmp_path / name) and facts["layout"] == "TP2 SP DP1"
        found[name] = code, facts["first"] and facts["first"]["kind"]
    assert found == {"same": (0, None), "smoothed": (DIFFERENT, "loss")}

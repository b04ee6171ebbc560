"""Five steps of distillation beside TRL's GKDTrainer: the same models, rows and optimizer, float32; loss and gradient
norm of every step.

Covers: megaswift/run/distillation_task.py, megaswift/trainers/distillation/batches.py, megaswift/losses/gkd.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.trainers.distillation.on_policy import ROWS, STUDENT, TEACHER, writer_of_step
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.test_trajectories_trl import ALIKE, BATCH, SPREAD, STEPS, arguments, assert_same, curve

SLOW = pytest.mark.slow
LONGEST = 6
SEED = 3
GREEDY = ("--top_k", 1, "--max_completion_length", LONGEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, a wider and deeper teacher/ and rows of uneven lengths."""
    made = tmp_path_factory.mktemp("distillation")
    write_model(made / "model")
    write_model(made / "teacher", layers=4, hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=8)
    randomize(made / "teacher")
    rows = []
    for i in range(STEPS * BATCH):
        answer = f"{(i + 7 * i) % 90 + 10}" * (i % 3 + 1)
        ask = {"role": "user", "content": f"{i % 10}+{(7 * i) % 10}="}
        rows.append({"messages": [ask, {"role": "assistant", "content": answer}]})
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def randomize(folder: Path, deviation: float = 0.3) -> None:
    """Weights that make the teacher sure of something."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(9)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=generator) * deviation
    model.save_pretrained(folder)


def of_trl(
    folder: Path,
    writers: Sequence[str] = (),
    sft_alpha: float = 0.0,
    divergence: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    adapter: Path | None = None,
    teacher: str = "teacher",
    **options: Any,
) -> list[tuple[float, float]]:
    """The curve of GKDTrainer. `writers`: whose answers each step trains on, in place of a draw; they are greedy.
    `sft_alpha`: of a cross-entropy that is added here, on answers of others. `divergence`: of the logits of both at
    these labels, in place of its own. `adapter`: PEFT's, which trains. `teacher`: its folder; rows of its vocabulary
    that the model lacks are cut off by transformers."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "trl-cache")
    )
    step = iter(writers)
    answers = [ROWS]

    class Trainer(GKDTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            answers[0] = next(step, ROWS)
            self.lmbda = 2.0 if answers[0] == STUDENT else -1.0
            self.seq_kd = answers[0] == TEACHER
            return super().training_step(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            # its count of labels is that of the rows, also where other answers have taken their place
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=None)
            if divergence is not None:
                teacher = self.teacher_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
                loss = divergence(outputs.logits[:, :-1], teacher[:, :-1].detach(), inputs["labels"][:, 1:])
            if sft_alpha and answers[0] != STUDENT:
                logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
                loss = loss + sft_alpha * torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
            return loss

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    taught = AutoModelForCausalLM.from_pretrained(folder / teacher)
    if taught.config.vocab_size > model.config.vocab_size:
        taught.resize_token_embeddings(model.config.vocab_size)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trainer = Trainer(
        model=model,
        teacher_model=taught,
        args=GKDConfig(**arguments(folder) | {"lmbda": 0.0, **options}),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.generation_config.do_sample = False
    trainer.generation_config.temperature = None
    trainer.generation_config.max_new_tokens = LONGEST
    return curve(trainer)


def of_trl_on_policy(folder: Path, **options: Any) -> list[tuple[float, float]]:
    """The curve of DistillationTrainer, which samples every answer; greedily here."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = Dataset.from_list([{"prompt": json.loads(line)["messages"][:1]} for line in lines])
    trainer = DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        teacher_model=AutoModelForCausalLM.from_pretrained(folder / "teacher"),
        args=DistillationConfig(
            **arguments(folder)
            | {"max_completion_length": LONGEST, "generation_kwargs": {"do_sample": False}, "shuffle_dataset": False}
            | options
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    return curve(trainer)


def ours(folder: Path, out: Path, *options: object, ranks: int = 1) -> list[tuple[float, float]]:
    """The curve of a run."""
    inputs = ["--model", str(folder / "model")]
    if "--teacher_model" not in options:
        inputs += ["--teacher_model", str(folder / "teacher")]
    inputs += ["--dataset", str(folder / "rows.jsonl"), "--dataset_cache_dir", str(folder / "cache")]
    if "--per_device_train_batch_size" not in options:
        inputs += ["--per_device_train_batch_size", str(BATCH)]
    run(inputs, out, *ALIKE, *options, task="gkd", ranks=ranks)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


LAYOUTS: list[Any] = [
    (("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2),
    *(
        pytest.param(layout, ranks, marks=SLOW)
        for layout, ranks in (
            ((), 1),
            (("--tp", 2), 2),
            (("--tp", 2, "--sequence_parallel", "false"), 2),
            (("--pp", 2), 2),
            (("--cp", 2), 2),
            (SPREAD, 2),
            ((*SPREAD, "--teacher_pp", 2), 2),
            (("--tp", 2, "--pp", 2), 4),
            (("--padding_free", "true"), 1),
            (("--engine", "ddp"), 1),
            (("--engine", "ddp", *SPREAD), 2),
            (("--engine", "zero3", *SPREAD), 2),
            (("--engine", "fsdp2", *SPREAD), 2),
            ((*SPREAD, "--teacher_tp", 2, "--offload_teacher_model", "true"), 2),
        )
    ),
]


@pytest.fixture(scope="module")
def rows_alone(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder, beta=0.3)


@pytest.mark.process
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_answers_of_the_rows(
    layout: tuple[object, ...], ranks: int, folder: Path, rows_alone: list[tuple[float, float]], tmp_path: Path
) -> None:
    mine = ours(folder, tmp_path / "out", "--lmbda", 0, "--beta", 0.3, *layout, ranks=ranks)
    assert_same(mine, rows_alone)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(("--tp", 2), 2), (("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2), (("--engine", "ddp", *SPREAD), 2)],
)
def test_adapters(layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path) -> None:
    """LoRA of the model that trains, from random numbers on both sides."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = tmp_path / "adapter"
    lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), lora).save_pretrained(adapter)
    trains = ("--train_type", "lora", "--adapters", adapter, "--lmbda", 0, "--beta", 0.3)
    mine = ours(folder, tmp_path / "out", *trains, *layout, ranks=ranks)
    assert_same(mine, of_trl(folder, adapter=adapter, beta=0.3))


@pytest.fixture(scope="module")
def other_teachers(folder: Path) -> Path:
    """experts/, a mixture of experts, and wide/, whose vocabulary has rows that the model lacks."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    kept = AutoModelForCausalLM.from_pretrained(folder / "teacher").config.to_dict()
    kept = {k: v for k, v in kept.items() if k not in ("architectures", "model_type", "dtype", "layer_types")}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept, **experts)).save_pretrained(folder / "experts")
    Qwen3ForCausalLM(Qwen3Config(**kept | {"vocab_size": kept["vocab_size"] + 19})).save_pretrained(folder / "wide")
    for name in ("experts", "wide"):
        randomize(folder / name)
        for file in (folder / "teacher").glob("*token*"):
            shutil.copy(file, folder / name)
        shutil.copy(folder / "teacher/chat_template.jinja", folder / name)
    return folder


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ((*SPREAD, "--teacher_ep", 2), 2),
        (("--tp", 2, "--teacher_tp", 1, "--teacher_ep", 2), 2),
        (("--pp", 2, "--teacher_pp", 1), 2),
        (("--engine", "ddp", *SPREAD), 2),
    ],
)
def test_experts_of_a_teacher(layout: tuple[object, ...], ranks: int, other_teachers: Path, tmp_path: Path) -> None:
    taught = ("--teacher_model", other_teachers / "experts", "--lmbda", 0, "--beta", 0.3)
    mine = ours(other_teachers, tmp_path / "out", *taught, *layout, ranks=ranks)
    assert_same(mine, of_trl(other_teachers, teacher="experts", beta=0.3))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(("--tp", 2), 2), ((*SPREAD, "--teacher_tp", 2), 2), (("--engine", "ddp", *SPREAD), 2)],
)
def test_a_larger_vocabulary_of_the_teacher(
    layout: tuple[object, ...], ranks: int, other_teachers: Path, tmp_path: Path
) -> None:
    taught = ("--teacher_model", other_teachers / "wide", "--lmbda", 0, "--beta", 0.3)
    mine = ours(other_teachers, tmp_path / "out", *taught, *layout, ranks=ranks)
    assert_same(mine, of_trl(other_teachers, teacher="wide", beta=0.3))


@pytest.fixture(scope="module")
def on_policy(folder: Path) -> list[tuple[float, float]]:
    return of_trl_on_policy(folder, beta=1.0, temperature=0.8)


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                ((), 1),
                (("--tp", 2), 2),
                (("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2),
                (("--cp", 2), 2),
                (("--cp", 2, "--padding_free", "true"), 2),
                (SPREAD, 2),
                (("--engine", "ddp", *SPREAD), 2),
                (("--engine", "zero3", *SPREAD), 2),
            )
        ),
    ],
)
def test_completions_of_the_model(
    layout: tuple[object, ...], ranks: int, folder: Path, on_policy: list[tuple[float, float]], tmp_path: Path
) -> None:
    sampled = ("--lmbda", 1, "--beta", 1, "--temperature", 0.8, *GREEDY)
    assert_same(ours(folder, tmp_path / "out", *sampled, *layout, ranks=ranks), on_policy)


MIXED: list[Any] = [
    (("--seq_kd", "true"), (), 1),
    *(
        pytest.param(options, layout, ranks, marks=SLOW)
        for options, layout, ranks in (
            ((), ("--tp", 2), 2),
            (("--seq_kd", "true"), ("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2),
            (("--seq_kd", "true"), ("--engine", "zero3", *SPREAD), 2),
            (("--seq_kd", "true"), SPREAD, 2),
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(("options", "layout", "ranks"), MIXED)
def test_steps_with_answers_of_each_kind(
    options: tuple[object, ...], layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """By lot; the lots of this seed bring all kinds within five steps. The cross-entropy is on answers of others."""
    writers = [writer_of_step(SEED, step, 0.5, bool(options)) for step in range(STEPS)]
    assert set(writers) == {STUDENT, TEACHER if options else ROWS}
    sampled = ("--lmbda", 0.5, "--beta", 0.3, "--seed", SEED, "--sft_alpha", 0.4, *GREEDY)
    mine = ours(folder, tmp_path / "out", *sampled, *options, *layout, ranks=ranks)
    assert_same(mine, of_trl(folder, writers, sft_alpha=0.4, beta=0.3))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--engine", "ddp", *SPREAD)])
def test_a_cross_entropy_besides(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    mine = ours(folder, tmp_path / "out", "--lmbda", 0, "--beta", 0.3, "--sft_alpha", 0.7, *layout, ranks=2)
    theirs = of_trl(folder, sft_alpha=0.7, beta=0.3)
    assert_same(mine, theirs)
    assert abs(theirs[0][0] - of_trl(folder, beta=0.3)[0][0]) > 0.1


def compare_largest(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Over the teacher's four largest and the rest, as TRL's ServerDistillationTrainer compares them (beta 0)."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    taught = teacher.log_softmax(-1).topk(4)
    own = student.log_softmax(-1).gather(-1, taught.indices)
    listed = torch.ones_like(own, dtype=torch.bool)
    a, mask = _add_tail_bucket(own, listed)
    b, _ = _add_tail_bucket(taught.values, listed)
    terms: Tensor = _jsd_divergence(a, b, 0.0, mask)
    labeled = labels != -100
    return terms[labeled].sum() / labeled.sum()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The teacher behind vLLM's routes, as far as a run asks for them: the log-probabilities are transformers'."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "teacher"}]} if self.path == "/v1/models" else None)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                tokens = tokenizer(asked["prompt"], add_special_tokens=asked["add_special_tokens"])["input_ids"]
                return self._answer({"tokens": tokens})
            ids, k = asked["prompt"], asked["prompt_logprobs"]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            listed: list[Any] = [None]
            for place, token in enumerate(ids[1:]):
                best = logprobs[place].topk(k)
                chosen = {int(i): float(v) for i, v in zip(best.indices, best.values, strict=True)}
                chosen[token] = float(logprobs[place, token])
                listed.append({str(i): {"logprob": v, "decoded_token": "?"} for i, v in chosen.items()})
            return self._answer({"choices": [{"text": "", "prompt_logprobs": listed}]})

        def _answer(self, body: Any) -> None:
            known = {"/v1/models", "/v1/completions", "/tokenize"}
            status = 200 if body is not None else 405 if self.path in known else 404
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def largest(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder, divergence=compare_largest, beta=0.0)


LARGEST = ("--lmbda", 0, "--beta", 0, "--gkd_logits_topk", 4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ((), 1),
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                (("--pp", 2), 2),
                (("--tp", 2), 2),
                (("--cp", 2), 2),
                (("--engine", "ddp", *SPREAD), 2),
            )
        ),
    ],
)
def test_a_teacher_behind_a_server(
    layout: tuple[object, ...], ranks: int, folder: Path, largest: list[tuple[float, float]], tmp_path: Path
) -> None:
    with served(folder / "teacher") as url:
        inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
        inputs += ["--dataset_cache_dir", str(folder / "cache"), "--teacher_model_server", url]
        if "--per_device_train_batch_size" not in layout:
            inputs += ["--per_device_train_batch_size", str(BATCH)]
        run(inputs, tmp_path / "out", *ALIKE, *LARGEST, *layout, task="gkd", ranks=ranks)
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert_same([(line["loss"], line["grad_norm"]) for line in lines], largest)


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--tp", 2), ("--engine", "ddp", *SPREAD)),
        pytest.param(("--engine", "zero3", *SPREAD), ("--pp", 2), marks=SLOW),
        pytest.param((*SPREAD, "--teacher_tp", 2), ("--cp", 2), marks=SLOW),
    ],
)
def test_a_teacher_on_disk(
    first: tuple[object, ...],
    second: tuple[object, ...],
    folder: Path,
    largest: list[tuple[float, float]],
    tmp_path: Path,
) -> None:
    """The first run writes the probabilities; the second reads them, without the teacher and in another layout."""
    stored = ("--teacher_logits", tmp_path / "probabilities")
    assert_same(ours(folder, tmp_path / "one", *LARGEST, *stored, *first, ranks=2), largest)
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    inputs += ["--dataset_cache_dir", str(folder / "cache")]
    if "--per_device_train_batch_size" not in second:
        inputs += ["--per_device_train_batch_size", str(BATCH)]
    run(inputs, tmp_path / "two", *ALIKE, *LARGEST, *stored, *second, task="gkd", ranks=2)
    lines = read_lines(tmp_path / "two" / "metrics.jsonl")
    assert_same([(line["loss"], line["grad_norm"]) for line in lines], largest)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2), 2),
        (("--pp", 2, "--teacher_tp", 2, "--teacher_pp", 1), 2),
        (("--engine", "ddp", *SPREAD), 2),
    ],
)
def test_the_largest_probabilities(
    layout: tuple[object, ...], ranks: int, folder: Path, largest: list[tuple[float, float]], tmp_path: Path
) -> None:
    assert_same(ours(folder, tmp_path / "out", *LARGEST, *layout, ranks=ranks), largest)

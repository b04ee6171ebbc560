"""One SFT run, of all weights and of LoRA, on every way to spread it: one curve and one export, by the wrapper that was
asked for.

The reference is Megatron with TP2 x PP2 (held to Hugging Face by tests/parity). float32, CPU, 2 or 4 processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import PRELOAD, Pool
from tests.trainers.inputs import write_inputs
from tests.trainers.run_ranks import Job, Seen
from tests.trainers.test_engines_run import near

pytestmark = pytest.mark.process
STEPS = 4
CURVE, WEIGHTS = 1e-5, 1e-5
"""Of each step's loss and gradient norm, relative (1.3e-7 seen); of a weight, in units of its tensor's largest. Adam's
epsilon is so large that an element whose gradient is all rounding does not take a full step: with 1e-6 one of them was
1.5e-5 away on one kind of CPU, and 2e-6 on another."""
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer")
ZERO_OPTIMIZERS = ("AdamW", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


@dataclass(frozen=True)
class Way:
    """How a run is spread, and what must then be there."""

    words: tuple[str, ...]
    wrapper: str
    stage: int = -1
    ranks: int = 2
    parts: tuple[int, int] = (1, 1)
    """Into how many parts weights and optimizer states go."""
    keeps: bool = False
    offloads: bool = False
    mesh: tuple[int, ...] = ()
    units: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


def zero(stage: int, offload: bool = False) -> Way:
    parts = (2 if stage == 3 else 1, 2 if stage else 1)
    kind = f"zero{stage}" + "_offload" * offload
    return Way(("--deepspeed", kind), "DeepSpeedEngine", stage, parts=parts, offloads=offload)


LAYER, NORM = "Qwen3DecoderLayer", "Qwen3RMSNorm"


def fsdp(*words: str, ranks: int = 2, mesh: tuple[int, ...] = (2,), keeps: bool = False, offloads: bool = False) -> Way:
    environ = {"GROUP_WORLD_SIZE": "2"} if len(mesh) == 2 else {}
    options = ("--engine", "fsdp2", *(("--fsdp", *words) if words else ()))
    return Way(
        options,
        "FSDPLossFieldsModel",
        ranks=ranks,
        parts=(2, 2),
        keeps=keeps,
        offloads=offloads,
        mesh=mesh,
        units=(LAYER,),
        environ=environ,
    )


WAYS = {
    "ddp": Way(("--engine", "ddp"), "DistributedDataParallel"),
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero2_offload": zero(2, True),
    "zero3_offload": zero(3, True),
    "fsdp2": fsdp(),
    "fsdp2 no reshard": fsdp("shard_grad_op", keeps=True),
    "fsdp2 offload": fsdp("offload", offloads=True),
    "fsdp2 hybrid": fsdp("hybrid_shard", ranks=4, mesh=(2, 2)),
    "fsdp2 hybrid no reshard": fsdp("hybrid_shard_zero2", ranks=4, mesh=(2, 2), keeps=True),
    "fsdp2 units in units": replace(
        fsdp(), words=("--engine", "fsdp2", "--fsdp_transformer_layer_cls_to_wrap", LAYER, NORM), units=(LAYER, NORM)
    ),
}
DEFAULT = {("fsdp2", "lora")}
"""Of the table, what runs by default; the rest is in the slow tier."""
TABLE = [
    pytest.param(name, kind, id=f"{name}-{kind}", marks=[] if (name, kind) in DEFAULT else pytest.mark.slow)
    for name in WAYS
    for kind in ("full", "lora")
]


@pytest.fixture(scope="module")
def zero_runs() -> Iterator[Pool]:
    """Ranks that have imported DeepSpeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        with Pool(
            (*PRELOAD, "peft", "transformers.models.qwen3.modeling_qwen3", "tests.trainers.run_ranks", *DEEPSPEED)
        ) as started:
            yield started


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Data, options, and adapters whose B is not zero, so that A has a gradient from the first step on."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("inputs")
    words = write_inputs(folder, "1e-3")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(folder / "adapter")
    words[words.index("--per_device_train_batch_size") + 1] = "2"
    return [
        *words,
        "--global_batch_size",
        "8",
        "--max_steps",
        str(STEPS),
        "--report_to",
        "none",
        "--adam_epsilon",
        "1e-5",
        "--max_grad_norm",
        "0.5",
    ]


def run(
    pool: Pool, inputs: list[str], out: Path, kind: str, words: tuple[str, ...], ranks: int = 4, **environ: str
) -> list[Seen]:
    adapter = str(Path(inputs[1]).with_name("adapter"))
    own = ("--train_type", "lora", "--adapters", adapter, "--merge_lora", "true") if kind == "lora" else ()
    job = Job([*inputs, *own, *words, "--output_dir", str(out)], environ)
    return pool.run("tests.trainers.run_ranks:go", job, ranks, timeout=240)


@pytest.fixture(scope="module")
def native(pool: Pool, inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Megatron TP2 x PP2, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("native")

    class Made(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = folder / kind
            run(pool, inputs, self[kind], kind, ("--tp", "2", "--pp", "2"))
            return self[kind]

    return Made()


@pytest.mark.parametrize(("name", "kind"), TABLE)
def test_the_same_run(
    name: str,
    kind: str,
    request: pytest.FixtureRequest,
    inputs: list[str],
    native: dict[str, Path],
    tmp_path: Path,
) -> None:
    way, out = WAYS[name], tmp_path / "out"
    runs = request.getfixturevalue("pool" if way.stage < 0 else "zero_runs")
    seen = run(runs, inputs, out, kind, way.words, way.ranks, **way.environ)
    lines, wanted = (read_lines(folder / "metrics.jsonl") for folder in (out, native[kind]))
    assert len(lines) == len(wanted) == STEPS
    far = {
        key: max(abs(a[key] / b[key] - 1) for a, b in zip(lines, wanted, strict=True)) for key in ("loss", "grad_norm")
    }
    assert max(far.values()) <= CURVE, far
    tensors, others = (load_file(folder / "hf" / "model.safetensors") for folder in (out, native[kind]))
    apart = {"hf": near(tensors, others)}
    if kind == "lora":
        apart["adapter"] = near(
            *(load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (out, native[kind]))
        )
    print(f"{name} {kind}: {far} {apart}")
    assert max(apart.values()) <= WEIGHTS, apart
    total = sum(t.numel() for t in tensors.values())
    trained = total
    if kind == "lora":
        trained = sum(t.numel() for t in load_file(out / "adapter" / "adapter_model.safetensors").values())
        total += trained
    for rank in seen:
        assert (rank.wrapper, rank.stage, rank.mesh) == (way.wrapper, way.stage, way.mesh)
        assert (rank.keeps, rank.offloads, rank.units) == (way.keeps, way.offloads, way.units)
        assert rank.optimizer == (ZERO_OPTIMIZERS[way.stage] if way.stage >= 0 else "AdamW")
        for held, whole, parts in zip((rank.local, rank.states), (total, 2 * trained), way.parts, strict=True):
            assert whole / parts * 0.85 <= held <= whole / parts * (1.15 if parts > 1 else 1), (held, whole, parts)

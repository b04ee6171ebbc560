"""Runs on vision-language folders of Qwen3.5 and 3.6 as users start them: the language model trains on the native
engine, and transformers' whole model is the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.config import load_config
from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.model_tokenizer import read_tokenizer, tokenizer_or_processor_for
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import ConfigError, UserError
from megaswift.families import load_spec
from megaswift.run.checks.engine_choice import resolve_engine
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.run.checks.preflight import preflight
from megaswift.trainers.hooks.metrics import read_lines
from tests.hybrid_folders import write_hybrid
from tests.trainers.inputs import write_conversations
from tests.trainers.runs import run
from tests.vision_language_folders import config_of, write_vision_language

FORMS = {"dense": ("qwen3_5", False), "split": ("qwen3_5_moe", False), "stacked": ("qwen3_5_moe", True)}
ROWS = 24
LAYOUTS = {1: (), 2: ("--tp", 2), 4: ("--tp", 2, "--ep", 2, "--pp", 2)}
LORA = ("--train_type", "lora", "--lora_rank", 4, "--save_steps", 1)
EXPERTS = ("--target_modules", "all-linear", "--target_parameters", "gate_up_proj", "down_proj")


def trained(form: str, folder: Path, *options: object, ranks: int = 1) -> tuple[Path, list[float]]:
    """The output directory of a run whose steps have all rows, and their losses."""
    write_vision_language(folder / "model", *FORMS[form])
    data = write_conversations(folder / "data.jsonl", ROWS)
    inputs = ["--model", str(folder / "model"), "--dataset", str(data), "--dataset_cache_dir", str(folder / "cache")]
    batch = ("--per_device_train_batch_size", 4, "--global_batch_size", ROWS, "--lr", 1e-2, "--report_to", "none")
    run(inputs, folder / "out", *batch, *options, ranks=ranks)
    return folder / "out", [line["loss"] for line in read_lines(folder / "out" / "metrics.jsonl") if "loss" in line]


def whole(folder: Path) -> Any:
    """transformers' model with images and all."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def documents(folder: Path) -> Iterable[tuple[Tensor, Tensor]]:
    """Tokens and which of them the assistant wrote, by transformers' template."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for line in (folder / "data.jsonl").read_text().splitlines():
        how = {"return_dict": True, "return_assistant_tokens_mask": True}
        row = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, **how)
        yield torch.tensor(row["input_ids"]), torch.tensor(row["assistant_masks"]).bool()


@torch.no_grad()
def loss_of(model: Any, folder: Path) -> float:
    """Cross entropy of the assistant's tokens, each document apart."""
    total, count = 0.0, 0
    for ids, said in documents(folder):
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[1:, None])[said[1:]].sum())
        count += int(said[1:].sum())
    return total / count


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("stacked", 1),
        *(pytest.param(form, ranks, marks=pytest.mark.slow) for form in FORMS for ranks in LAYOUTS if ranks < 4),
        *(pytest.param(form, 4, marks=pytest.mark.slow) for form in ("split", "stacked")),
    ],
)
def test_a_step(form: str, ranks: int, tmp_path: Path) -> None:
    """Its loss is transformers'; only the language model changes; what comes back is the folder's own form, and
    transformers has the next step's loss with it."""
    steps = ("--max_steps", 2, "--save_steps", 1, "--export_hf", "true")
    out, losses = trained(form, tmp_path, *steps, *LAYOUTS[ranks], ranks=ranks)
    assert losses[0] == pytest.approx(loss_of(whole(tmp_path / "model"), tmp_path), rel=1e-6)
    megatron_to_hf(out / "checkpoints" / "step-1", tmp_path / "step-1")
    assert losses[1] == pytest.approx(loss_of(whole(tmp_path / "step-1"), tmp_path), rel=1e-6)
    had, has = stored(tmp_path / "model"), stored(out / "hf")
    assert had.keys() == has.keys() == stored(tmp_path / "step-1").keys()
    assert config_of(out / "hf") == config_of(tmp_path / "model")
    same = {name for name in had if had[name].dtype == has[name].dtype and torch.equal(had[name], has[name])}
    assert same == {name for name in had if name.startswith(("mtp.", "model.visual."))}
    assert loss_of(whole(out / "hf"), tmp_path) < losses[1] < losses[0] - 0.1


@pytest.mark.process
@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("stacked", 1),
        *(pytest.param(form, ranks, marks=pytest.mark.slow) for form in ("dense", "stacked") for ranks in (1, 2)),
    ],
)
def test_an_adapter(form: str, ranks: int, tmp_path: Path) -> None:
    """PEFT loads it on the whole model, whose loss is that of the run's next step; merged, it has the same logits."""
    from peft import PeftModel

    options = (*LORA, *(EXPERTS if form == "stacked" else ()), *LAYOUTS[ranks])
    out, losses = trained(form, tmp_path, "--max_steps", 2, *options, ranks=ranks)
    adapter = out / "checkpoints" / "step-1" / "adapter"
    adapted = PeftModel.from_pretrained(whole(tmp_path / "model"), adapter).eval()
    assert losses[1] == pytest.approx(loss_of(adapted, tmp_path), rel=2e-6) and losses[1] < losses[0] - 0.1
    merged = whole(merge_adapter_folder_into_base(tmp_path / "model", adapter, tmp_path / "merged"))
    ids = next(iter(documents(tmp_path)))[0][None]
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=2e-5, rtol=1e-5)
    kept = [name for name in stored(tmp_path / "model") if name.startswith(("mtp.", "model.visual."))]
    had, has = stored(tmp_path / "model"), stored(tmp_path / "merged")
    assert had.keys() == has.keys() and all(torch.equal(had[name], has[name]) for name in kept)


IMAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "<image>1+1?"}, {"role": "assistant", "content": "2"}], "images": ["a"]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "1+1?"}]},
            {"role": "assistant", "content": "2"},
        ]
    },
    {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "videos": ["a.mp4"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_language(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("row", IMAGES, ids=["a column", "a part", "videos"])
def test_rows_with_images_are_refused(row: dict[str, Any], folder: Path) -> None:
    """By the name of the engines that read them."""
    cfg = load_config("sft", ["--model", str(folder), "--dataset", "d"])
    encoder = RowEncoder(encode_spec(cfg.data, read_tokenizer(folder, False, None), "sft"))
    with pytest.raises(RowError, match="trains only the language model") as refused:
        encoder.render(row)
    assert "--engine fsdp2 or zero3" in str(refused.value)
    encoder.render({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]})


def test_the_native_engine_is_the_default(folder: Path) -> None:
    cfg = resolve_engine(load_config("sft", ["--model", str(folder), "--dataset", "d"]), 1, tell=False)
    assert cfg.engine.engine == "megatron"
    assert model_spec_for_task(cfg, folder).features == load_spec(folder).features


def test_reward_models_are_refused(folder: Path) -> None:
    """transformers' classes for scores have other names for the language model's weights."""
    with pytest.raises(ConfigError, match="is a vision-language model, which rm does not support"):
        model_spec_for_task(load_config("rm", ["--model", str(folder), "--dataset", "d"]), folder)


@pytest.mark.process
@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("stacked", 2),
        pytest.param("dense", 1, marks=pytest.mark.slow),
        pytest.param("split", 2, marks=pytest.mark.slow),
    ],
)
def test_grpo(form: str, ranks: int, tmp_path: Path) -> None:
    """With transformers' sampler, whose weights are the trained language model and the folder's tower: both see the
    same policy."""
    folder = write_vision_language(tmp_path / "model", *FORMS[form])
    data = write_conversations(tmp_path / "data.jsonl", 8)
    reward = "def length(prompts, completions, **_):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    (tmp_path / "reward.py").write_text(reward)
    inputs = ["--model", str(folder), "--dataset", str(data), "--dataset_cache_dir", str(tmp_path / "cache")]
    batch = ("--per_device_train_batch_size", 4, "--num_generations", 4, "--max_completion_length", 6, "--max_steps", 3)
    rewards = ("--reward_funcs", f"{tmp_path / 'reward.py'}:length", "--rollout_backend", "transformers")
    run(inputs, tmp_path / "out", *batch, *rewards, "--lr", 1e-3, *LAYOUTS[ranks], ranks=ranks, task="grpo")
    lines = [line for line in read_lines(tmp_path / "out" / "metrics.jsonl") if "reward" in line]
    assert len(lines) == 3 and all(line["sampling/sampling_logp_difference/max"] < 2e-4 for line in lines)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_commands_about_data_need_no_processor(kind: str, tmp_path: Path) -> None:
    """`data show`, `data cache` and `data index`, where the folder has none or the task no images."""
    folder = write_vision_language(tmp_path / "model", kind, kind == "qwen3_5_moe")
    words = ["--model", str(folder), "--dataset", "rows.jsonl"]
    for task in ("sft", "pt"):
        options = load_config(task, words)
        assert tokenizer_or_processor_for(options.model, options.data, task)("1+2?")["input_ids"]
    (folder / "preprocessor_config.json").write_text("{}")
    options = load_config("sft", words)
    assert tokenizer_or_processor_for(options.model, options.data, "pt")("1+2?")["input_ids"]
    with pytest.raises(UserError, match="processor in"):
        tokenizer_or_processor_for(options.model, options.data, "sft")


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_families_with_gated_delta_nets_are_fitted(kind: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path / "m", kind)
    data = write_conversations(tmp_path / "data.jsonl", ROWS)
    words = f"--model {folder} --dataset {data} --output_dir {tmp_path / 'out'} --engine megatron"
    cfg = load_config("sft", f"{words} --fit true --device_memory 80GiB".split())
    preflight(cfg, 1)
    assert cfg.train.fit

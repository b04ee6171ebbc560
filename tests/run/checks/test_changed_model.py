"""Models that start with another rotary scaling or more tokens: transformers' own resizing and scaling are the oracle;
whole runs on both engines.

Covers: megaswift/bridge/hf/base_model.py, megaswift/models/rope_scaling.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megaswift.bridge.hf.base_model import write_changed_model_folder
from megaswift.bridge.weight_source import open_weights
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.models.family import read_config_json
from megaswift.models.rope_scaling import config_with_rope_scaling
from megaswift.run.checks.changed_model import changed_config_and_tokenizer
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import logits, write_inputs, write_model
from tests.trainers.runs import run

YARN = {"rope_type": "yarn", "factor": 4.0}
NEW = ["<tool>", "</tool>", "<plan>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def changed(model: Path, target: Path, **options: Any) -> Path:
    cfg = SwiftConfig(model=str(model), **options)
    config, tokenizer = changed_config_and_tokenizer(cfg, model)
    return write_changed_model_folder(model, target, config, tokenizer, True)


def test_new_tokens_are_transformers_resize(model: Path, tmp_path: Path) -> None:
    """Old rows to the bit, new ones but for the noise of transformers' draw; other files are copies."""
    listed = tmp_path / "more.txt"
    listed.write_text("</tool>\n\n<plan>\n")
    folder = changed(model, tmp_path / "grown", new_special_tokens=["<tool>", str(listed)])
    theirs, ours = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (model, folder))
    old = theirs.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(NEW, special_tokens=True)
    theirs.resize_token_embeddings(len(tokenizer))
    assert ours.config.vocab_size == len(tokenizer) == old + 3
    for name, want in theirs.state_dict().items():
        got = ours.state_dict()[name]
        assert torch.allclose(got, want, atol=2e-4) and torch.equal(got[:old], want[:old]), name
    written = AutoTokenizer.from_pretrained(folder)
    text = "1<tool>2</tool><plan>"
    assert written(text).input_ids == tokenizer(text).input_ids and written.chat_template == tokenizer.chat_template
    assert written.decode(written(text).input_ids, skip_special_tokens=True).replace(" ", "") == "12"
    assert not any((folder / n).samefile(model / n) for n in ("generation_config.json", "model.safetensors"))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    changed(model, folder, new_special_tokens=NEW)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before  # a resumed run finds it
    changed(model, folder, new_special_tokens=NEW[:1])
    assert AutoConfig.from_pretrained(folder).vocab_size == old + 1


def test_tokens_that_fit_change_no_weight(tmp_path: Path) -> None:
    """Of an embedding with spare rows."""
    model = write_model(tmp_path / "model")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    grown = changed(model, tmp_path / "a" / "m", new_special_tokens=NEW)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (grown / name).unlink()
        (grown / name).symlink_to(model / name)
    again = changed(grown, tmp_path / "b" / "m", new_special_tokens=NEW[:2])
    assert (again / "model.safetensors").samefile(grown / "model.safetensors") and len(
        AutoTokenizer.from_pretrained(again)
    ) == 47


def test_tied_embeddings_and_shards(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_model(tmp_path / "model")
    config = Qwen3Config.from_pretrained(tmp_path / "model", tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="12KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    folder = changed(tmp_path / "model", tmp_path / "grown", new_special_tokens=NEW)
    grown = AutoModelForCausalLM.from_pretrained(folder)
    assert grown.lm_head.weight is grown.model.embed_tokens.weight and grown.lm_head.weight.shape[0] == 48
    shards = [p for p in folder.glob("*.safetensors") if p.stat().st_nlink == 1]
    assert len(shards) == 1 < len(list(folder.glob("*.safetensors")))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = sum(t.nbytes for p in folder.glob("*.safetensors") for t in load_file(p).values())
    assert index["metadata"]["total_size"] == stored


@pytest.mark.parametrize(
    ("option", "max_length", "want"),
    [
        (json.dumps(YARN), 128, YARN | {"original_max_position_embeddings": 128}),
        ("linear", 300, {"rope_type": "linear", "factor": 3.0}),
        ("yarn", 512, YARN | {"original_max_position_embeddings": 128}),
        ('{"type": "dynamic", "factor": 2}', 128, {"rope_type": "dynamic", "factor": 2}),
        (
            '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, '
            '"original_max_position_embeddings": 32}',
            128,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_rope_scaling_is_transformers(
    option: str, max_length: int, want: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """The folder gives the logits of the same model with these parameters set by hand."""
    folder = changed(model, tmp_path / "scaled", rope_scaling=option, max_length=max_length)
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **want}
    if "original_max_position_embeddings" in want:
        config.max_position_embeddings = max(128, int(want["original_max_position_embeddings"] * want["factor"]))
    by_hand = AutoModelForCausalLM.from_pretrained(model, config=config)
    plain, ours = (AutoModelForCausalLM.from_pretrained(f) for f in (model, folder))
    assert torch.equal(logits(ours), logits(by_hand))
    assert want["rope_type"] == "dynamic" or not torch.equal(logits(ours), logits(plain))
    assert ours.config.max_position_embeddings == config.max_position_embeddings
    assert set(open_weights(folder).names()) == set(by_hand.state_dict())  # no file leads out of the folder
    spec = model_spec_for_task(SwiftConfig(model=str(model), rope_scaling=option, max_length=max_length), model)
    assert spec.rope.scaling is not None and spec.rope.scaling["rope_type"] == want["rope_type"]


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("yarn", "within the model's 128 positions"),
        ("yran", "must have a rope_type"),
        ("llama3", "llama3 needs its parameters"),
        ('{"rope_type": "yarn", "factor": 0}', "factor must be a number above 0"),
        ('{"rope_type"', "is not JSON"),
        ('{"factor": 4}', "must have a rope_type"),
    ],
)
def test_scalings_that_cannot_be(option: str, rule: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        config_with_rope_scaling(read_config_json(model), option, 128)


def test_layers_of_several_kinds_are_refused() -> None:
    raw = {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}
    with pytest.raises(ConfigError, match="different rotary embeddings"):
        config_with_rope_scaling(raw, json.dumps(YARN), 128)


def test_the_older_form_of_config_json_keeps_its_form() -> None:
    raw = {"rope_theta": 1e6, "rope_scaling": None, "max_position_embeddings": 4096}
    config = config_with_rope_scaling(raw, json.dumps(YARN), 128)
    assert config["rope_scaling"] == YARN | {"original_max_position_embeddings": 4096}
    assert (config["rope_theta"], config["max_position_embeddings"]) == (1e6, 16384) and "rope_parameters" not in config


def loss_by_transformers(folder: Path, rows: list[list[dict[str, str]]]) -> float:
    """Mean over the labels of the assistant's turns."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for messages in rows:
        ids = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = torch.tensor([ids["input_ids"]]), torch.tensor(ids["assistant_masks"])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        picked = -logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        total, count = total + float(picked[mask[1:] == 1].sum()), count + int(mask[1:].sum())
    return total / count


@pytest.mark.process
@pytest.mark.parametrize("engine", [("--tp", 2), pytest.param(("--engine", "fsdp2"), marks=pytest.mark.slow)])
def test_a_run_exports_the_model_that_it_trained(engine: tuple[str, object], tmp_path: Path) -> None:
    """The evaluation of the run is that of its export in transformers; tokens, rows and scaling are in it."""
    inputs = write_inputs(tmp_path)
    rows = [
        [{"role": "user", "content": f"<tool>{i}</tool>"}, {"role": "assistant", "content": f"<plan>{i + 1}"}]
        for i in range(8)
    ]
    data = tmp_path / "new.jsonl"
    data.write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    inputs[inputs.index("--dataset") + 1] = str(data)
    options = ("--val_dataset", data, "--max_steps", 2, "--report_to", "none", "--rope_scaling", json.dumps(YARN))
    out = tmp_path / "out"
    text = run(inputs, out, *options, "--new_special_tokens", *NEW, *engine)
    assert "3 new rows in the embedding" in text and "exceeds the model's" not in text
    assert read_lines(out / "eval.jsonl")[-1]["loss"] == pytest.approx(loss_by_transformers(out / "hf", rows), rel=1e-5)
    config = read_config_json(out / "hf")
    assert config["vocab_size"] == 48 and config["rope_parameters"]["rope_type"] == "yarn"
    assert load_file(out / "hf" / "model.safetensors")["lm_head.weight"].shape[0] == 48
    assert AutoTokenizer.from_pretrained(out / "hf")("<tool><plan>").input_ids == [45, 47]


@pytest.mark.process
@pytest.mark.slow
def test_adapters_belong_to_the_changed_model(tmp_path: Path) -> None:
    """Their folder names it, PEFT loads them there, and a resumed run finds it."""
    from peft import PeftModel

    inputs, out = write_inputs(tmp_path), tmp_path / "out"
    options = ("--train_type", "lora", "--modules_to_save", "embed_tokens", "lm_head", "--merge_lora", "true")
    options += ("--report_to", "none", "--rope_scaling", json.dumps(YARN), "--new_special_tokens", *NEW)  # type: ignore[assignment]
    run(inputs, out, *options, "--max_steps", 2)
    base = json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == (out / "base_model").resolve()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter").merge_and_unload()
    assert torch.allclose(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(out / "hf")), atol=1e-5)
    assert "finished at step 3" in run(inputs, out, *options, "--max_steps", 3, "--resume_from_checkpoint", "latest")

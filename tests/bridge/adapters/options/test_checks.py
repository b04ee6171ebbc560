"""Options of one adapter with another, and what cannot train over what, and where."""

from __future__ import annotations

import pytest

from megaswift.bridge.adapters.options.checks import ADAPTER_CLASHES, base_quantization_bits
from megaswift.bridge.adapters.options.methods import METHODS, OWNERS
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from tests.config.refusals import problems
from tests.config.test_sections import other_value

CLASHING = [
    "--init_weights eva --train_type lora",
    "--init_weights pisa --train_type lora",
    "--init_weights pissa --train_type lora --task rm",
    "--init_weights pissa --train_type lora --use_dora",
    "--init_weights loftq --train_type lora",
    "--train_type boft --engine megatron",
    "--train_type adalora --engine zero2",
    "--train_type vblora --engine fsdp2",
    "--train_type adalora --engine ddp --target_r 12",
    "--train_type boft --engine ddp --boft_block_num 4 --boft_block_size 8",
    "--quantization_bit 5 --train_type lora --engine ddp",
    "--quantization_bit 4",
    "--quantization_bit 8 --train_type qlora --engine ddp",
    "--quantization_bit 4 --train_type lora --engine megatron",
    "--train_type qlora --engine zero3",
    "--train_type hra --engine ddp --quantization_bit 8",
]


def test_contradictions() -> None:
    assert len(CLASHING) == len(ADAPTER_CLASHES)
    for words, clash in zip(CLASHING, ADAPTER_CLASHES, strict=True):
        found = problems(words.removesuffix(" --task rm"), "rm" if words.endswith("rm") else "sft")
        assert len(found) == 1 and any(name in found[0] for name in clash.options), (words, found)


@pytest.mark.parametrize("name", METHODS)
def test_options_that_a_method_lacks(name: str) -> None:
    """All that it takes is taken, each of the others is refused by name."""
    takes = METHODS[name].takes
    for option in ("lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_parameters", *OWNERS):
        value = 1 if option == "target_r" else 20 if option == "init_r" else other_value(option)
        if option in takes:
            assert SwiftConfig(engine="ddp", train_type=name, **{option: value}).value(option) == (
                tuple(value) if isinstance(value, list) else value
            )
        else:
            with pytest.raises(ConfigError) as error:
                SwiftConfig(engine="ddp", train_type=name, **{option: value})
            assert [p.what.split("=")[0] for p in error.value.problems] == [option]


def test_defaults_are_those_of_the_method_and_are_written_out() -> None:
    cfg = SwiftConfig(engine="ddp", train_type="vera")
    assert cfg.lora.lora_rank == 256 and SwiftConfig(engine="ddp", train_type="vera", lora_rank=16).lora.lora_rank == 16
    written = cfg.to_dict()
    assert (
        written["lora"]["lora_rank"] == 256 and "lora_alpha" not in written["lora"] and "init_r" not in written["peft"]
    )
    assert SwiftConfig.from_dict(written).lora.lora_rank == 256


def test_first_weights_of_adapters() -> None:
    """`true` says what happens anyway, in YAML and beside anything."""
    assert SwiftConfig(init_lora_weights=True).lora.init_weights == "true"
    assert SwiftConfig(train_type="lora", init_weights=False).lora.init_weights == "false"
    for words in ("--init_weights true", "--init_weights true --train_type lora --adapters a"):
        assert problems(words) == []
    assert problems("--init_weights pissa_niter_16 --train_type lora") == []
    assert problems("--init_weights loftq --train_type qlora") == []
    assert "applies only to --train_type lora or qlora" in problems("--init_weights pissa")[0]
    assert (
        "applies only to runs without --adapters" in problems("--init_weights pissa --train_type lora --adapters a")[0]
    )
    assert (
        "sft, pt and preference" in problems("--init_weights pissa --train_type lora --reward_funcs length", "grpo")[0]
    )


@pytest.mark.parametrize("kind", ["full", "road"])
def test_lora_plus_needs_lora(kind: str) -> None:
    engine = {} if kind == "full" else {"engine": "ddp"}
    with pytest.raises(ConfigError, match="applies only to --train_type lora or qlora"):
        SwiftConfig(train_type=kind, loraplus_lr_ratio=4, **engine)
    assert SwiftConfig(train_type="dora", loraplus_lr_ratio=4).optim.lorap_lr_ratio == 4


def test_variants_of_lora_are_switches() -> None:
    cfg = SwiftConfig(train_type="dora")
    assert (cfg.model.train_type, cfg.lora.use_dora, cfg.lora.use_rslora) == ("lora", True, False)
    assert SwiftConfig(tuner_type="rslora", engine="ddp").lora.use_rslora


def test_four_and_eight_bits() -> None:
    assert (
        base_quantization_bits(SwiftConfig(train_type="qlora", engine="ddp"))
        == 4
        == base_quantization_bits(SwiftConfig(train_type="qlora", quantization_bit=4))
    )
    assert base_quantization_bits(SwiftConfig(train_type="ia3", engine="ddp", quantization_bit=8)) == 8
    assert problems("--train_type qlora --bnb_4bit_quant_type fp4")[0].startswith(
        "--bnb_4bit_quant_type fp4: would be ignored"
    )
    assert problems("--train_type lora --bnb_4bit_use_double_quant --engine ddp")[0].startswith(
        "--bnb_4bit_use_double_quant"
    )
    assert problems("--train_type qlora --bnb_4bit_use_double_quant --engine ddp --bnb_4bit_compute_dtype bf16") == []


def test_several_mistakes_are_told_together() -> None:
    assert (
        len(problems("--train_type miss --lora_alpha 3 --use_dora --init_r 4 --quantization_bit 4 --engine zero3")) == 4
    )

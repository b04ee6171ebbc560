"""Damaged and dishonest files: headers that lie about bytes, indexes that lie about files, and random damage, which may
end in a message of ours or in weights that lie inside the file, in nothing else."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megaswift.bridge import HfSource, open_hf_weights
from megaswift.errors import WeightsError
from megaswift.families import load_spec
from tests.bridge.folders import index_of, opened, set_config, set_index
from tests.parity.models import VARIANTS, config

pytestmark = pytest.mark.wide

Fresh = Callable[[str], Path]
A, B = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]}


def with_header(folder: Path, header: Any, size: int = 20) -> Path:
    """A folder of one file with this header and `size` bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\1" * size)
    return folder


def told(folder: Path) -> str:
    with pytest.raises(WeightsError) as error:
        HfSource(folder)
    assert "model.safetensors" in str(error.value)
    return str(error.value)


HEADERS: list[tuple[str, Any, str]] = [
    ("overlap", {"a": A, "b": {**B, "data_offsets": [4, 16]}}, "overlaps tensor a"),
    ("the same bytes", {"a": A, "b": {**A}}, "overlaps tensor a"),
    ("gap", {"a": A, "b": {**B, "data_offsets": [12, 24]}}, "leaves a gap after tensor a"),
    ("gap at the start", {"b": B}, "tensor b, bytes 78 to 90, leaves a gap after the header"),
    (
        "out of the file",
        {"a": A, "b": {**B, "shape": [300], "data_offsets": [8, 1208]}},
        "for tensor b: it is truncated",
    ),
    ("negative", {"a": A, "b": {**B, "data_offsets": [-4, 8]}}, "tensor b: sizes and offsets must be whole numbers"),
    ("backwards", {"a": A, "b": {**B, "data_offsets": [20, 8]}}, "-12 bytes for tensor b"),
    ("fractions", {"a": A, "b": {**B, "shape": [3.0]}}, "tensor b: sizes and offsets"),
    ("truth", {"a": A, "b": {**B, "shape": [True]}}, "tensor b: sizes and offsets"),
    ("text", {"a": A, "b": {**B, "shape": "3"}}, "tensor b: sizes and offsets"),
    (
        "endless",
        {"a": A, "b": {**B, "shape": [2**40, 2**40, 0], "data_offsets": [8, 8]}},
        "tensor b: the shape",
    ),
    (
        "beyond 64 bits",
        {"a": A, "b": {**B, "shape": [2**70, 0], "data_offsets": [8, 8]}},
        "tensor b: sizes and offsets",
    ),
    ("no dtype", {"a": {**A, "dtype": 4}, "b": B}, "tensor a: sizes and offsets"),
    ("list", [1, 2], "its header is not a JSON object"),
    ("spaces first", b"  " + json.dumps({"a": A, "b": B}).encode(), "its header is not a JSON object"),
    ("notes", {"__metadata__": {"format": 1}, "a": A, "b": B}, "__metadata__ must map strings to strings"),
    ("surrogate", b'{"\\ud800":' + json.dumps(A).encode() + b"}", "damaged header at tensor \\ud800"),
    ("deep", b'{"a":' * 50_000, "is not a safetensors file"),
    ("long number", b'{"a":' + b"1" * 5000 + b"}", "is not a safetensors file"),
]


@pytest.mark.parametrize(("header", "message"), [r[1:] for r in HEADERS], ids=[r[0] for r in HEADERS])
def test_headers_that_do_not_match_the_file(header: Any, message: str, tmp_path: Path) -> None:
    assert message in told(with_header(tmp_path, header))


def test_the_honest_header_is_read(tmp_path: Path) -> None:
    source = HfSource(
        with_header(tmp_path, {"b": B, "a": A, "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]}})
    )
    assert {n: source.shape(n) for n in source.names()} == {"b": (3,), "a": (2,), "none": (0, 5)}
    assert source.slice("none").shape == (0, 5) and source.slice("a").view(torch.uint8).tolist() == [1] * 8


def test_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    source = HfSource(with_header(tmp_path, {"a": {**A, "dtype": "F6_E2M3"}}, 8))
    with pytest.raises(WeightsError, match=r"tensor a: has dtype F6_E2M3, which cannot be read"):
        source.slice("a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", "is not a file name"),
        ("x" * 5000, "is not a file name"),
        ("\ud800.safetensors", "is not a file name"),
        ("", "is missing"),
        (".", "is missing"),
        ("config.json", "truncated or not a safetensors file"),
    ],
)
def test_file_names_that_are_none(name: str, message: str, fresh: Fresh) -> None:
    folder = fresh("dense")
    set_index(folder, "model.norm.weight", name)
    with pytest.raises(WeightsError, match=message):
        HfSource(folder)


def test_a_ring_of_links(fresh: Fresh) -> None:
    folder = fresh("dense")
    set_index(folder, "model.norm.weight", "ring")
    (folder / "ring").symlink_to("ring")
    with pytest.raises(WeightsError, match=r"ring: (is not a file name|is missing)"):
        HfSource(folder)


def test_an_index_that_names_a_tensor_twice(fresh: Fresh) -> None:
    folder = fresh("dense")
    path = folder / "model.safetensors.index.json"
    shard = index_of(folder)["weight_map"]["model.norm.weight"]
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{ "model.norm.weight": "{shard}",'))
    with pytest.raises(WeightsError, match=r"index.json: has duplicate keys: model.norm.weight"):
        HfSource(folder)


def test_one_file_beside_shards(fresh: Fresh) -> None:
    """transformers would take the one file, we the shards."""
    folder = fresh("dense")
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has both model.safetensors"):
        HfSource(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2': is not a supported model family"),
        ({"model_type": "mamba"}, "--engine auto, ddp, zero2 or fsdp2, which train any language model"),
        ({"architectures": ["Qwen3ForQuestionAnswering"]}, "must contain Qwen3ForCausalLM"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
            "is not in this family's table",
        ),
    ],
)
def test_the_config_of_another_architecture(changes: dict[str, Any], message: str, fresh: Fresh) -> None:
    folder = fresh("dense")
    set_config(folder, **changes)
    with pytest.raises(WeightsError) as error:
        load_spec(folder)
    assert message in str(error.value) and "config.json" in str(error.value)


def test_a_whole_config_of_another_architecture(fresh: Fresh) -> None:
    """llama's own config.json beside qwen3's tensors: what llama has no place for is named with its file."""
    folder = fresh("dense")
    config("llama").save_pretrained(folder)
    set_config(folder, architectures=["LlamaForCausalLM"])
    assert VARIANTS["llama"][0] == "llama"
    with pytest.raises(WeightsError) as error:
        opened(folder)
    message = str(error.value)
    assert "self_attn.k_norm.weight: is not in the weight table of llama" in message and ".safetensors" in message


def damaged(good: bytes, draw: random.Random) -> bytes:
    """Bytes of the length, the header or (seldom) the tensors flipped, set, cut out, doubled; sometimes a number or a
    word replaced."""
    data = bytearray(good)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(min(len(data), header if draw.random() < 0.95 else len(data)) or 1)
        kind = draw.randrange(7)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.choice(b'0123456789-.eE{}[]",:\\n \x00\xff')
        elif kind == 2:
            del data[at : at + draw.randint(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randint(1, 20)]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            old, new = draw.choice(
                [
                    (b"F32", b"F16"),
                    (b"F32", b"I4"),
                    (b"[0,", b"[8,"),
                    (b"shape", b"shap"),
                    (b"8", b"9"),
                    (b"3", b"-3"),
                    (b"2", b"2.0"),
                    (b"4", b"99999999999999999999"),
                    (b'"', b'"\\u0000'),
                    (b":[", b":[[]"),
                ]
            )
            data = bytearray(data.replace(old, new, draw.randint(1, 2)))
        else:
            data += bytes(draw.randint(1, 8))
        if not data:
            return b""
    if draw.random() < 0.3 and len(data) > 8:  # some of them with a length that fits what the header has become
        end = data.find(b"}}")
        data[:8] = struct.pack("<Q", max(0, end + 2 - 8))
    return bytes(data)


def test_random_damage(tmp_path: Path) -> None:
    """What is accepted can be read to the last element, and the safetensors library accepts it too, with the same
    shapes."""
    draw, accepted = random.Random(11), 0
    path = tmp_path / "model.safetensors"
    save_file(
        {"a": torch.arange(8.0).reshape(2, 4), "b": torch.ones(3, dtype=torch.float16), "c": torch.zeros(())}, path
    )
    good = path.read_bytes()
    for n in range(1500):
        data = damaged(good, draw)
        path.write_bytes(data)
        try:
            source = open_hf_weights(tmp_path)
            read = {name: source.slice(name) for name in source.names()}
        except WeightsError as error:
            assert "model.safetensors" in str(error), n
            continue
        accepted += 1
        try:
            with safe_open(path, framework="pt") as library:
                assert set(library.keys()) == set(read), n
                for name, tensor in read.items():
                    theirs = library.get_tensor(name)
                    assert theirs.dtype == tensor.dtype and theirs.shape == tensor.shape, n
                    assert torch.equal(theirs.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), n
        except SafetensorError as error:
            pytest.fail(f"damage {n} is accepted here and refused by safetensors: {error}\n{data!r}")
    assert accepted > 5  # a changed name or value is no damage that anyone could see


def test_a_file_cut_after_it_was_opened(fresh: Fresh) -> None:
    folder = fresh("dense")
    source = HfSource(folder)
    name = "model.layers.3.mlp.up_proj.weight"
    file = source.file(name)
    with file.open("r+b") as opened_file:
        opened_file.truncate(200)
    with pytest.raises(WeightsError, match=f"tensor {name}: cannot be read"):
        source.slice(name)
    with pytest.raises(WeightsError, match=f"tensor {name}: cannot be read"):
        source.slice(name, (slice(0, 3), slice(1, 5)))

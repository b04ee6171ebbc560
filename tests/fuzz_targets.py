"""What is fuzzed: code that reads files and words from outside. `scripts/fuzz.py` and `tests/test_fuzz.py` run it.

A target is `(name, function(bytes) -> None)`. It returns, or raises one of our own errors; anything else is a finding.
`SEEDS` has good inputs of each target, which are mutated.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megaswift.bridge.adapters.folder import CONFIG, TENSORS, PeftFolder
from megaswift.bridge.hf.source import INDEX, SINGLE, HfSource
from megaswift.commands.migrate import main as migrate
from megaswift.config import load_config
from megaswift.data.encode.rows import encode_spec
from megaswift.data.preference.encode import row_encoder_for_task
from megaswift.data.sources.files import resolve_dataset_files, split_into_parts
from megaswift.data.templates.render import ChatRenderer, ChatTemplateTexts
from megaswift.data.tokenizer import load_tokenizer
from megaswift.data.untokenized_sample import RowError, checked_conversation_sample
from megaswift.errors import UserError
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.models.family import load_spec
from tests.data.makers import chat, config, tokenizer
from tests.parity.models import BASE, MOE

Target = Callable[[bytes], None]


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="megaswift-fuzz-"))


@cache
def _encoder(task: str) -> Any:
    cfg = config(_folder(), "unused", task, strict=False, per_device_train_batch_size=4)
    return row_encoder_for_task(encode_spec(cfg.data, tokenizer("qwen", "qwen3"), task))


def rows(name: str, task: str, data: bytes) -> None:
    """Rows of a file of this name, as a task reads them."""
    path = _folder() / name
    path.write_bytes(data)
    for part in split_into_parts(resolve_dataset_files(str(path), lambda *_: ()), 2):
        _encoder(task).encode_part(part)


def run_configuration(suffix: str, data: bytes) -> None:
    """A configuration file."""
    path = _folder() / f"run{suffix}"
    path.write_bytes(data)
    load_config("sft", [str(path)], environ={})


def migrated_file(suffix: str, data: bytes) -> None:
    """A script or file of another toolkit; what is written loads."""
    path, out = _folder() / f"theirs{suffix}", _folder() / "migrated"
    path.write_bytes(data)
    shutil.rmtree(out, ignore_errors=True)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        migrate([str(path), "--output_dir", str(out)])
    for file in out.glob("*.yaml"):
        try:
            load_config(None, [str(file)], environ={})
        except UserError as error:
            raise AssertionError(f"{file.read_text()}\n{error}") from None


def command_line(data: bytes) -> None:
    """Words, one a line."""
    load_config("sft", data.decode("utf-8", "surrogateescape").replace("\0", "").split("\n"), environ={})


def model_config(data: bytes) -> None:
    """config.json of a model."""
    folder = _folder() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    load_spec(folder)
    find_checkpoint(folder)


def tokenizer_file(name: str, data: bytes) -> None:
    """One of a tokenizer's files beside its others."""
    folder = _folder() / f"tokenizer-{name}"
    if not folder.exists():
        tokenizer("qwen", "qwen2_5").save_pretrained(folder)
    before = (folder / name).read_bytes() if (folder / name).exists() else None
    (folder / name).write_bytes(data)
    try:
        loaded = load_tokenizer(folder, False, "other files")
        cfg = config(_folder(), "unused")
        spec = encode_spec(cfg.data, loaded, "sft")
        row_encoder_for_task(spec)
    finally:
        (folder / name).unlink()
        if before is not None:
            (folder / name).write_bytes(before)


def chat_template(data: bytes) -> None:
    """A template, of a conversation with everything."""
    call = {"role": "assistant", "content": "c", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    turns = [{"role": "system", "content": "s"}, *chat("q", "a")["messages"], *chat("q", "a")["messages"][:1], call]
    renderer = ChatRenderer(
        ChatTemplateTexts({"default": data.decode("utf-8", "replace")}, {"eos_token": "</s>"}, ("</s>",))
    )
    with suppress(RowError):
        renderer.render(
            checked_conversation_sample(turns, "messages", tools=[{"type": "function", "function": {"name": "f"}}])
        )


def weights(name: str, data: bytes) -> None:
    """A shard, or the index of shards."""
    folder = _folder() / f"weights-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(SEEDS["safetensors"][0])
    (folder / name).write_bytes(data)
    source = HfSource(folder)
    try:
        for tensor in source.names():
            source.shape(tensor)
            source.slice(tensor)
    finally:
        source.close()


def adapter(name: str, data: bytes) -> None:
    """A file of an adapter's folder."""
    folder = _folder() / f"adapter-{name}"
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(SEEDS["adapter_config.json"][0])
    (folder / TENSORS).write_bytes(SEEDS["safetensors"][0])
    (folder / name).write_bytes(data)
    _ = PeftFolder(folder).settings


TARGETS: tuple[tuple[str, Target], ...] = (
    ("rows-sft", partial(rows, "sft.jsonl", "sft")),
    ("rows-dpo", partial(rows, "dpo.jsonl", "dpo")),
    ("rows-kto", partial(rows, "kto.jsonl", "kto")),
    ("rows-grpo", partial(rows, "grpo.jsonl", "grpo")),
    ("json-list", partial(rows, "list.json", "sft")),
    ("csv", partial(rows, "rows.csv", "sft")),
    ("parquet", partial(rows, "rows.parquet", "sft")),
    ("yaml", partial(run_configuration, ".yaml")),
    ("json-configuration", partial(run_configuration, ".json")),
    ("foreign-script", partial(migrated_file, ".sh")),
    ("foreign-yaml", partial(migrated_file, ".yaml")),
    ("command-line", command_line),
    ("config.json", model_config),
    ("tokenizer.json", partial(tokenizer_file, "tokenizer.json")),
    ("tokenizer_config.json", partial(tokenizer_file, "tokenizer_config.json")),
    ("special_tokens_map.json", partial(tokenizer_file, "special_tokens_map.json")),
    ("chat_template.jinja", partial(tokenizer_file, "chat_template.jinja")),
    ("chat-template", chat_template),
    ("safetensors", partial(weights, SINGLE)),
    ("index.json", partial(weights, INDEX)),
    ("adapter_config.json", partial(adapter, CONFIG)),
    ("adapter-tensors", partial(adapter, TENSORS)),
)


def _lines(*values: Any) -> bytes:
    return "\n".join(json.dumps(v) for v in values).encode()


def _csv() -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["query", "response", "history"], ["q", 'a "b", c\nd', '[["q", "a"]]'], ["q", "a", ""]])
    return out.getvalue().encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist([chat(f"hello {i}" * 9, f"answer {i}" * 9) for i in range(20)]), out, row_group_size=8
    )
    return out.getvalue()


def _safetensors() -> bytes:
    header = {
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(28)


def _tokenizer(name: str) -> bytes:
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    tokenizer("qwen", "qwen2_5").save_pretrained(folder)
    return (
        (folder / name).read_bytes()
        if (folder / name).exists()
        else b'{"eos_token": "<|im_end|>", "pad_token": {"content": "x"}}'
    )


_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "a", "reasoning_content": "t", "loss": True},
]
_RUN = {
    "model": "m",
    "dataset": ["d.jsonl"],
    "learning_rate": 1e-4,
    "train": {"max_steps": 3, "save_steps": 2},
    "columns": {"a": "b"},
}
_YAML = b"""model: m
dataset:
  - d.jsonl
data:
  max_length: 128
  columns: {a: query}
train:
  max_steps: 3
  lr: 1e-4
"""
_SCRIPT = b"""\
export A=1 B='two words'
ARGS=(--model ${M:-m} --dataset d.jsonl # c
  --lr 1e-4)
if [ -z "$X" ]; then N=$((1 + 2)); fi
NPROC_PER_NODE=$N swift sft "${ARGS[@]}" --output_dir o/$(date) \\
  --max_length 64 --warmup_ratio 0.1 > log 2>&1
cat <<EOF
$A
EOF
torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size 1 --lr 1e-3 --train-iters 3 --num-layers 2
"""
_FULL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 1e4, **BASE}
_SPARSE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
SEEDS: dict[str, tuple[bytes, ...]] = {
    "rows-sft": (
        _lines(chat("q", "a"), {"messages": _TURNS, "tools": _TOOLS}),
        _lines(
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'}]}
        ),
        _lines(
            {"query": "q", "response": "a", "history": [["q", "a"]]}, {"instruction": "i", "input": "", "output": "o"}
        ),
        _lines({"prompt": "p", "completion": "c"}, {"conversation": [{"human": "h", "assistant": "a"}]}),
    ),
    "rows-dpo": (
        _lines(
            {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0.5}, {**chat("q", "a"), "rejected_response": "b"}
        ),
        _lines(
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            }
        ),
    ),
    "rows-kto": (_lines({**chat("q", "a"), "label": True}, {"prompt": "p", "completion": "c", "label": 0}),),
    "rows-grpo": (
        _lines({"prompt": "p", "solution": {"a": [1]}}, {"prompt": _TURNS[:2], "n": 3}, {**chat("q", "a"), "x": 1}),
    ),
    "json-list": (
        json.dumps([chat("q", "a"), {"query": "q", "response": "a"}]).encode(),
        json.dumps({"data": [chat("q", "a")]}).encode(),
    ),
    "csv": (_csv(),),
    "parquet": (_parquet(),),
    "yaml": (_YAML,),
    "json-configuration": (json.dumps(_RUN).encode(),),
    "foreign-script": (_SCRIPT,),
    "foreign-yaml": (b"rlhf_type: dpo\nmodel: m\ntuner_type: lora\ndataset: [a, b]\nmax_length: 8\nbeta: 0.1\n",),
    "command-line": (
        b"--model\nm\n--dataset\nd.jsonl#5\n--learning_rate\n1e-4\n--tp\n2\n--columns\na=query\nb=response\n--max_steps=3",
    ),
    "config.json": (json.dumps(_FULL).encode(), json.dumps({**_FULL, **MOE, **_SPARSE}).encode()),
    "tokenizer.json": (_tokenizer("tokenizer.json"),),
    "tokenizer_config.json": (_tokenizer("tokenizer_config.json"),),
    "special_tokens_map.json": (_tokenizer("special_tokens_map.json"),),
    "chat_template.jinja": (_tokenizer("chat_template.jinja"),),
    "chat-template": (
        tokenizer("qwen", "qwen2_5").chat_template.encode(),
        b"{% for m in messages %}{% generation %}{{ m.role * 3 + m['content'] }}{{ eos_token }}{% endgeneration %}"
        b"{% endfor %}",
    ),
    "safetensors": (_safetensors(),),
    "index.json": (
        json.dumps(
            {"metadata": {"total_size": 28}, "weight_map": {"a.weight": "a.safetensors", "b": "a.safetensors"}}
        ).encode(),
    ),
    "adapter_config.json": (
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "alpha_pattern": {"q": 4},
                "rank_pattern": {},
                "lora_dropout": 0.1,
                "bias": "none",
                "target_modules": ["q_proj"],
            }
        ).encode(),
    ),
    "adapter-tensors": (_safetensors(),),
}
"""Good inputs by target."""

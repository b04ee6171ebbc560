"""Commands of `swift infer`, `deploy` and `export`, typed as they are.

Covers: tests/front_door/inference_commands.py.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megaswift import infer
from tests.front_door.commands import Command
from tests.front_door.count import MACHINE
from tests.front_door.inference_commands import inference_refusal
from tests.inference.models import PROMPTS, plain
from tests.inference.models import folder as model_folder

RUN = "output/vx-xxx/checkpoint-xxx"
ACCEPTED = {
    "chat with adapters": ("infer", f"--adapters {RUN} --stream true --temperature 0 --max_new_tokens 2048"),
    "a run's validation rows": (
        "infer",
        f"--adapters {RUN} --load_data_args true --infer_backend pt --max_batch_size 16 --max_new_tokens 256",
    ),
    "a full run": ("infer", f"--model {RUN} --stream true --load_data_args true --attn_impl flash_attn"),
    "rows over processes": (
        "infer",
        "NPROC_PER_NODE=4 --model Qwen/Qwen2.5-1.5B-Instruct --infer_backend transformers --val_dataset some/rows",
    ),
    "vLLM": (
        "infer",
        "NPROC_PER_NODE=4 --model Qwen/Qwen3-8B --infer_backend vllm --val_dataset some/rows#5000 other/rows#5000 "
        "--vllm_gpu_memory_utilization 0.9 --vllm_max_model_len 8192 --max_new_tokens 2048 --write_batch_size 1000 "
        "--result_path new.jsonl",
    ),
    "without a chain of thought": ("infer", "--model Qwen/Qwen3-8B --stream true --enable_thinking false"),
    "a reference document: a device map": (
        "infer",
        "--model_type qwen --model_id Qwen/Qwen-70B --device_map auto --offload_folder ./offload_cache",
    ),
    "a reference document: 4 bits": ("infer", "--model_id Qwen/Qwen-70B --quantization_bit 4 --device_map auto"),
    "a reference document: a map in JSON": (
        "infer",
        """--model Qwen/Qwen-14B --device_map '{"model.embed_tokens": "cpu", "model.layers": "cpu", "": "cpu"}'""",
    ),
    "a server": (
        "deploy",
        "--model Qwen/Qwen2.5-7B-Instruct --infer_backend vllm --vllm_gpu_memory_utilization 0.9 "
        "--vllm_max_model_len 8192 --max_new_tokens 2048 --served_model_name qwen --vllm_data_parallel_size 2",
    ),
    "adapters of a server": (
        "deploy",
        "--host 0.0.0.0 --port 8000 --api_key k --adapters lora1=swift/test_lora lora2=swift/test_lora2 "
        "--verbose false --log_interval 9",
    ),
    "a classifier": ("infer", "--adapters swift/test_bert"),
    "calibrated": (
        "export",
        "--model Qwen/Qwen3-8B --dataset a b --quant_method awq --quant_bits 4 --group_size 128 --quant_batch_size -1",
    ),
    "merged": ("export", f"--adapters {RUN} --merge_lora true"),
    "4 bits": (
        "export",
        "--model Qwen/Qwen2.5-1.5B-Instruct --quant_method bnb --quant_bits 4 --bnb_4bit_quant_type nf4 "
        "--bnb_4bit_use_double_quant true --output_dir Qwen2.5-1.5B-Instruct-BNB-NF4",
    ),
    "to Megatron": (
        "export",
        "NPROC_PER_NODE=4 --model Qwen/Qwen3-30B-A3B-Instruct-2507 --output_dir mcore --to_mcore true "
        "--tensor_model_parallel_size 2 --expert_model_parallel_size 2 --test_convert_precision true",
    ),
    "from Megatron": (
        "export",
        "--mcore_model Qwen3-30B-A3B-Instruct-2507-mcore --output_dir hf --to_hf true --tensor_model_parallel_size 2",
    ),
    "merged, from Megatron": (
        "export",
        f"--adapters megatron_{RUN} --to_hf true --merge_lora true --torch_dtype bfloat16 --output_dir merged",
    ),
}
"""Commands in the manner of the toolkits' examples and documents: name -> command, environment and options."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front-door")


def judged(task: str, text: str, root: Path) -> list[str]:
    words = shlex.split(text)
    environ = dict(word.split("=") for word in words if word.startswith("NPROC"))
    command = Command(text, 1, "swift", task, tuple(w for w in words if not w.startswith("NPROC")), environ)
    problems = [p for p in inference_refusal(command, root) if not MACHINE.search(p.rule)]
    return [f"{p.what}: {p.rule} | {p.fix}" for p in problems]


@pytest.mark.parametrize("name", ACCEPTED)
def test_typed_as_they_are(name: str, root: Path) -> None:
    assert judged(*ACCEPTED[name], root) == []


PLACED = ("a reference document: a map in JSON", "a reference document: a device map")


@pytest.mark.process
@pytest.mark.parametrize("name", PLACED)
def test_a_device_map_to_the_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document's command answers a file: the answers are transformers' own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in PROMPTS))
    changes = {"--model": str(model), "--model_id": str(model), "--model_type": "qwen3"}
    words = shlex.split(ACCEPTED[name][1])
    words = [changes.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    rows = ["--val_dataset", "questions.jsonl", "--result_path", "answers.jsonl", "--temperature", "0"]
    assert infer.main([*words, *rows, "--max_new_tokens", "12"]) == 0
    answers = [json.loads(line)["response"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer(f"<u>{text}<e><a>", add_special_tokens=False).input_ids for text in PROMPTS]
    assert answers == plain(AutoModelForCausalLM.from_pretrained(model), tokenizer, asked, 12, do_sample=False)
    assert any(answers) and "cpu" in capsys.readouterr().err


REFUSED = {
    "GPTQ": ("export", "--model Qwen/Qwen3-8B --quant_method gptq --quant_bits 4", ["needs calibration rows"]),
    "data ahead": ("export", "--model Qwen/Qwen3-8B --dataset a --to_cached_dataset true", ["--output_dir FOLDER"]),
    "SGLang": ("deploy", "--model Qwen/Qwen3-8B --infer_backend sglang --sglang_tp_size 2", ["SGLang", "sglang"]),
    "an open server": ("deploy", "--host 0.0.0.0 --model Qwen/Qwen3-8B", ["requires a token"]),
    "LMDeploy": ("deploy", "--model Qwen/Qwen3-8B --infer_backend lmdeploy", ["lmdeploy"]),
}
"""Commands that are refused: name -> command, options, and a part of each answer."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str, root: Path) -> None:
    task, text, answers = REFUSED[name]
    found = judged(task, text, root)
    assert len(found) == len(answers)
    assert all(any(part in problem for problem in found) for part in answers), found

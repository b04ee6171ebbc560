"""Whether other people's `infer`, `deploy` and `export` commands pass everything that happens before weights are read.

Owns the stand-ins for what their scripts had at that point: adapters, output directories of runs, merged folders.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from megaswift import deploy, export, infer, log
from megaswift.errors import Problem, UserError
from tests.front_door.commands import Command
from tests.front_door.tiny_models import tiny_model_folder

SERVING = {"infer": infer, "deploy": deploy, "export": export}
DATA = ("val_dataset", "dataset")
CLASSIFIER = re.compile("bert|seq_cls|reranker|reward|embedding", re.IGNORECASE)
"""Scripts about models that write no text."""
OF_RUN = re.compile(r"vx-xxx|^/your/|^output/|^megatron_output/|^swift/test_|-mcore$")
"""Names of folders that a run or an earlier command of a script has written."""
RUN = (
    "# The resolved configuration of this run, written by megaswift\nmodel: {}\ndataset: {}\nsplit_dataset_ratio: 0.1\n"
)


class ReachedWeights(Exception):
    """Everything before the weights has passed."""


def inference_refusal(command: Command, root: Path) -> list[Problem]:
    """What is wrong with a command; empty when it would read the weights, or start the server or the conversion."""
    words = [*_stand_ins(command, root)]
    (root / "out").exists() and (root / "out").rmdir()
    work = root / f"work-{abs(hash((command.file, command.line)))}"
    work.mkdir(exist_ok=True)
    before = Path.cwd()
    places = ((before / words[0]), before / "examples" / words[0]) if words else ()
    if words and words[0].endswith((".yaml", ".yml")):
        words[0] = str(next((p for p in places if p.is_file()), words[0]))

    def reached(*args: object, **kwargs: object) -> None:
        raise ReachedWeights

    loaders = ("inference.bitsandbytes_export", "inference.calibrated_export", "inference.pooling.model")
    for name in (*loaders, "inference.fp8_export", "run.course"):
        importlib.import_module(f"megaswift.{name}")  # what they import by name must not be a replacement
    os.chdir(work)
    names = ("NPROC_PER_NODE",)
    environ = {k: v for k, v in os.environ.items() if k not in names}
    environ |= {k: v for k, v in command.environ.items() if k in names}
    reader = "megaswift.inference.model.load_model_and_prompt_device"
    listening = mock.MagicMock()
    listening.getsockname.return_value = ("127.0.0.1", 8000)
    listening.__enter__.return_value = listening
    try:
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(log, "info"),
            mock.patch.object(log, "warn"),
            mock.patch(reader, reached),
            mock.patch("megaswift.inference.pooling.model.load_model_and_prompt_device", reached),
            mock.patch("megaswift.deploy._listening", return_value=listening),
            mock.patch("os.execve", reached),
            mock.patch("megaswift.launchers.torchrun_launcher.run_torchrun_with_restarts", reached),
            mock.patch("megaswift.bridge.adapters.merge.merge_adapter_folder_into_base", reached),
            mock.patch("megaswift.bridge.convert.to_megatron.hf_to_megatron", reached),
            mock.patch("megaswift.bridge.convert.to_hf.megatron_to_hf", reached),
            mock.patch("megaswift.inference.bitsandbytes_export.quantize_and_save_model", reached),
            mock.patch("megaswift.inference.fp8_export.export_fp8_folder", reached),
        ):
            SERVING[command.task].main(words)
    except UserError as error:
        return [*error.problems]
    except ReachedWeights:
        pass
    finally:
        os.chdir(before)
    return []


def _stand_ins(command: Command, root: Path) -> Iterable[str]:
    """The words with local models, adapters and data in place of the named ones."""
    name = ""
    for word in command.words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            yield word
        else:
            yield _stand_in(name, word, command, root)


def _stand_in(name: str, value: str, command: Command, root: Path) -> str:
    classifier = bool(CLASSIFIER.search(f"{command.file} {value}"))
    if name in ("model", "model_id", "mcore_model") and OF_RUN.search(value):
        return str(_run_folder(root, value, classifier, adapters=False))
    if name in ("model", "model_id"):
        folder = tiny_model_folder(value, root, reward=classifier)
        return str(folder) if folder else value
    if name in ("adapters", "mcore_adapter"):
        given, _, path = value.rpartition("=")
        return f"{given}=" * bool(given) + str(_run_folder(root, path, classifier, adapters=True))
    if name in DATA:
        count = value.partition("#")[2]
        return str(_rows(root)) + (f"#{count}" if count else "")
    return value


def _rows(root: Path) -> Path:
    """A data file of questions with answers."""
    file = root / "questions.jsonl"
    file.write_text('{"query": "What is the capital of France?", "response": "Paris."}\n' * 64)
    return file


def _run_folder(root: Path, value: str, classifier: bool, adapters: bool) -> Path:
    """The output directory of a run, with its export or with its adapters."""
    base = tiny_model_folder("Qwen2.5-7B-Instruct", root, reward=classifier and not adapters)
    out = root / f"run-{'adapters' if adapters else 'full'}-{'cls' if classifier else 'lm'}"
    if not out.exists():
        out.mkdir()
        (out / "config.yaml").write_text(RUN.format(base, _rows(root)))
        (out / "metrics.jsonl").touch()
        if adapters:
            (out / "adapter").mkdir()
            said = {"peft_type": "LORA", "task_type": "SEQ_CLS" if classifier else "CAUSAL_LM", "r": 8}
            said["base_model_name_or_path"] = str(base)
            (out / "adapter" / "adapter_config.json").write_text(json.dumps(said))
            (out / "adapter" / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        else:
            (out / "hf").symlink_to(base, target_is_directory=True)
    return out / "adapter" if adapters else out

"""The last lines of a run: commands that use what it wrote, as they should be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from megaswift.config import SwiftConfig
from megaswift.data.sources.files import cached_dataset_folder
from megaswift.options.tasks import CLASSIFIERS, RETRIEVAL
from megaswift.run.output import OutputFolder


def next_commands(cfg: SwiftConfig, outputs: OutputFolder, adapts: bool) -> list[str]:
    """Return the commands after a finished run: to ask its model, to merge or export it, to serve it.

    Args:
        cfg: The options of the run.
        outputs: Its folder. Only what exists there is named.
        adapts: Whether the run trained adapters.
    """
    trust = ["--trust_remote_code", "true"] if cfg.model.trust_remote_code else []
    asking = [
        *(["--system", cfg.data.system] if cfg.data.system else []),
        *trust,
    ]  # a chat does not take it from the run
    adapter = outputs.adapter
    hf = outputs.hf
    step = outputs.store.latest()
    if cfg.task == "rm":
        model = [str(cfg.model.model), "--reward_model", str(hf if hf.is_dir() else adapter)]
        prompts = cfg.data.dataset or ("PROMPTS",)  # the pairs have prompts, which other rows may replace
        return [_command("grpo", "--model", *model, "--dataset", *prompts, *trust)]
    if cfg.task in RETRIEVAL and hf.is_dir():
        return [_command("deploy", "--model", str(hf), *trust)]
    if cfg.task in CLASSIFIERS and hf.is_dir():
        rows = (name for name in (*cfg.data.val_dataset, *cfg.data.dataset) if cached_dataset_folder(name) is None)
        judged = _command("infer", "--model", str(hf), "--dataset", next(rows, "FILE"))
        return [judged, _command("deploy", "--model", str(hf))]
    if adapts and not hf.is_dir():
        merged = ["--merge_lora", "true", "--output_dir", _beside(outputs.root, "merged")]
        if cfg.task in RETRIEVAL:
            return [_command("export", "--adapters", str(adapter), *merged, *trust)]
        return [
            _command("infer", "--adapters", str(adapter), *asking),
            _command("export", "--adapters", str(adapter), *merged, *trust),
            _command("deploy", "--adapters", str(adapter), *trust),
        ]
    if hf.is_dir():
        smaller = ["--quant_method", "fp8", "--output_dir", _beside(outputs.root, "fp8")]
        return [
            _command("infer", "--model", str(hf), *_prompts(cfg, hf), *asking),
            _command("export", "--model", str(hf), *smaller, *trust),
            _command("deploy", "--model", str(hf), *trust),
        ]
    if step is None:
        return []
    return [
        _command("infer", "--model", str(step), *asking),
        _command("convert", "megatron-to-hf", str(step), _beside(outputs.root, "hf")),
        _command("deploy", "--model", str(step), *trust),
    ]


def _prompts(cfg: SwiftConfig, model: Path) -> list[str]:
    """Some rows of the data for a model that cannot chat, because its tokenizer has no template."""
    files = [name for name in cfg.data.dataset if Path(name).is_file()]
    if not files or (model / "chat_template.jinja").is_file() or _config_has_template(model):
        return []
    return ["--dataset", f"{files[0]}#3"]


def _config_has_template(model: Path) -> bool:
    try:
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(isinstance(config, dict) and config.get("chat_template"))


def _command(*words: str) -> str:
    return shlex.join(("megaswift", *words))


def _beside(root: Path, suffix: str) -> str:
    """A folder next to the run's, which does not exist yet."""
    folder = root.with_name(f"{root.name}-{suffix}")
    number = 2
    while folder.exists():
        folder = root.with_name(f"{root.name}-{suffix}-{number}")
        number += 1
    return str(folder)

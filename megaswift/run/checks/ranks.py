"""At the start all ranks must have the same program, options, model, data and kind of device, and see one output
directory: what differs is named with its ranks before anything is trained."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, Problem
from megaswift.version import __version__

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "tokenizers", "safetensors")
PER_NODE = frozenset({"dataset_cache_dir"})
"""Options that may differ between nodes."""
VISIBLE_SECONDS = 30.0
"""A network file system shows a new file on other nodes after some time."""
MODEL_FILES = ("config.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*_tokens*.json", "*template*")
"""What ranks must have alike of a model folder, beside its weights: shapes, and what rows become."""
FIXES = {
    "megaswift": "use the same version, or the same checkout, on all nodes",
    "options": "give every node the same command",
    "model": "give every node the same model folder",
    "data": "give every node the same data files",
    "device": "use nodes with the same kind of device",
}


def refuse_ranks_that_differ(facts: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank where a fact has another value on some rank. Collective. `facts`: the same names
    on every rank, short values."""
    everyone = distributed.all_gather_objects((socket.gethostname(), dict(facts)))
    problems = []
    for name in facts:
        groups: dict[str, list[int]] = {}
        for rank, (_, theirs) in enumerate(everyone):
            groups.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(groups) > 1:
            hosts = [host for host, _ in everyone]
            said = "; ".join(f"{value} on {rank_text(ranks, hosts)}" for value, ranks in groups.items())
            fix = FIXES.get("options" if name.startswith("--") else name, "install one version on all nodes")
            problems.append(Problem(name, f"differs between ranks: {said}", fix))
    if problems:
        raise ConfigError(problems)


def refuse_ranks_with_other_options(cfg: SwiftConfig) -> None:
    """Raise ConfigError on every rank, with the options that differ between ranks. Collective."""
    own = {name: json.dumps(value, sort_keys=True, default=str) for name, value in _options(cfg)}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(distributed.all_gather_objects(digest))) > 1:
        refuse_ranks_that_differ({f"--{name}": value[:80] for name, value in own.items()})


def program_and_device_facts(folder: Path, device: torch.device) -> dict[str, str]:
    """Collect versions, this package's source, the model's configuration and tokenizer, the kind of device."""
    facts = {"megaswift": f"{__version__}, source {package_source_digest()}"}
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    files = {file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}
    facts["model"] = _digest_of_files(folder, files) if files else "no config.json"
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return facts


def package_source_digest(folder: Path | None = None) -> str:
    """Return a hash of this package's own modules in 12 hexadecimal digits, because two checkouts may have one version.
    `folder`: that of another package."""
    root = Path(__file__).parents[2] if folder is None else folder
    return _digest_of_files(root, root.rglob("*.py"))


def _digest_of_files(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def refuse_unshared_output_folder(file: Path) -> None:
    """Raise ConfigError on every rank where some rank does not see `file` as rank 0 has just written it. Collective."""
    wanted = distributed.run_on_rank0(lambda: _digest(file))
    deadline = time.monotonic() + VISIBLE_SECONDS
    while (seen := _digest(file)) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    everyone = distributed.all_gather_objects((socket.gethostname(), seen == wanted))
    blind = [rank for rank, (_, same) in enumerate(everyone) if not same]
    if blind:
        hosts = [host for host, _ in everyone]
        rule = f"is not the same folder on every node: {rank_text(blind, hosts)} do not see what rank 0 writes"
        raise ConfigError(Problem(f"--output_dir {file.parent}", rule, "use a folder that all nodes share"))


def rank_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 3 (b)`, `ranks 0-3 (a)`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {text} ({names})"


def _options(cfg: SwiftConfig) -> list[tuple[str, Any]]:
    """All but those of the launch, which counts nodes."""
    made: list[tuple[str, Any]] = []
    for section, values in cfg.to_dict().items():
        if section != "launch":
            made += values.items() if isinstance(values, dict) else [(section, values)]
    return [(name, value) for name, value in made if name not in PER_NODE]


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""

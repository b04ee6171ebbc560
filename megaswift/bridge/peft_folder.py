"""PEFT's adapter folder: adapter_config.json and adapter_model.safetensors, read and written without PEFT.

Owns the two files' meaning: names with PEFT's prefix, ranks and scales by module, and what other kinds of adapters are refused.
Experts stand in it one by one, under the names that their weights have on disk; the stacked form that PEFT writes for transformers'
fused experts is taken apart when it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaswift.bridge.adapters import HALVES, MAGNITUDE, PREFIX, Adapter, AdapterPlan, AdapterSettings, Half, by_pattern
from megaswift.bridge.file_tensor import FileTensor, mapped
from megaswift.bridge.plan import SHOWN, WeightPlan
from megaswift.bridge.safetensors_header import DTYPES, Damaged, Stored, read_header
from megaswift.errors import CheckpointError, Problem, WeightsError
from megaswift.families.projections import WEIGHT, Projection, in_part, projections, without_dora

Read = Callable[[], Tensor]
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
REFUSED: Mapping[str, str] = {
    "lora_bias": "has biases", "fan_in_fan_out": "is for transposed layers",
    "layer_replication": "repeats layers of the model", "trainable_token_indices": "trains single embedding rows",
    "alora_invocation_tokens": "is switched on by tokens (aLoRA)", "use_qalora": "is QALoRA", "use_bdlora": "is BD-LoRA",
    "arrow_config": "routes between adapters (Arrow)", "kasa_config": "is KaSA", "velora_config": "is VeLoRA",
    "monteclora_config": "is MonteCLoRA",
}
"""Fields that change what is computed, where they are set, and what they mean."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's weights: PEFT saves such adapters against the changed base unless it converts them."""


class PeftFolder:
    """An adapter folder that was read: its settings, and its tensors by name without PEFT's prefix."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._unstacked: set[str] = set()
        self.config = self._config()
        problems = list(_unfit(self.directory, self.config))
        if problems:
            raise WeightsError(problems)
        try:
            header = read_header(self.directory / TENSORS)
        except (OSError, Damaged) as error:
            old = "; pickles (*.bin) are not read" if (self.directory / "adapter_model.bin").exists() else ""
            raise WeightsError(Problem(str(self.directory / TENSORS), f"cannot be read ({error}){old}", "save it as safetensors")) from None
        self._stored: dict[str, Stored] = {key.removeprefix(PREFIX): stored for key, stored in header.items()}

    def _config(self) -> dict[str, Any]:
        path = self.directory / CONFIG
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            fix = "a folder that PEFT or a run of ours wrote (OUT/adapter)"
            raise WeightsError(Problem(str(self.directory), f"has no {CONFIG}", fix)) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise WeightsError(Problem(str(path), f"cannot be read: {error}")) from None
        if not isinstance(found, dict):
            raise WeightsError(Problem(str(path), "is no JSON object"))
        return found

    @property
    def settings(self) -> AdapterSettings:
        """Rank and scale; ranks of single modules come with `plan`."""
        c = self.config
        alphas = {k: float(v) for k, v in (c.get("alpha_pattern") or {}).items()}
        rank, alpha, dropout = int(c.get("r", 8)), float(c.get("lora_alpha", 8)), float(c.get("lora_dropout", 0.0))
        return AdapterSettings(rank, alpha, bool(c.get("use_rslora")), dropout, bool(c.get("use_dora")), alphas=alphas)

    def plan(self, weights: WeightPlan) -> AdapterPlan:
        """The adapters of the folder on this model; a WeightsError names every tensor that does not fit it."""
        known = {p.module: p for p in projections(weights.family, weights.spec)}
        tensors = self._tensors(known)
        chosen, ranks, saved, problems = [], {}, [], []
        for module, projection in known.items():
            halves = [f"{module}.lora_{half}.weight" for half in HALVES] + [module + MAGNITUDE] * self.settings.dora
            if not any(name in tensors for name in halves):
                continue
            chosen.append(projection)
            shapes = [tuple(tensors.pop(name)().shape) if name in tensors else None for name in halves]
            ranks[module] = shapes[0][0] if shapes[0] else 0
            out, width = projection.shape
            wanted = [(ranks[module], width), (out, ranks[module]), (out,)][: len(halves)]
            problems += [self._wrong(name, s, w) for name, s, w in zip(halves, shapes, wanted, strict=True) if s != w]
        for name, read in tensors.items():
            if name not in weights.hf_shapes:
                what = f"{self.directory}, tensor {name}"
                problems.append(Problem(what, "belongs to no layer of this model that can carry it", "an adapter of this model"))
            elif (shape := tuple(read().shape)) != weights.hf_shapes[name]:
                problems.append(self._wrong(name, shape, weights.hf_shapes[name]))
            saved.append(name)
        problems += in_part(weights.family, weights.spec, saved)
        problems += without_dora(chosen, f"{self.directory / CONFIG}, use_dora") if self.settings.dora else []
        if problems:
            raise WeightsError(problems[:SHOWN])
        return AdapterPlan(weights, chosen, self._with_ranks(ranks), saved)

    def _wrong(self, name: str, shape: tuple[int, ...] | None, wanted: tuple[int, ...]) -> Problem:
        rule = "is missing" if shape is None else f"has shape {list(shape)}, this model needs {list(wanted)}"
        return Problem(f"{self.directory}, tensor {name}", rule)

    def _with_ranks(self, ranks: Mapping[str, int]) -> AdapterSettings:
        """What differs from module to module. PEFT's patterns name a stack by its parameter, not by the experts in it."""
        s = self.settings
        alphas = {m: alpha for m in self._unstacked if (alpha := by_pattern(s.alphas, _stack_of(m), s.alpha)) != s.alpha}
        return replace(s, ranks={m: r for m, r in ranks.items() if r != s.rank}, alphas={**s.alphas, **alphas})

    def _tensors(self, known: Mapping[str, Projection]) -> dict[str, Read]:
        """How to read each tensor; stacks of experts taken apart."""
        found: dict[str, Read] = {name: partial(self._read, name) for name in self._stored}
        stacks = sorted({name.rsplit(".lora_", 1)[0] for name in found if ".experts.lora_" in name or ".experts.base_layer.lora_" in name})
        apart: dict[str, Read] = {}
        for stack in stacks:
            a, b = (found.pop(f"{stack}.lora_{half}.weight") for half in HALVES)
            apart.update(_unstack(stack.removesuffix(".base_layer"), a, b, known))
        self._unstacked = {name.rsplit(".lora_", 1)[0] for name in apart}
        return {**found, **apart}

    def _read(self, name: str) -> Tensor:
        """The tensor over a mapping of its own: one of the whole file would count as this process's memory until the end."""
        stored, what = self._stored[name], f"{self.directory / TENSORS}, tensor {name}"
        if stored.dtype not in DTYPES:
            raise WeightsError(Problem(what, f"has dtype {stored.dtype}, which cannot be read"))
        try:
            return mapped(FileTensor(self.directory / TENSORS, stored.start, DTYPES[stored.dtype], stored.shape))
        except OSError as error:
            raise WeightsError(Problem(what, f"cannot be read: {error}")) from None

    def read(self, plan: AdapterPlan) -> Mapping[str, Tensor]:
        """All tensors of the plan by name, and of the modules that are saved whole; each is read when it is asked for."""
        return Tensors(self._tensors({a.module: a.projection for a in plan.adapters}))


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, read from their file at each use."""

    def __init__(self, readers: Mapping[str, Read]) -> None:
        self.readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self.readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def _stack_of(module: str) -> str:
    """`mlp.experts.3.up_proj` to the parameter that PEFT's patterns name: `mlp.experts.gate_up_proj`."""
    experts, _, leaf = module.rpartition(".")
    return f"{experts.rpartition('.')[0]}.{'down_proj' if leaf in ('down_proj', 'w2') else 'gate_up_proj'}"


def _unstack(experts: str, a: Read, b: Read, known: Mapping[str, Projection]) -> Iterator[tuple[str, Read]]:
    """A [E x r, in] (expert by expert) and B [out, r x E] (rank by rank) of fused experts to one A and B for each expert's module.

    Gate and up share A in this form: both get a copy. A layout of PEFT's `ParamWrapper`.
    """
    modules = {m: p for m, p in known.items() if m.startswith(_disk(experts, known) + ".")}
    count = 1 + max((int(m.split(".")[-2]) for m in modules), default=0)
    out, width = b().shape[0], a().shape[1]
    for module, projection in modules.items():
        expert, down = int(module.split(".")[-2]), projection.megatron.endswith("linear_fc2")
        if down == (projection.shape == (out, width)):
            rows = slice(projection.source * projection.shape[0], (projection.source + 1) * projection.shape[0])
            yield f"{module}.lora_A.weight", partial(_of_experts, a, (count, -1, width), (expert,))
            yield f"{module}.lora_B.weight", partial(_of_experts, b, (out, -1, count), (rows, slice(None), expert))


def _of_experts(read: Read, shape: tuple[int, ...], where: tuple[int | slice, ...]) -> Tensor:
    return read().view(shape)[where]


def _disk(experts: str, known: Mapping[str, Projection]) -> str:
    """transformers calls Mixtral's block `mlp` in memory and `block_sparse_moe` on disk."""
    other = experts.replace(".mlp.", ".block_sparse_moe.")
    return experts if any(m.startswith(experts + ".") for m in known) else other


def _unfit(directory: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    path = str(directory / CONFIG)
    if config.get("peft_type") != "LORA":
        yield Problem(path, f"peft_type is {config.get('peft_type')}; LORA is what can be read", "a LoRA adapter")
    yield from (Problem(path, f"{name} {config[name]}: {why}, which is not supported") for name, why in REFUSED.items() if config.get(name))
    if config.get("bias", "none") != "none":
        yield Problem(path, f"bias {config['bias']} trains biases, which is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        yield Problem(path, f"init_lora_weights {start} changed the base model's weights, so the adapter does not fit the model's folder",
                      "save it with PEFT's path_initial_model_for_weight_conversion")


def config_of(plan: AdapterPlan, base: str) -> dict[str, Any]:
    """adapter_config.json, with every module that PEFT has to find."""
    s = plan.settings
    whole = [name.removesuffix(WEIGHT) for name in plan.saved if name.endswith(WEIGHT)]
    alpha = int(s.alpha) if float(s.alpha).is_integer() else s.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": None, "inference_mode": True,
        "r": s.rank, "lora_alpha": alpha, "lora_dropout": s.dropout, "use_rslora": s.rslora, "use_dora": s.dora, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "target_modules": _targets(plan), "modules_to_save": whole or None,
        "rank_pattern": dict(s.ranks), "alpha_pattern": dict(s.alphas),
    }


def _targets(plan: AdapterPlan) -> list[str]:
    """Last names of modules where they say exactly which, else whole names."""
    leaves = {a.projection.leaf for a in plan.adapters}
    alike = {p.module for p in projections(plan.plan.family, plan.plan.spec) if p.leaf in leaves}
    return sorted(leaves if alike == set(plan.by_module) else plan.by_module)


def write_adapter(directory: Path, plan: AdapterPlan, tensors: Iterable[tuple[str, Tensor]], base: str) -> Path:
    """The folder, each file whole or not there. On one rank."""
    found = {PREFIX + name: tensor.contiguous() for name, tensor in tensors}
    wanted = {PREFIX + name for name in plan.shapes()}
    assert found.keys() == wanted, f"adapter tensors differ from the plan: {sorted(found.keys() ^ wanted)[:4]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(found, directory / f".{TENSORS}.writing", metadata={"format": "pt"})
        text = json.dumps(config_of(plan, base), indent=2, sort_keys=True) + "\n"
        (directory / f".{CONFIG}.writing").write_text(text, encoding="utf-8")
        for name in (TENSORS, CONFIG):
            with (directory / f".{name}.writing").open("rb") as file:
                os.fsync(file.fileno())
            (directory / f".{name}.writing").rename(directory / name)
    except OSError as error:
        raise CheckpointError(Problem(str(directory), f"cannot be written: {error}")) from None
    return directory


def adapter_values(source: Mapping[str, Tensor]) -> Any:
    """What `RankAdapters.fill` asks for, from tensors by name."""
    def value(adapter: Adapter, half: Half) -> Tensor:
        return source[adapter.name(half)].to(torch.float32)

    return value

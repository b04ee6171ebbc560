"""PEFT's adapter folder: adapter_config.json and adapter_model.safetensors, read and written without PEFT.

Owns the two files' meaning: names with PEFT's prefix, ranks and scales by module, and what other kinds of adapters are
refused. Experts stand in it as their weights do on disk: one by one, or stacked where they share a parameter (gpt_oss).
The stacked form that PEFT writes for transformers' fused experts is taken apart when it is read (`expert_stacks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaswift.base.atomic_writes import atomic_file, safetensors_errors_as_oserror
from megaswift.base.plain_files import read_plain_file, refuse_links_outside
from megaswift.bridge.adapters.expert_stacks import (
    TensorReader,
    module_names_of_stacked_expert_lora_keys,
    per_expert_lora_readers,
    target_parameter_of_expert_module,
)
from megaswift.bridge.adapters.plan import (
    HALVES,
    MAGNITUDE,
    PREFIX,
    AdapterHyperparameters,
    AdapterPlan,
    Half,
    ModuleAdapterSpec,
    pattern_value_for_module,
)
from megaswift.bridge.adapters.targets import alphas_of_modules, targeted_modules, targets_of_plan
from megaswift.bridge.file_tensor import FileTensor, mapped_tensor
from megaswift.bridge.hf.header import DTYPES, DamagedHeader, HeaderEntry, read_safetensors_header
from megaswift.bridge.hf.stored_names import EMBEDDING, OUTPUT
from megaswift.bridge.plan import SHOWN, WeightPlan
from megaswift.errors import CheckpointError, Problem, WeightsError
from megaswift.folders.adapter import (
    CONFIG,
    TASK_TYPES,
    TENSORS,
    resized_vocabulary_problem,
)
from megaswift.folders.saved_steps import refuse_damaged_part
from megaswift.models.spec import NO_HEAD
from megaswift.models.targets import (
    WEIGHT,
    Projection,
    dora_problems,
    partial_fused_modules_to_save_problems,
    projections,
)

REFUSED: Mapping[str, str] = {
    "lora_bias": "has biases",
    "fan_in_fan_out": "is for transposed layers",
    "layer_replication": "repeats layers of the model",
    "trainable_token_indices": "trains single embedding rows",
    "alora_invocation_tokens": "is activated by tokens (aLoRA)",
    "use_qalora": "is QALoRA",
    "use_bdlora": "is BD-LoRA",
    "arrow_config": "routes between adapters (Arrow)",
    "kasa_config": "is KaSA",
    "velora_config": "is VeLoRA",
    "monteclora_config": "is MonteCLoRA",
}
"""Fields that change what is computed, where they are set, and what they mean."""
ADAPTER_TENSOR = re.compile(
    r"(?P<module>.+?)(\.base_layer)*\.(lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.weight)"
)
"""Names of tensors of an adapter, without PEFT's prefix."""
MERGE_FIRST = (
    "merge it into the model first (megaswift convert merge-lora BASE ADAPTER MERGED), then use the result; "
    "or train with --engine ddp, where PEFT applies it"
)
WHOLE = "use the folder as PEFT wrote it, or take the module out of the targets"
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base model's weights: PEFT saves such adapters against the changed base unless it
converts them."""

BODY = "model."
"""Before the names of a model's modules, where the model has a head; PEFT leaves it out where there is none."""


class PeftFolder:
    """An adapter folder that was read: its settings, and its tensors by name without PEFT's prefix."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        refuse_damaged_part(self.directory)
        refuse_links_outside(self.directory, [self.directory / CONFIG, self.directory / TENSORS])
        self._unstacked: set[str] = set()
        self.config = self._config()
        problems = list(_unfit(self.directory, self.config))
        if problems:
            raise WeightsError(problems)
        try:
            header = read_safetensors_header(self.directory / TENSORS)
        except (OSError, DamagedHeader) as error:
            old = "; pickles (*.bin) are not read" if (self.directory / "adapter_model.bin").exists() else ""
            raise WeightsError(
                Problem(str(self.directory / TENSORS), f"cannot be read ({error}){old}", "save it as safetensors")
            ) from None
        self._stored: dict[str, HeaderEntry] = {key.removeprefix(PREFIX): stored for key, stored in header.items()}
        self._headless = self.config.get("task_type") == TASK_TYPES[NO_HEAD]
        """Whether the names lack the prefix that a model with a head has."""
        if self._headless:
            self._stored = {BODY + name.removeprefix(BODY): stored for name, stored in self._stored.items()}

    def _config(self) -> dict[str, Any]:
        path = self.directory / CONFIG
        try:
            values = json.loads(read_plain_file(path).decode("utf-8"))
        except FileNotFoundError:
            fix = "give a folder written by PEFT or by a megaswift run (OUT/adapter)"
            raise WeightsError(Problem(str(self.directory), f"has no {CONFIG}", fix)) from None
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(Problem(str(path), f"cannot be read: {error}")) from None
        if not isinstance(values, dict):
            raise WeightsError(Problem(str(path), "is not a JSON object"))
        return values

    @property
    def settings(self) -> AdapterHyperparameters:
        """Rank and scale; ranks of single modules come with `plan`."""
        c = self.config
        alphas = {k: float(v) for k, v in (c.get("alpha_pattern") or {}).items()}
        rank = int(c.get("r", 8))
        alpha = float(c.get("lora_alpha", 8))
        dropout = float(c.get("lora_dropout", 0.0))
        return AdapterHyperparameters(
            rank, alpha, bool(c.get("use_rslora")), dropout, bool(c.get("use_dora")), alphas=alphas
        )

    def trains(self, tensor: str) -> bool:
        """Return whether `modules_to_save` names the module of a tensor: PEFT compares the ends of names. Other whole
        tensors are embeddings that were saved as they were."""
        module = tensor.rpartition(".")[0]
        return any(module.endswith(name) for name in self.config.get("modules_to_save") or ())

    def separates_tied_embeddings(self) -> bool:
        """Return whether the folder makes the input and output embeddings of a tied model different: PEFT trains a copy
        of the one that `modules_to_save` names, unless `ensure_weight_tying` stores both alike."""
        stored = [name for name in (EMBEDDING, OUTPUT) if name in self._stored]
        if len(stored) == 2 and torch.equal(self._read(EMBEDDING), self._read(OUTPUT)):
            return False
        return any(map(self.trains, stored))

    def unsupported_modules(self, weights: WeightPlan) -> list[str]:
        """Return the modules of this model with adapters that are not supported: the embedding, the output layer,
        routers."""
        known = {p.module for p in projections(weights.family, weights.spec)}
        modules = dict.fromkeys(match["module"] for name in self._stored if (match := ADAPTER_TENSOR.match(name)))
        own = {*weights.hf_shapes, OUTPUT}
        return [
            module
            for module in modules
            if module not in known and {module + WEIGHT, module.replace(".mlp.", ".block_sparse_moe.") + WEIGHT} & own
        ]

    def _unsupported_problems(self, weights: WeightPlan, training: bool) -> Iterator[Problem]:
        """Yields a problem for each part of the adapter that PEFT supports and this model, or training, does not."""
        spec = weights.spec
        for module in self.unsupported_modules(weights):
            rule = f"has an adapter on {module}; adapters are supported in attention, MLPs and experts only"
            yield Problem(str(self.directory), rule, MERGE_FIRST)
        stored = [name for name in self._stored if name in (*weights.hf_shapes, OUTPUT)]
        for name in (EMBEDDING, OUTPUT) if spec.tied else ():
            if name in self._stored and (training or self.separates_tied_embeddings()):
                rule = "belongs to tied embeddings, of which PEFT trains a copy: the model would no longer be tied"
                yield Problem(f"{self.directory}, tensor {name}", rule, MERGE_FIRST)
        for name in stored if training else ():
            if not self.trains(name) and not spec.tied:
                rule = "is stored without being trained (it is in no modules_to_save)"
                yield Problem(f"{self.directory}, tensor {name}", rule, MERGE_FIRST)

    def plan(self, weights: WeightPlan, training: bool = False) -> AdapterPlan:
        """Plan the adapters of the folder on this model; a WeightsError names every tensor that does not fit it.

        Args:
            weights: The model's.
            training: Whether they go on training: whole tensors train then too.
        """
        # What the folder stores, and which modules adapter_config.json leads one to expect.
        by_module = {p.module: p for p in projections(weights.family, weights.spec)}
        tensors = self._tensors(by_module)
        chosen: list[Projection] = []
        ranks: dict[str, int] = {}
        saved: list[str] = []
        problems = list(self._unsupported_problems(weights, training))
        unsupported = self.unsupported_modules(weights)
        stored = {name.rsplit(".lora_", 1)[0] for name in tensors} & by_module.keys()
        expected = set(targeted_modules(self.config, by_module, stored))
        missing: list[Problem] = []
        # Take the adapters out of `tensors`, module by module, and check their shapes.
        for module, projection in by_module.items():
            halves = [f"{module}.lora_{half}.weight" for half in HALVES]
            if self.settings.dora:
                halves.append(module + MAGNITUDE)
            if not any(name in tensors for name in halves):
                if module in expected:
                    rule = "is missing: adapter_config.json names the module in target_modules or target_parameters"
                    missing.append(Problem(f"{self.directory}, tensor {halves[0]}", rule, WHOLE))
                continue
            chosen.append(projection)
            shapes = [tuple(tensors.pop(name)().shape) if name in tensors else None for name in halves]
            ranks[module] = shapes[0][0] if shapes[0] else 0
            out, width = projection.shape
            needed = [(ranks[module], width), (out, ranks[module]), (out,)][: len(halves)]
            problems += [self._wrong(name, s, w) for name, s, w in zip(halves, shapes, needed, strict=True) if s != w]
        # What remains are whole tensors (modules_to_save). A tied output layer is the embedding.
        if weights.spec.tied and OUTPUT in tensors:
            head = tensors.pop(OUTPUT)
            tensors.setdefault(EMBEDDING, head)
        for name, read in tensors.items():
            if any(name.startswith(module + ".") for module in unsupported):
                continue
            if name not in weights.hf_shapes:
                what = f"{self.directory}, tensor {name}"
                problems.append(
                    Problem(
                        what,
                        "does not match a layer of this model that can have adapters",
                        "use an adapter of this model",
                    )
                )
            elif (shape := tuple(read().shape)) != weights.hf_shapes[name]:
                problems.append(self._wrong(name, shape, weights.hf_shapes[name]))
            saved.append(name)
        # Checks that need all modules.
        problems += partial_fused_modules_to_save_problems(weights.family, weights.spec, saved)
        problems += dora_problems(chosen, f"{self.directory / CONFIG}, use_dora") if self.settings.dora else []
        if problems or missing:
            raise WeightsError([*problems, *missing][:SHOWN])
        return AdapterPlan(weights, chosen, self._with_ranks(ranks), saved)

    def _wrong(self, name: str, shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> Problem:
        if name in (EMBEDDING, OUTPUT) and shape is not None and shape[1:] == expected[1:]:
            return resized_vocabulary_problem(str(self.directory), shape[0], expected[0])
        rule = "is missing" if shape is None else f"has shape {list(shape)}, this model needs {list(expected)}"
        return Problem(f"{self.directory}, tensor {name}", rule)

    def _with_ranks(self, ranks: Mapping[str, int]) -> AdapterHyperparameters:
        """Return the settings with the ranks and alphas of single modules. PEFT's patterns name a stack by its
        parameter, not by the experts in it."""
        s = self.settings
        own = {m: rank for m, rank in ranks.items() if m not in self._unstacked}
        alphas = alphas_of_modules(s.alphas, s.alpha, own, s.rslora)
        for module in self._unstacked:
            alphas[module] = pattern_value_for_module(s.alphas, target_parameter_of_expert_module(module), s.alpha)
        return replace(s, ranks={m: r for m, r in ranks.items() if r != s.rank}, alphas=alphas)

    def _tensors(self, by_module: Mapping[str, Projection]) -> dict[str, TensorReader]:
        """How to read each tensor; stacks of experts taken apart."""
        readers: dict[str, TensorReader] = {name: partial(self._read, name) for name in self._stored}
        apart: dict[str, TensorReader] = {}
        for stack in module_names_of_stacked_expert_lora_keys(readers):
            names = [f"{stack}.lora_{half}.weight" for half in HALVES]
            if all(name in readers for name in names):
                experts = dict(per_expert_lora_readers(stack, readers[names[0]], readers[names[1]], by_module))
                readers = {name: read for name, read in readers.items() if not experts or name not in names}
                apart.update(experts)
        self._unstacked = {name.rsplit(".lora_", 1)[0] for name in apart}
        return {**readers, **apart}

    def _read(self, name: str) -> Tensor:
        """The tensor over a mapping of its own: one of the whole file would count as this process's memory until the
        end."""
        stored = self._stored[name]
        what = f"{self.directory / TENSORS}, tensor {name}"
        if stored.dtype not in DTYPES:
            raise WeightsError(Problem(what, f"has dtype {stored.dtype}, which cannot be read"))
        try:
            return mapped_tensor(FileTensor(self.directory / TENSORS, stored.start, DTYPES[stored.dtype], stored.shape))
        except OSError as error:
            raise WeightsError(Problem(what, f"cannot be read: {error}")) from None

    def read(self, plan: AdapterPlan) -> Mapping[str, Tensor]:
        """Return all tensors of the plan and of the modules that are saved whole, by name; each is read when it is
        needed."""
        tensors = self._tensors({a.module: a.projection for a in plan.adapters})
        if EMBEDDING in plan.saved and EMBEDDING not in tensors:  # of a tied model, saved under its other name
            tensors[EMBEDDING] = tensors[OUTPUT]
        return LazyTensors(tensors)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read from their file at each use."""

    def __init__(self, readers: Mapping[str, TensorReader]) -> None:
        self.readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self.readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def _number(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < 2**31


def _mistyped(path: str, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields of the settings whose value has another type."""
    rank = config.get("r", 8)
    if not (isinstance(rank, int) and _number(rank, 1)):
        yield Problem(path, f"r {rank!r:.60} must be a whole number")
    for name in ("lora_alpha", "lora_dropout"):
        value = config.get(name, 0)
        if not _number(value, 0):
            yield Problem(path, f"{name} {value!r:.60} must be a number")
    for name in ("alpha_pattern", "rank_pattern"):
        value = config.get(name) or {}
        if not (isinstance(value, dict) and all(_number(v, 0) for v in value.values())):
            yield Problem(path, f"{name} {value!r:.60} must map names of modules to numbers")


def _unfit(directory: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    path = str(directory / CONFIG)
    yield from _mistyped(path, config)
    if config.get("peft_type") != "LORA":
        yield Problem(path, f"peft_type is {config.get('peft_type')}; only LORA is supported", "use a LoRA adapter")
    yield from (
        Problem(path, f"{name} {config[name]}: {why}, which is not supported")
        for name, why in REFUSED.items()
        if config.get(name)
    )
    if config.get("bias", "none") != "none":
        yield Problem(path, f"bias {config['bias']} trains biases, which is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        yield Problem(
            path,
            (
                f"init_lora_weights {start} changed the base model's weights, so the adapter does not fit the model's "
                f"folder"
            ),
            "save it with PEFT's path_initial_model_for_weight_conversion",
        )


def peft_adapter_config_json(plan: AdapterPlan, base: str) -> dict[str, Any]:
    """Return adapter_config.json, with every module and parameter that PEFT has to find.

    Where parameters have adapters, dropout is left out: PEFT has none for them, and does not load a folder that asks
    for it.
    """
    s = plan.settings
    targets = targets_of_plan(plan)
    saved = [name.removesuffix(WEIGHT) for name in plan.saved if name.endswith(WEIGHT)]
    own = BODY if plan.plan.spec.head == NO_HEAD else ""
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[plan.plan.spec.head],
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": s.rank,
        "lora_alpha": _integer_if_whole(s.alpha),
        "lora_dropout": 0.0 if targets.parameters else s.dropout,
        "use_rslora": s.rslora,
        "use_dora": s.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": targets.modules,
        "modules_to_save": saved or None,
        "rank_pattern": {name.removeprefix(own): rank for name, rank in targets.ranks.items()},
        "alpha_pattern": {name.removeprefix(own): _integer_if_whole(alpha) for name, alpha in targets.alphas.items()},
        **({"target_parameters": targets.parameters} if targets.parameters else {}),
    }


def _integer_if_whole(x: float) -> float:
    return int(x) if float(x).is_integer() else x


def write_peft_folder(directory: Path, plan: AdapterPlan, tensors: Iterable[tuple[str, Tensor]], base: str) -> Path:
    """Write the folder on one rank, each file whole or not at all."""
    own = BODY if plan.plan.spec.head == NO_HEAD else ""
    stored = {PREFIX + name.removeprefix(own): tensor.contiguous() for name, tensor in tensors}
    expected = {PREFIX + name.removeprefix(own) for name in plan.shapes()}
    assert stored.keys() == expected, f"adapter tensors differ from the plan: {sorted(stored.keys() ^ expected)[:4]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(peft_adapter_config_json(plan, base), indent=2, sort_keys=True) + "\n"
        with atomic_file(directory / CONFIG) as config_file, atomic_file(directory / TENSORS) as tensor_file:
            config_file.write_text(text, encoding="utf-8")
            with safetensors_errors_as_oserror(directory / TENSORS):
                save_file(stored, tensor_file, metadata={"format": "pt"})
    except OSError as error:
        raise CheckpointError(Problem(str(directory), f"cannot be written: {error}")) from None
    return directory


def adapter_half_getter(source: Mapping[str, Tensor]) -> Any:
    """Returns a function that gives `RankAdapters.fill` its tensors by name."""

    def value(adapter: ModuleAdapterSpec, half: Half) -> Tensor:
        return source[adapter.name(half)].to(torch.float32)

    return value

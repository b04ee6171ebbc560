"""A model family: two tables, and the registry of all families.

Owns what a family is and how one is found by its `model_type`. A family file is `FAMILIES.register(name, Family(...))`,
with functions for those fields of its config.json that mean something in it alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megaswift.base.plain_files import read_plain_file
from megaswift.base.registry import Registry
from megaswift.errors import Problem, WeightsError, did_you_mean_hint, first_line, missing_path_hint
from megaswift.models.fields.decoder import IRRELEVANT, SIZES, architecture_row
from megaswift.models.fields.rows import SPEC_FIELDS, ConfigRow, read_rows
from megaswift.models.heads import config_of_language_model, head_of, label_count
from megaswift.models.missing_blocks import TORCH_ENGINES, missing_block_problem
from megaswift.models.quantization import config_without_quantization
from megaswift.models.spec import ArchitectureExtras, ModelSpec
from megaswift.models.stored_form import STACKED, read_stored_form
from megaswift.models.unreadable import UnreadableCheck, unreadable_value
from megaswift.models.unsupported import unsupported_model_type_problem
from megaswift.models.vision import has_vision_tower, vision_language_problem
from megaswift.models.weights.mtp import MtpTable
from megaswift.models.weights.rules import WeightRule, renamed
from megaswift.models.weights.table import Place, expand_weight_table

ROPE_BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "global_rope_theta", "local_rope_theta")
NORM_EPSILONS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
    "norm_epsilon",
)
POSITIVE_FIELDS = {**dict.fromkeys(ROPE_BASES, "10000.0"), **dict.fromkeys(NORM_EPSILONS, "1e-06")}
"""Key -> a usual value."""

LARGEST = 1 << 53
"""The largest whole number in a config.json; sizes of a family have bounds of their own."""
LLAMA_LIKE: Mapping[str, Any] = MappingProxyType(
    {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }
)
"""Megatron fields that all families here have in common."""


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    name: str
    architecture: str
    """The class of transformers whose tensor names the weight table has."""
    config: tuple[ConfigRow, ...]
    """Rows beyond the ones that all families share."""
    weights: tuple[WeightRule, ...]
    """In the order of export."""
    transformers_type: str = ""
    """transformers' model type, where it has the model under another name only."""
    earlier_architecture: str = ""
    """The class of the authors' own code with the same tensors, in folders older than transformers' class."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig or of `ArchitectureExtras` that no config.json field sets."""
    kept: Callable[[ModelSpec], str] | None = None
    """A pattern of Hugging Face names that are carried along unchanged: multi-token prediction layers."""
    mtp: MtpTable | None = None
    """Where those layers lie in a folder; None: they cannot be trained."""
    renamed_modules: tuple[str, ...] = ()
    """Modules with linear layers that transformers has under another name than folders do: PEFT, which wraps
    transformers' modules, would not find adapters under these names."""
    unreadable: tuple[UnreadableCheck, ...] = ()
    """Checks for values of config.json that transformers does not read in this family."""
    text: str = ""
    """The field of config.json that describes the language model, the part of a larger model that trains here; empty:
    there is nothing else."""

    @property
    def rows(self) -> tuple[ConfigRow, ...]:
        """All configuration rows; the family's own are read last, and stand in place of shared ones about the same
        fields."""
        read_keys = {key for row in self.config for key in row.keys}
        shared = (*SIZES, architecture_row(self.architecture, self.earlier_architecture), *IRRELEVANT)
        return (*(row for row in shared if not read_keys & set(row.keys)), *self.config)

    def spec(self, hf_config: Mapping[str, Any]) -> ModelSpec:
        """The model that `hf_config` describes; a WeightsError names every field that is wrong or not known."""
        if (head := head_of(hf_config, self.architecture)) is not None:
            language = self.spec(config_of_language_model(hf_config, self.architecture))
            config = config_without_quantization(hf_config)
            return replace(language, head=head, labels=label_count(hf_config), tied=False, hf_config=config)
        values = read_rows(self.name, self.rows, self.language_fields(hf_config))
        values = {**LLAMA_LIKE, **self.fixed, **values}
        spec_values = {name: values.pop(name) for name in SPEC_FIELDS}
        extras = {f.name: values.pop(f.name) for f in fields(ArchitectureExtras) if f.name in values}
        features = ArchitectureExtras(**extras)
        return ModelSpec(
            family=self.name,
            transformer=values,
            hf_config=config_without_quantization(hf_config),
            features=features,
            **spec_values,
        )

    def language_fields(self, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields that the rows read: of a nested description its own, and those above it but for images'."""
        if not self.text:
            return hf_config
        nested = hf_config.get(self.text)
        if not isinstance(nested, Mapping):
            raise WeightsError(Problem(f"config.json ({self.name}), {self.text}", "must be a JSON object"))
        apart = {self.text, *OF_IMAGES}
        return {**nested, **{k: v for k, v in hf_config.items() if k not in apart and v is not None}}

    def places(self, spec: ModelSpec) -> Iterator[Place]:
        """Yield every parameter of a model with the rule for it, in the order of export; layers for multi-token
        prediction come last."""
        yield from expand_weight_table(self.weights, spec)
        if spec.mtp_layers:
            assert self.mtp is not None, f"{self.name} has no layers for multi-token prediction"
            yield from self.mtp.places(self.weights, spec)

    @property
    def stores_both_forms(self) -> bool:
        """Whether its experts are stored stacked or one by one, as the folder's tensors tell."""
        return any(rule.when == STACKED for rule in self.weights)


def vision_language_family(name: str, architecture: str, language: Family, **changes: Any) -> Family:
    """The family of a model with a vision tower, which is carried along unchanged, and `language` as its language
    model, under `text_config`."""

    def kept(spec: ModelSpec) -> str:
        of_language = [language.kept(spec)] if language.kept is not None else []
        return "|".join([*of_language, r"model\.visual\..*"])

    weights = renamed(language.weights, "model.", "model.language_model.")
    return replace(
        language, name=name, architecture=architecture, weights=weights, kept=kept, text="text_config", **changes
    )


OF_IMAGES = (
    "model_type",
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "language_model_only",
)
"""Fields beside a nested language model that say nothing of it."""
MOST_DIGITS = 20
"""Maximum digits of an integer in config.json; a longer one fits neither 64 bits nor a float."""
FAMILIES: Registry[Family] = Registry("model family", "megaswift.families")


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of this `model_type`; a WeightsError that lists the known ones."""
    name = hf_config.get("model_type")
    if (problem := unsupported_model_type_problem(hf_config)) is not None:
        raise WeightsError(problem)
    if has_vision_tower(hf_config) and not trains_language_model(hf_config):
        raise WeightsError(vision_language_problem(hf_config, FAMILIES.names()))
    if not isinstance(name, str) or name not in FAMILIES:
        if (problem := missing_block_problem(str(name))) is not None:
            raise WeightsError(problem)
        names = FAMILIES.names()
        near = did_you_mean_hint(str(name), names)
        raise WeightsError(
            Problem(
                f"config.json, model_type {name!r}",
                f"is not a supported model family; supported are {', '.join(names)}",
                f"{near} Otherwise {TORCH_ENGINES}" if near else TORCH_ENGINES,
            )
        )
    return FAMILIES.get(name)


def trains_language_model(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model is a larger one whose language model the native engine trains."""
    name = hf_config.get("model_type")
    return isinstance(name, str) and name in FAMILIES and bool(FAMILIES.get(name).text)


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits; at most {MOST_DIGITS}")
    return int(digits)


def read_config_json(directory: Path | str) -> dict[str, Any]:
    """The `config.json` of a model folder (or the path of the file itself)."""
    path = Path(directory)
    path = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
    try:
        config = json.loads(read_plain_file(path).decode("utf-8"), parse_int=_int)
    except FileNotFoundError:
        folder = path.parent
        fix = "give a folder with a Hugging Face model" if folder.is_dir() else missing_path_hint(folder)
        raise WeightsError(Problem(str(path), "does not exist", fix)) from None
    except RecursionError:
        raise WeightsError(Problem(str(path), "is nested too deeply", "use the model's own file")) from None
    except (OSError, ValueError) as error:
        raise WeightsError(
            Problem(str(path), f"cannot be read: {first_line(error)}", "use the model's own file")
        ) from None
    if not isinstance(config, dict):
        raise WeightsError(Problem(str(path), "must be a JSON object"))
    if absurd := [name for name, value in config.items() if isinstance(value, int) and abs(value) > LARGEST]:
        problems = [
            Problem(f"{path}, {name} {config[name]:.3g}", "is larger than in any known model") for name in absurd
        ]
        raise WeightsError(problems)
    return config


def load_spec(directory: Path | str) -> ModelSpec:
    """The model that a folder's config.json describes, with the form of its experts that the folder's weights have."""
    config = read_config_json(directory)
    family = family_of(config)
    spec = family.spec(config)
    form = read_stored_form(Path(directory))
    if form is None:
        return spec
    stored = asdict(form)
    if not family.stores_both_forms:
        del stored["stacked_experts"], stored["mtp_stacked_experts"]
    return replace(spec, features=replace(spec.features, **stored))


def rope_and_epsilon_problems(raw: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Rotary bases and norm epsilons that are not finite numbers above 0, in nested mappings too (`rope_parameters`,
    `text_config`). They would not fail: a NaN epsilon makes every output NaN, and the model would learn nothing."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from rope_and_epsilon_problems(value, f"{prefix}{key}.")
        elif value is not None and key in POSITIVE_FIELDS and not _positive(value):
            yield Problem(
                f"config.json, {prefix}{key}: {value}", "must be a finite number above 0", POSITIVE_FIELDS[key]
            )


def unreadable_value_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that transformers does not read (`unreadable.py`), by the checks of the family and of every model."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        family = FAMILIES.get(kind)
        fields_read = family.language_fields(raw)
        found = (check(fields_read) for check in family.unreadable)
        yield from (problem for problem in found if problem is not None)
    if raw.get("use_sliding_window") is True and raw.get("sliding_window") == 0:
        rule = "must be at least 1 with use_sliding_window true: in transformers a window of 0 has no token"
        yield unreadable_value(raw, "sliding_window", rule, '"use_sliding_window": false for no windows')


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0

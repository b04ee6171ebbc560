"""Tells by the files of a model folder whether it gives vectors, scores or classes, and how. No torch.

Owns the reading of sentence-transformers' files (modules.json and what it names) and of the fields of config.json that
say how logits become scores. Modules that are not listed here are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megaswift.base.plain_files import read_plain_file
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.folders.adapter import ClassifierHead
from megaswift.inference.options.commands import PoolingOptions
from megaswift.models.encoders import is_encoder
from megaswift.models.family import read_config_json
from megaswift.models.heads import SCORE, TOKEN_SCORE, class_names_of, head_of

EMBEDDING = "embedding"
SEQUENCE = "seq_cls"
TOKENS = "token_cls"
GENERATIVE = "generative_reranker"
CLASSES = {
    EMBEDDING: "AutoModel",
    SEQUENCE: "AutoModelForSequenceClassification",
    TOKENS: "AutoModelForTokenClassification",
    GENERATIVE: "AutoModelForCausalLM",
}
"""transformers' class of each kind."""
MODULES = "modules.json"
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switch in the older form of a pooling's settings -> its name in the newer form. Several are joined in this order."""
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity"}
"""Last name of a class of torch.nn -> what it does to the logit of a pair."""


@dataclass(frozen=True)
class PoolingFolder:
    """The facts in a folder about its vectors, scores or classes."""

    kind: str
    pooling: tuple[str, ...] = ("mean",)
    """How the vectors of tokens become one; several are joined."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled too."""
    normalizes: bool = True
    max_length: int | None = None
    """Maximum tokens of a text; None: the model's own."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    """The name of the prompt that is used where a request names none; empty: no prompt."""
    lowercases: bool = False
    labels: tuple[str, ...] = ()
    problem_type: str = ""
    """`regression`, `single_label_classification`, `multi_label_classification`; empty: config.json has none."""
    pair_activation: str = "sigmoid"
    """What becomes of the logit of a pair: `sigmoid` or `identity`."""
    score_tokens: tuple[int, int | None] | None = None
    """Of a generative reranker: the tokens for yes and for no."""
    head: ClassifierHead | None = None
    """The head that adapters put in place of the model's own."""

    @property
    def scores_pairs(self) -> bool:
        """Return whether a pair of texts has a score of its own; embeddings are compared instead."""
        return self.kind == GENERATIVE or (self.kind == SEQUENCE and len(self.labels) == 1)


def pooling_folder(
    folder: Path, options: PoolingOptions, flag: str, head: ClassifierHead | None = None
) -> PoolingFolder | None:
    """Return what a folder says; None for a language model that generates text. `head`: what adapters put in place of
    the model's own.

    Raises:
        WeightsError: The folder has modules that are not supported.
        ConfigError: --task_type or another option does not fit the model.
    """
    config = read_config_json(folder)
    if head is not None:
        config = {**config, "problem_type": head.problem_type}
    modules = _json(folder / MODULES) if (folder / MODULES).is_file() else None
    kind = _kind(config, modules, options.task_type, flag, head.kind if head is not None else head_of(config))
    if kind is None:
        given = [name for name in ("pooling", "truncation_strategy") if getattr(options, name) is not None]
        if given:
            rule = "applies to embeddings, scores and classes, and this model generates text"
            raise ConfigError([Problem(f"--{name} {getattr(options, name)}", rule, "leave it out") for name in given])
        return None
    found = PoolingFolder(kind) if modules is None else _with_modules(PoolingFolder(kind), folder, modules, flag)
    if kind == EMBEDDING:
        if options.pooling is not None:
            return replace(found, pooling=(options.pooling.replace("last", "lasttoken"),))
        return found if modules is not None else replace(found, pooling=(_plain_pooling(config),))
    if options.pooling is not None:
        rule = f"applies to embedding models (this model is for --task_type {kind})"
        raise ConfigError(Problem(f"--pooling {options.pooling}", rule, "leave it out"))
    if kind == GENERATIVE:
        return found
    labels = head.names if head is not None else tuple(class_names_of(config))
    if options.task_type == "reranker" and len(labels) != 1:
        rule = f"has {len(labels)} labels; a reranker has one"
        raise ConfigError(Problem("--task_type reranker", f"{flag} {rule}", "--task_type seq_cls"))
    activation = found.pair_activation if modules is not None else _activation_of_config(config)
    problem = str(config.get("problem_type") or "")
    return replace(found, labels=labels, problem_type=problem, pair_activation=activation, head=head)


def _kind(config: Mapping[str, Any], modules: Any, task_type: str | None, flag: str, head: str | None) -> str | None:
    """The kind by the option, else by the folder or the head that adapters bring."""
    own = {SCORE: SEQUENCE, TOKEN_SCORE: TOKENS}.get(head or "")
    if task_type is not None:
        wanted = {"reranker": SEQUENCE, "causal_lm": None}.get(task_type, task_type)
        if wanted in (SEQUENCE, TOKENS) and own != wanted:
            ends = "ForTokenClassification" if wanted == TOKENS else "ForSequenceClassification"
            rule = f"{flag} has no trained head: config.json names no ...{ends}"
            raise ConfigError(Problem(f"--task_type {task_type}", rule, "give the folder that training has written"))
        return wanted
    if own is not None:
        return own
    if modules is not None:
        return GENERATIVE if any(_type(module) == "LogitScore" for module in modules) else EMBEDDING
    if is_encoder(config):
        return EMBEDDING
    names = [str(name) for name in config.get("architectures") or []]
    is_bare = bool(names) and all(n.endswith("Model") and not n.endswith("HeadModel") for n in names)
    return EMBEDDING if is_bare and not any(n.endswith("HeadsModel") for n in names) else None


def _type(module: Any) -> str:
    return str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""


def _plain_pooling(config: Mapping[str, Any]) -> str:
    """The pooling of a folder without sentence-transformers' files: the last token where each token sees those before
    it alone, the mean elsewhere."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    name = str(config.get("model_type"))
    return "lasttoken" if name in CAUSAL and name not in MASKED else "mean"


def _activation_of_config(config: Mapping[str, Any]) -> str:
    own = config.get("sentence_transformers")
    path = own.get("activation_fn") if isinstance(own, dict) else None
    return _activation(path or config.get("sbert_ce_default_activation_function"))


def _activation(path: Any) -> str:
    """The activation that a path of a class names; sentence-transformers takes the sigmoid where there is none."""
    if path is None:
        return "sigmoid"
    name = str(path).rpartition(".")[2]
    if name not in ACTIVATIONS:
        rule = f"names the activation {path}; {' and '.join(ACTIVATIONS)} are supported"
        raise WeightsError(Problem("the model's configuration", rule, "change it to one of these"))
    return ACTIVATIONS[name]


def _with_modules(found: PoolingFolder, folder: Path, modules: Any, flag: str) -> PoolingFolder:
    """Add the facts of modules.json and the files next to it."""
    kinds = [_type(module) for module in modules] if isinstance(modules, list) else []
    paths = [str(module.get("path", "")) for module in modules] if kinds else []
    last = {
        EMBEDDING: (["Pooling"], ["Pooling", "Normalize"]),
        GENERATIVE: (["LogitScore"],),
    }.get(found.kind, ([],))
    if kinds[:1] != ["Transformer"] or paths[:1] != [""] or kinds[1:] not in last:
        rule = f"has the modules {', '.join(kinds)}, which are not supported together"
        fix = "supported: Transformer, Pooling, Normalize for embeddings; Transformer, LogitScore for rerankers"
        raise WeightsError(Problem(flag, rule, fix))
    settings = _optional(folder / "config_sentence_transformers.json")
    lengths = _optional(folder / "sentence_bert_config.json")
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
    found = replace(
        found,
        prompts=prompts,
        default_prompt=str(settings.get("default_prompt_name") or ""),
        max_length=lengths.get("max_seq_length"),
        lowercases=bool(lengths.get("do_lower_case")),
        pair_activation=_activation(settings.get("activation_fn")),
    )
    if found.kind == GENERATIVE:
        tokens = _json(folder / paths[1] / "config.json")
        return replace(found, score_tokens=(int(tokens["true_token_id"]), tokens.get("false_token_id")))
    if found.kind != EMBEDDING:
        return found
    if "message" in (lengths.get("modality_config") or {}):
        rule = "embeds conversations (modality_config message), which is not supported"
        raise WeightsError(Problem(f"{flag}, sentence_bert_config.json", rule, "use a model of texts"))
    pooling = _json(folder / paths[1] / "config.json")
    return replace(
        found,
        pooling=_pooling(pooling, f"{flag}, {paths[1]}/config.json"),
        includes_prompt=bool(pooling.get("include_prompt", True)),
        normalizes="Normalize" in kinds,
    )


def _pooling(settings: Mapping[str, Any], flag: str) -> tuple[str, ...]:
    named = settings.get("pooling_mode")
    if named is None:
        named = [name for key, name in POOLINGS.items() if settings.get(key)] or ["mean"]
    names = (named,) if isinstance(named, str) else tuple(map(str, named))
    if unknown := [name for name in names if name not in POOLINGS.values()]:
        rule = f"pools by {unknown[0]}; known are {', '.join(POOLINGS.values())}"
        raise WeightsError(Problem(flag, rule, "use one of them"))
    return names


def _optional(path: Path) -> dict[str, Any]:
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(read_plain_file(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(Problem(str(path), f"cannot be read: {error}", "write it again")) from None

"""The projections of a model that may carry an adapter, by their Hugging Face module names, and what a user's names mean among them.

Owns the expansion of a family's weight table to modules and the matching of `--target_modules` and `--modules_to_save`. Pure: names
and shapes, no tensors, no torch; adapters themselves are laid out by the bridge.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from megaswift.errors import ConfigError, Problem, nearest
from megaswift.families.family import Family
from megaswift.families.rules import Rule
from megaswift.families.spec import ModelSpec

ALL = "all-linear"
WEIGHT = ".weight"
_PATTERN = re.compile(r"[\\^$*+?|()\[\]{}]")
"""Characters that make a name a regular expression: module names have none of them."""


@dataclass(frozen=True)
class Projection:
    """One linear layer of the Hugging Face model."""

    module: str
    """`model.layers.0.self_attn.q_proj`."""
    megatron: str
    """Megatron's module, which may hold several: `decoder.layers.0.self_attention.linear_qkv`."""
    source: int
    """Its number among the Hugging Face tensors of Megatron's weight."""
    shape: tuple[int, int]
    """[out, in]."""

    @property
    def leaf(self) -> str:
        """`q_proj`."""
        return self.module.rsplit(".", 1)[-1]


def _expand(family: Family, spec: ModelSpec) -> Iterator[tuple[Rule, int | None, int | None]]:
    """(rule, layer, expert) of every Megatron parameter, layer by layer."""
    active = [rule for rule in family.weights if not rule.when or getattr(spec, rule.when)]
    yield from ((rule, None, None) for rule in active if rule.scope == "model")
    for layer, sparse in enumerate(spec.moe_layers):
        for rule in active:
            if rule.scope in (("layer", "moe") if sparse else ("layer", "dense")):
                yield rule, layer, None
        for expert in range(spec.experts if sparse else 0):
            yield from ((rule, layer, expert) for rule in active if rule.scope == "expert")


def _name(pattern: str, layer: int | None, expert: int | None) -> str:
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))


def adaptable(rule: Rule) -> bool:
    """Whether the rule is about a linear layer of both sides: no norm, router, bias or embedding, no stack of experts in one tensor."""
    leaf = rule.megatron.removesuffix(WEIGHT).rsplit(".", 1)[-1]
    return rule.megatron.endswith(WEIGHT) and leaf.startswith("linear_") and not rule.stacked


def projections(family: Family, spec: ModelSpec) -> Iterator[Projection]:
    """Every projection, in the order of the weight table."""
    for rule, layer, expert in _expand(family, spec):
        if not adaptable(rule):
            continue
        megatron = _name(rule.megatron, layer, expert).removesuffix(WEIGHT)
        for source, (name, shape) in enumerate(zip(rule.hf, rule.shapes(spec), strict=True)):
            if name.endswith(WEIGHT) and len(shape) == 2:
                yield Projection(_name(name, layer, expert).removesuffix(WEIGHT), megatron, source, (shape[0], shape[1]))


def _matches(name: str, projection: Projection) -> bool:
    both = (projection.module, projection.megatron)
    if _PATTERN.search(name):
        return any(re.fullmatch(name, m) for m in both)
    return any(m == name or m.endswith("." + name) for m in both)


def select(family: Family, spec: ModelSpec, names: Sequence[str]) -> list[Projection]:
    """The projections that `names` mean; a ConfigError for each name that means none.

    `all-linear` is every projection. A name with a character of regular expressions must match a whole module name, any other name
    is a module or the end of one, as PEFT reads them; Hugging Face's and Megatron's names do.
    """
    known = list(projections(family, spec))
    chosen: dict[str, Projection] = {}
    problems = []
    for name in names:
        try:
            found = known if name == ALL else [p for p in known if _matches(name, p)]
        except re.error as error:
            problems.append(Problem(f"--target_modules {name}", f"is no regular expression: {error}", ALL))
            continue
        chosen.update({p.module: p for p in found})
        if not found:
            problems.append(_no_target(name, known, family, spec))
    if problems:
        raise ConfigError(problems)
    return [p for p in known if p.module in chosen]


def without_dora(chosen: Sequence[Projection], label: str) -> list[Problem]:
    """What keeps DoRA from these projections: experts, each of which sees other tokens on other ranks."""
    experts = list(dict.fromkeys(p.leaf for p in chosen if ".experts." in p.megatron))
    rule = f"is not there for experts, and {', '.join(experts)} of experts are among the targets"
    return [Problem(label, rule, "--target_modules for attention alone, or plain LoRA")] if experts else []


def _no_target(name: str, known: Sequence[Projection], family: Family, spec: ModelSpec) -> Problem:
    leaves = list(dict.fromkeys(leaf for p in known for leaf in (p.leaf, p.megatron.rsplit(".", 1)[-1])))
    for rule, layer, expert in _expand(family, spec):
        modules = [_name(hf, layer, expert).removesuffix(WEIGHT) for hf in rule.hf]
        if any(m == name or m.endswith("." + name) for m in modules) and not adaptable(rule):
            why = "is no projection of its own, so it cannot carry an adapter"
            return Problem(f"--target_modules {name}", why, f"--modules_to_save {name} to train it fully, or one of {', '.join(leaves)}")
    close = nearest(name.rsplit(".", 1)[-1], leaves)
    return Problem(f"--target_modules {name}", "matches no linear layer of this model", f"{close or ALL}; there are {', '.join(leaves)}")


def saved(family: Family, spec: ModelSpec, names: Sequence[str]) -> list[str]:
    """Hugging Face tensors of the modules that `names` (whole names or their ends) mean; a ConfigError for each that means none."""
    chosen: dict[str, None] = {}
    problems = []
    every = [_name(hf, layer, expert) for rule, layer, expert in _expand(family, spec) for hf in rule.hf]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in every))
    for name in names:
        found = [m for m in modules if m == name or m.endswith("." + name)]
        chosen.update({hf: None for hf in every if hf.rpartition(".")[0] in found})
        if not found:
            leaves = list(dict.fromkeys(m.rsplit(".", 1)[-1] for m in modules))
            close = nearest(name, leaves)
            problems.append(Problem(f"--modules_to_save {name}", "matches no module of this model", close or f"one of {', '.join(leaves)}"))
        elif spec.tied and any(m in _TIED for m in found):
            problems.append(Problem(f"--modules_to_save {name}", "is tied to the output layer, and PEFT saves tied weights apart",
                                    "leave it out"))
    problems += in_part(family, spec, chosen)
    if problems:
        raise ConfigError(problems)
    return list(chosen)


def in_part(family: Family, spec: ModelSpec, chosen: Collection[str]) -> Iterator[Problem]:
    """Modules that Megatron joins with others which are not chosen: one parameter trains whole or not at all."""
    for rule, layer, expert in _expand(family, spec):
        names = [_name(hf, layer, expert) for hf in rule.hf]
        inside, outside = [n for n in names if n in chosen], [n for n in names if n not in chosen]
        if (inside and outside) or (inside and rule.stacked):
            others = ", ".join(n.removesuffix(WEIGHT).rsplit(".", 1)[-1] for n in outside) or "all experts"
            yield Problem(f"--modules_to_save {inside[0].removesuffix(WEIGHT)}", f"is one parameter with {others} in Megatron",
                          "its target_modules entry: an adapter of high rank")
            return


_TIED = ("model.embed_tokens", "lm_head")

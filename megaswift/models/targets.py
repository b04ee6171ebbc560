"""The projections of a model that may carry an adapter, by their Hugging Face module names, and what a user's names
mean among them.

Owns the expansion of a family's weight table to modules and the matching of `--target_modules`, `--target_parameters`
and `--modules_to_save`. Experts that Hugging Face keeps in one parameter (gpt_oss) are a projection each here. Pure:
names and shapes, no tensors, no torch; adapters themselves are laid out by the bridge.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.models.family import Family
from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import TensorParallelShard, WeightRule

ALL = "all-linear"
WEIGHT = ".weight"
GATED_DELTA_PROJECTIONS = ("in_proj", "out_proj")
"""Linear layers of gated delta nets; those of other blocks are called linear_*."""
_PATTERN = re.compile(r"[\\^$*+?|()\[\]{}]")
"""Characters that make a name a regular expression: module names have none of them."""


@dataclass(frozen=True)
class Projection:
    """One linear layer of the Hugging Face model, or of one expert of those that share a parameter."""

    module: str
    """`model.layers.0.self_attn.q_proj`; of such an expert a name of ours,
    `model.layers.0.mlp.experts.3.gate_up_proj`."""
    megatron: str
    """Megatron's module, which may hold several: `decoder.layers.0.self_attention.linear_qkv`."""
    source: int
    """Its number among the Hugging Face tensors of Megatron's weight."""
    shape: tuple[int, int]
    """[out, in]."""
    stack: str = ""
    """The parameter that holds this matrix of every expert:
    `model.layers.0.mlp.experts.gate_up_proj`."""
    turned: bool = False
    """Whether the parameter is [experts, in, out], not [experts, out, in]."""
    alternating: int = 1
    """How many matrices take turns in the parameter's columns (gate and up: 2); here they stand one after the other."""

    @property
    def leaf(self) -> str:
        """`q_proj`."""
        return self.module.rsplit(".", 1)[-1]

    @property
    def weight(self) -> str:
        """The Hugging Face tensor that holds the matrix."""
        return self.stack or self.module + WEIGHT

    @property
    def names(self) -> tuple[str, ...]:
        """Return what a user may call it: a parameter goes by its own name only, as in PEFT."""
        return (self.stack,) if self.stack else (self.module, self.megatron)


def _expand(family: Family, spec: ModelSpec) -> Iterator[tuple[WeightRule, int | None, int | None]]:
    """(rule, layer, expert) of every Megatron parameter, layer by layer."""
    active = [rule for rule in family.weights if not rule.when or getattr(spec, rule.when)]
    yield from ((rule, None, None) for rule in active if rule.scope == "model")
    for layer, kind in enumerate(spec.layer_kinds):
        yield from ((rule, layer, None) for rule in active if rule.scope in kind.scopes and rule.scope != "expert")
        for expert in range(spec.experts if kind.moe else 0):
            yield from ((rule, layer, expert) for rule in active if rule.scope == "expert")


def _name(pattern: str, layer: int | None, expert: int | None) -> str:
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))


def is_linear_layer_rule(rule: WeightRule) -> bool:
    """Whether the rule is about a linear layer: no norm, router, bias, convolution or embedding."""
    leaf = rule.megatron.removesuffix(WEIGHT).rsplit(".", 1)[-1]
    return rule.megatron.endswith(WEIGHT) and (leaf.startswith("linear_") or leaf in GATED_DELTA_PROJECTIONS)


def projections(family: Family, spec: ModelSpec) -> Iterator[Projection]:
    """Every projection, in the order of the weight table."""
    for rule, layer, expert in _expand(family, spec):
        if not is_linear_layer_rule(rule):
            continue
        megatron = _name(rule.megatron, layer, expert).removesuffix(WEIGHT)
        for source, (name, shape) in enumerate(zip(rule.hf, rule.shapes(spec), strict=True)):
            if rule.stacked:
                yield _of_stack(rule, spec, _name(name, layer, expert), (megatron, expert))
            elif name.endswith(WEIGHT) and len(shape) == 2:
                yield Projection(
                    _name(name, layer, expert).removesuffix(WEIGHT), megatron, source, (shape[0], shape[1])
                )


def _of_stack(rule: WeightRule, spec: ModelSpec, stack: str, where: tuple[str, int | None]) -> Projection:
    """One expert's matrix in a parameter of all experts."""
    megatron, expert = where
    [(_, *matrix)] = rule.shapes(spec)
    piece = rule.pieces(spec, TensorParallelShard(expert=expert))[0]
    width, out = matrix if piece.transposed else reversed(matrix)
    home, _, leaf = stack.rpartition(".")
    module = f"{home}.{expert}.{leaf}"
    return Projection(module, megatron, 0, (out, width), stack, piece.transposed, piece.stride)


def _matches(name: str, names: Sequence[str]) -> bool:
    if _PATTERN.search(name):
        return any(re.fullmatch(name, m) for m in names)
    return any(m == name or m.endswith("." + name) for m in names)


def select_projections(
    family: Family, spec: ModelSpec, names: Sequence[str], parameters: Sequence[str] = ()
) -> list[Projection]:
    """The projections that `--target_modules` and `--target_parameters` mean; a ConfigError for each name that means
    none.

    `all-linear` is every module. A name with a character of regular expressions must match a whole module name, any
    other name is a module or the end of one, as PEFT reads them; Hugging Face's and Megatron's names do. `parameters`
    are the same for experts that share one.
    """
    candidates = list(projections(family, spec))
    modules = [p for p in candidates if not p.stack]
    stacks = [p for p in candidates if p.stack]
    chosen: dict[str, Projection] = {}
    problems = [] if names or parameters else [Problem("--target_modules none", "leaves nothing to adapt", ALL)]
    for option, name, among in [
        *(("modules", n, modules) for n in names),
        *(("parameters", n, stacks) for n in parameters),
    ]:
        try:
            matching = among if (option, name) == ("modules", ALL) else [p for p in among if _matches(name, p.names)]
        except re.error as error:
            problems.append(Problem(f"--target_{option} {name}", f"is not a regular expression: {error}", ALL))
            continue
        chosen.update({p.module: p for p in matching})
        if not matching:
            problems.append(
                _no_target(name, candidates, family, spec) if option == "modules" else _no_parameter(name, candidates)
            )
    if problems:
        raise ConfigError(problems)
    return [p for p in candidates if p.module in chosen]


def is_expert(projection: Projection) -> bool:
    """Return whether a projection is an expert's."""
    return ".experts." in projection.megatron


def expert_leaves(family: Family) -> set[str]:
    """Return the last parts of experts' module names in the family, such as `gate_proj`, even if this model has no
    experts."""
    rules = [rule for rule in family.weights if rule.scope == "expert" and not rule.stacked]
    return {hf.removesuffix(WEIGHT).rsplit(".", 1)[-1] for rule in rules for hf in rule.hf}


def partial_expert_problems(family: Family, spec: ModelSpec, chosen: Sequence[Projection]) -> list[Problem]:
    """Report adapters of experts that PEFT (0.21) would not find in a folder, or not all of them.

    transformers keeps all experts' gate and up in one parameter and their down in another. PEFT adapts whole
    parameters, and looks for adapters of gate and up under the name that they have where down has adapters too.
    """
    renamed = [p.module for p in chosen if any(f".{name}." in p.module for name in family.renamed_modules)]
    if renamed:
        rule = f"includes {renamed[0]}: PEFT would not find its adapter, because transformers renames that module"
        return [Problem("--target_modules", rule, "name q_proj k_proj v_proj o_proj")]
    adapted = {p.module for p in chosen}
    layers: dict[str, list[Projection]] = {}
    for p in projections(family, spec):
        if is_expert(p) and not p.stack:
            layers.setdefault(p.module.partition(".experts.")[0], []).append(p)
    for experts in layers.values():
        downs = {p.module for p in experts if p.megatron.endswith("linear_fc2")}
        given = {p.module for p in experts if p.module in adapted}
        if given and given != downs and len(given) < len(experts):
            left = next(p.module for p in experts if p.module not in given)
            rule = f"leaves out {left}: PEFT adapts gate, up and down of all experts of a layer together, or down alone"
            leaves = " ".join(dict.fromkeys(p.leaf for p in experts))
            return [Problem("--target_modules", rule, f"name {leaves}, or no expert")]
    return []


def dora_problems(chosen: Sequence[Projection], label: str, names: Collection[str] = ()) -> list[Problem]:
    """Report projections that DoRA cannot have: PEFT (0.21) refuses it for parameters, and transformers keeps the
    experts of all families so.

    Args:
        chosen: The targets.
        label: What the user gave.
        names: Those of experts in the family, which PEFT takes for these parameters in other modules too.
    """
    unfit = list(dict.fromkeys(p.leaf for p in chosen if is_expert(p) or p.leaf in names))
    rule = (
        "is not supported for experts and modules with their names (PEFT takes them for stacked parameters, which have "
        f"no DoRA), and {', '.join(unfit)} {'is' if len(unfit) == 1 else 'are'} among the targets"
    )
    return [Problem(label, rule, "use --target_modules for attention alone, or plain LoRA")] if unfit else []


def _no_parameter(name: str, candidates: Sequence[Projection]) -> Problem:
    what = f"--target_parameters {name}"
    ends = list(dict.fromkeys(expert_stack_name_without_layer(p.stack) for p in candidates if p.stack))
    if ends:
        close = did_you_mean_hint(name, [*ends, *(end.rsplit(".", 1)[-1] for end in ends)])
        return Problem(what, "matches no stacked expert parameter", f"{close or ends[0]}; there are {', '.join(ends)}")
    modules = list(dict.fromkeys(p.leaf for p in candidates if ".experts." in p.megatron))
    rule = "is for experts that are stacked in one parameter of the model's files; "
    if not modules:
        return Problem(what, rule + "this model has no experts", "leave it out")
    return Problem(what, rule + "in this model each expert has its own", f"--target_modules {' '.join(modules)}")


def expert_stack_name_without_layer(stack: str) -> str:
    """A parameter's name without its layer: `mlp.experts.gate_up_proj`."""
    return ".".join(stack.split(".")[-3:])


def _no_target(name: str, candidates: Sequence[Projection], family: Family, spec: ModelSpec) -> Problem:
    stacks = [
        expert_stack_name_without_layer(p.stack)
        for p in candidates
        if p.stack and _matches(name, (p.stack, p.megatron))
    ]
    if stacks:
        what = "is not a module but a parameter with all experts stacked"
        return Problem(f"--target_modules {name}", what, f"--target_parameters {stacks[0]}")
    leaves = list(
        dict.fromkeys(leaf for p in candidates if not p.stack for leaf in (p.leaf, p.megatron.rsplit(".", 1)[-1]))
    )
    for rule, layer, expert in _expand(family, spec):
        modules = [_name(hf, layer, expert).removesuffix(WEIGHT) for hf in rule.hf]
        if any(m == name or m.endswith("." + name) for m in modules) and not is_linear_layer_rule(rule):
            why = "is not a separate linear layer, so it cannot have an adapter"
            return Problem(
                f"--target_modules {name}",
                why,
                f"use --modules_to_save {name} to train it fully, or one of {', '.join(leaves)}",
            )
    close = did_you_mean_hint(name.rsplit(".", 1)[-1], leaves)
    if "," in name:
        close = f"--target_modules {' '.join(name.replace(',', ' ').split())}"
    return Problem(
        f"--target_modules {name}",
        "matches no linear layer of this model",
        f"{close or ALL}; there are {', '.join(leaves)}",
    )


OF_MEGATRON = {
    "output_layer": "lm_head",
    "word_embeddings": "embed_tokens",
    "embedding": "embed_tokens",
    "final_layernorm": "norm",
}
"""Hugging Face's names of modules that Megatron-Core calls otherwise."""


def modules_to_save_tensor_names(family: Family, spec: ModelSpec, names: Sequence[str]) -> list[str]:
    """Hugging Face tensors of the modules that `names` (whole names or their ends, or Megatron-Core's names) mean; a
    ConfigError for each that means none."""
    chosen: dict[str, None] = {}
    problems = []
    every = [_name(hf, layer, expert) for rule, layer, expert in _expand(family, spec) for hf in rule.hf]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in every))
    for name in names:
        matching = [m for m in modules if m == name or m.endswith("." + name)]
        matching = matching or [m for m in modules if m.rsplit(".", 1)[-1] == OF_MEGATRON.get(name)]
        chosen.update({hf: None for hf in every if hf.rpartition(".")[0] in matching})
        if not matching:
            leaves = list(dict.fromkeys(m.rsplit(".", 1)[-1] for m in modules))
            close = did_you_mean_hint(name, leaves)
            problems.append(
                Problem(
                    f"--modules_to_save {name}",
                    "matches no module of this model",
                    close or f"one of {', '.join(leaves)}",
                )
            )
        elif spec.tied and any(m.rpartition(".")[2] in _TIED for m in matching):
            problems.append(
                Problem(
                    f"--modules_to_save {name}",
                    "is tied to the output layer, and PEFT saves tied weights separately",
                    "leave it out",
                )
            )
    problems += partial_fused_modules_to_save_problems(family, spec, chosen)
    if problems:
        raise ConfigError(problems)
    return list(chosen)


def partial_fused_modules_to_save_problems(
    family: Family, spec: ModelSpec, chosen: Collection[str]
) -> Iterator[Problem]:
    """Modules that Megatron joins with others which are not chosen: one parameter trains whole or not at all."""
    for rule, layer, expert in _expand(family, spec):
        names = [_name(hf, layer, expert) for hf in rule.hf]
        inside = [n for n in names if n in chosen]
        outside = [n for n in names if n not in chosen]
        if (inside and outside) or (inside and rule.stacked):
            other_names = ", ".join(n.removesuffix(WEIGHT).rsplit(".", 1)[-1] for n in outside) or "all experts"
            yield Problem(
                f"--modules_to_save {inside[0].removesuffix(WEIGHT)}",
                f"shares one parameter with {other_names} in Megatron",
                f"use its target_{'parameters' if rule.stacked else 'modules'} entry, to train it by an adapter "
                "of high "
                "rank",
            )
            return


_TIED = ("embed_tokens", "lm_head")

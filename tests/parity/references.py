"""The oracle's numbers, computed once per model variant and number of micro-batches, and the model folders they are
for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from megaswift.bisection.precision import ReorderedSums
from tests.parity.cases import Case, global_batch
from tests.parity.compare import distances
from tests.parity.measure import STEPS
from tests.parity.models import build, model_type
from tests.parity.mtp import MTP
from tests.parity.oracle import Recipe, Reference, reference

AUX = Recipe(aux_coeff=0.02, z_coeff=0.01)
NOISY = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "hy_v3")
"""Model types of which Hugging Face's own float32 is off by more than half of the limit: of gated delta nets 5e-5, for
the gradients of their decays are sums that cancel; of Hy3 by 4e-6, in norms of queries and keys."""


ORDERS = 4
"""Orders of summation besides the usual one."""


class References:
    """A cache under one folder."""

    def __init__(self, folder: Path, aux: bool = True) -> None:
        self.folder, self.aux = folder, aux
        self._known: dict[tuple[str, int, bool, bool], Reference] = {}

    @cached_property
    def recipe(self) -> Recipe:
        """The optimizer; MoE models train with both auxiliary losses unless told otherwise."""
        return AUX if self.aux else Recipe()

    def model(self, variant: str) -> Path:
        """The variant's folder."""
        return build(variant, self.folder / variant)

    def of(self, case: Case) -> tuple[Path, Recipe, Reference]:
        """(model folder, recipe, the oracle's numbers) of a case.

        Transformer Engine's kernels round otherwise than torch's, by as much as Hugging Face's float32 does (6e-5 of a
        weight after three steps of Adam): for them the oracle computes in float64, as it does for NOISY models, whose
        limits follow from the distance to its float32.
        """
        recipe = self.recipe if case.moe else replace(self.recipe, aux_coeff=0.0, z_coeff=0.0)
        recipe = replace(recipe, mtp_layers=MTP.get(case.variant, 0))
        folder = self.model(case.variant)
        key = (case.variant, case.total, case.filler, case.te)
        if key not in self._known:
            rows = replace(case, packed=False)
            steps = [global_batch(rows, k) for k in range(STEPS)]
            noisy = model_type(case.variant) in NOISY
            self._known[key] = reference(folder, recipe, steps, wide=case.te or noisy)
            if noisy:
                narrow = reference(folder, recipe, steps[:1])
                self._known[key].noise = distances(narrow.gradients, self._known[key].gradients)
        return folder, recipe, self._known[key]

    def in_other_orders(self, case: Case) -> Reference:
        """The oracle's numbers, their noise the largest of several orders of summation: one order may be near its
        float64 by chance (3.1e-6 for an expert with which others are 6.4e-6 and 6.9e-6 off)."""
        folder, recipe, want = self.of(case)
        steps = [global_batch(replace(case, packed=False), 0)]
        noise = want.noise
        for seed in range(ORDERS):
            with ReorderedSums(seed):
                narrow = reference(folder, recipe, steps)
            found = distances(narrow.gradients, want.gradients)
            noise = {name: max(off, found[name]) for name, off in noise.items()}
        return replace(want, noise=noise)

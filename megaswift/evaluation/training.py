"""Tasks within a run of training: rank 0 answers them with a copy of the weights, in transformers.

The copy is made for each evaluation from the stream of weights that an export gets, adapters merged in, and released
behind it. The scores are those of `megaswift eval` on the export. Other ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift import distributed
from megaswift.engine.protocol import Engine

if TYPE_CHECKING:
    from megaswift.rollout.backends.transformers_sampler import TransformersSampler

LONGEST_HOURS = 24.0
"""Other ranks wait at most so long for rank 0."""


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are run."""

    tasks: tuple[str, ...]
    limit: float | None
    num_fewshot: int | None
    batch_size: int
    apply_chat_template: bool
    device: str
    """Of rank 0's copy."""
    trust_remote_code: bool = False


@dataclass
class TrainingTasks:
    """The tasks of a run; `load` comes first. All methods are collective."""

    folder: Path
    """The model's Hugging Face folder, for its configuration."""
    tokenizer: Any
    settings: TaskSettings
    _loaded: Any = field(default=None, repr=False)
    _copy: TransformersSampler | None = field(default=None, repr=False)

    def load(self) -> None:
        """Read the tasks on rank 0, before the model; UserError on every rank with what is wrong with them."""
        distributed.run_on_rank0(self._load, LONGEST_HOURS)

    def _load(self) -> None:
        from megaswift.evaluation.task_library import load_tasks

        chat = bool(self.tokenizer.chat_template)
        self._loaded = load_tasks(self.settings.tasks, (), chat, "--eval_tasks")
        self._copy = self._made()

    def _made(self) -> TransformersSampler:
        """The copy, without storage for weights."""
        from megaswift.rollout.backends.transformers_sampler import TransformersSampler
        from megaswift.rollout.sampler import SamplerOptions

        options = SamplerOptions(device=self.settings.device, trust_remote_code=self.settings.trust_remote_code)
        copy = TransformersSampler(self.folder, options)
        if (self.folder / "generation_config.json").is_file():
            from transformers import GenerationConfig

            copy.model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return copy

    def scores(self, engine: Engine) -> Mapping[str, float]:
        """Evaluate the engine's weights; return scores by the name of task and metric, the same on every rank."""
        weights = engine.hf_weights()
        if self._copy is not None:
            self._copy.update_weights(weights)
        for _ in weights:  # the stream is collective
            pass
        return distributed.run_on_rank0(self._evaluated, LONGEST_HOURS)

    def _evaluated(self) -> dict[str, float]:
        from megaswift.evaluation.harness import HarnessRun, local_model, result_of, run_tasks

        assert self._copy is not None, "loaded"
        limit = self.settings.limit
        run = HarnessRun(
            num_fewshot=self.settings.num_fewshot,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            batch_size=self.settings.batch_size,
            apply_chat_template=self.settings.apply_chat_template,
            bootstrap_iters=0,
            shows_bars=False,
        )
        try:
            lm = local_model(self._copy.model, self.tokenizer, run.batch_size)
            found = run_tasks(lm, self._loaded, run)
        finally:
            self._copy.sleep()
        return {score.name: score.value for score in result_of("", found, run, {}).scores}

"""All sections together: the tables of options and aliases, and the record that rules read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaswift.config.option import Option, build_option_table
from megaswift.config.parts.adapter import LoraConfig
from megaswift.config.parts.data import DataConfig
from megaswift.config.parts.engine import EngineBackendConfig
from megaswift.config.parts.faults import FaultToleranceConfig
from megaswift.config.parts.launch import LaunchConfig
from megaswift.config.parts.layout import ParallelConfig
from megaswift.config.parts.model import ModelConfig
from megaswift.config.parts.optimizer import OptimConfig
from megaswift.config.parts.peft_options import NonLoraPeftConfig
from megaswift.config.parts.preference import PreferenceConfig
from megaswift.config.parts.quantization import QuantizationConfig
from megaswift.config.parts.rl import RlConfig
from megaswift.config.parts.sampler import VllmSamplerConfig
from megaswift.config.parts.tracker import TrackerConfig
from megaswift.config.parts.training import TrainConfig
from megaswift.config.spelling import TypedOption

TASKS = {
    "sft": "supervised fine-tuning on conversations",
    "pt": "pretraining on plain text",
    "dpo": "preference learning from pairs: DPO and variants",
    "kto": "preference learning from labeled completions: KTO, BCO",
    "orpo": "preference learning without a reference model: ORPO",
    "cpo": "preference learning without a reference model: CPO",
    "simpo": "preference learning without a reference model: SimPO",
    "rm": "reward model training from preference pairs",
    "grpo": "reinforcement learning without a critic: GRPO and variants",
    "ppo": "reinforcement learning with a critic: PPO",
}

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "peft": NonLoraPeftConfig,
    "quantization": QuantizationConfig,
    "engine": EngineBackendConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "preference": PreferenceConfig,
    "rl": RlConfig,
    "vllm": VllmSamplerConfig,
    "train": TrainConfig,
    "trackers": TrackerConfig,
    "optim": OptimConfig,
    "fault_tolerance": FaultToleranceConfig,
    "launch": LaunchConfig,
}

SECTION_ALIASES = {
    "training": "train",
    "parallelism": "parallel",
    "datasets": "data",
    "dataset": "data",
    "optimizer": "optim",
    "launcher": "launch",
    "rlhf": "preference",
    "dpo": "preference",
    "logging": "train",
    "checkpoint": "train",
    "tuner": "lora",
    "grpo": "rl",
    "ppo": "rl",
    "rollout": "rl",
    "rewards": "rl",
}
"""Other headings in a file. A heading only groups: any option may stand under any of them."""

TRAINING = build_option_table(SECTIONS)

OPTIONS: dict[str, Option] = TRAINING.options
"""Every option by its canonical name."""

NAMES: dict[str, str] = TRAINING.names
"""Any spelling to the canonical name."""


TASK_NAMES = ("task", "rlhf_type")
"""Names by which the sources say which task to run."""


def is_section_entry(name: str, value: Any) -> bool:
    """Whether `name: value` opens a section: `model: {...}` does, `model: DIR` does not."""
    return isinstance(value, dict) and (name in SECTIONS or name in SECTION_ALIASES)


@dataclass(frozen=True)
class Sections:
    """A configuration whose values are of the right type and range each, not yet checked against each other."""

    task: str
    model: ModelConfig
    lora: LoraConfig
    peft: NonLoraPeftConfig
    quantization: QuantizationConfig
    engine: EngineBackendConfig
    parallel: ParallelConfig
    data: DataConfig
    preference: PreferenceConfig
    rl: RlConfig
    vllm: VllmSamplerConfig
    train: TrainConfig
    trackers: TrackerConfig
    optim: OptimConfig
    fault_tolerance: FaultToleranceConfig
    launch: LaunchConfig
    given: frozenset[str] = field(compare=False)
    """Canonical names of what the user set."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What the user should know, though it is no mistake."""
    typed: Mapping[str, TypedOption] = field(default_factory=dict, compare=False, repr=False)
    """How the user wrote each option."""

    def value(self, name: str) -> Any:
        """The value of the option with this canonical name."""
        return getattr(getattr(self, OPTIONS[name].section), name)

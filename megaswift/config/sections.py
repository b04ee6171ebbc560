"""All sections of a training configuration together: the table of their options, and the record that rules read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.adapters.options.non_lora import NonLoraPeftConfig
from megaswift.data.options.data import DataConfig
from megaswift.engine.options.engine import EngineBackendConfig
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.losses.options.preference import PreferenceConfig
from megaswift.losses.options.retrieval import RetrievalConfig
from megaswift.models.options.model import ModelConfig
from megaswift.models.options.quantization import QuantizationConfig
from megaswift.options.option import Option, build_option_table
from megaswift.options.spelling import TypedOption
from megaswift.parallel.options.layout import ParallelConfig
from megaswift.rewards.options import RewardConfig
from megaswift.rollout.options.placement import PlacementConfig
from megaswift.rollout.options.rollout import RolloutConfig
from megaswift.rollout.options.vllm_engine import VllmSamplerConfig
from megaswift.run.faults.options import FaultToleranceConfig
from megaswift.trainers.distillation.options.distillation import DistillationConfig
from megaswift.trainers.options.checkpoint import CheckpointConfig
from megaswift.trainers.options.evaluation import EvaluationConfig
from megaswift.trainers.options.hub import HubConfig
from megaswift.trainers.options.profiling import ProfileConfig
from megaswift.trainers.options.schedule import ScheduleConfig
from megaswift.trainers.options.tracker import TrackerConfig
from megaswift.trainers.options.training import TrainConfig
from megaswift.trainers.rl.options.critic import CriticConfig
from megaswift.trainers.rl.options.rl import RlConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "lora": LoraConfig,
    "preference": PreferenceConfig,
    "distillation": DistillationConfig,
    "retrieval": RetrievalConfig,
    "rl": RlConfig,
    "rewards": RewardConfig,
    "rollout": RolloutConfig,
    "placement": PlacementConfig,
    "critic": CriticConfig,
    "checkpoint": CheckpointConfig,
    "evaluation": EvaluationConfig,
    "parallel": ParallelConfig,
    "engine": EngineBackendConfig,
    "launch": LaunchConfig,
    "trackers": TrackerConfig,
    "hub": HubConfig,
    "quantization": QuantizationConfig,
    "peft": NonLoraPeftConfig,
    "vllm": VllmSamplerConfig,
    "fault_tolerance": FaultToleranceConfig,
    "profiling": ProfileConfig,
}
"""Heading in a file -> section class, in the order in which someone who sets up a run needs them."""

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
    "tuner": "lora",
    "gkd": "distillation",
    "grpo": "rl",
    "ppo": "rl",
}
"""Other names of sections in a file. A heading only groups: any option may stand under any heading."""

TRAINING = build_option_table(SECTIONS, SECTION_ALIASES)
"""The option table of the training commands."""

OPTIONS: dict[str, Option] = TRAINING.options
"""Every option by its canonical name."""

NAMES: dict[str, str] = TRAINING.names
"""Any spelling of an option -> its canonical name."""


@dataclass(frozen=True)
class Sections:
    """A configuration in which each value has the right type and range; the rules check the values against each
    other."""

    task: str
    model: ModelConfig
    lora: LoraConfig
    peft: NonLoraPeftConfig
    quantization: QuantizationConfig
    engine: EngineBackendConfig
    parallel: ParallelConfig
    data: DataConfig
    preference: PreferenceConfig
    distillation: DistillationConfig
    retrieval: RetrievalConfig
    rl: RlConfig
    rollout: RolloutConfig
    placement: PlacementConfig
    rewards: RewardConfig
    critic: CriticConfig
    vllm: VllmSamplerConfig
    train: TrainConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    hub: HubConfig
    trackers: TrackerConfig
    profiling: ProfileConfig
    fault_tolerance: FaultToleranceConfig
    launch: LaunchConfig
    given: frozenset[str] = field(compare=False)
    """Canonical names of the options that the user set."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Lines for the user that are not mistakes."""
    typed: Mapping[str, TypedOption] = field(default_factory=dict, compare=False, repr=False)
    """How the user wrote each option."""

    def value(self, name: str) -> Any:
        """Return the value of the option with this canonical name."""
        return getattr(getattr(self, OPTIONS[name].section), name)

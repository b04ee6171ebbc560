"""Verifies the models and adapters that a run starts from, on all ranks together."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megaswift import distributed
from megaswift.config import SwiftConfig
from megaswift.folders import saved_steps
from megaswift.folders.checkpoint import MODEL, WEIGHTS
from megaswift.folders.source import locate_model
from megaswift.trainers.file_hashes import damaged_file_problems_all_ranks


def verify_source_steps(cfg: SwiftConfig) -> None:
    """Compares the steps that the run's models and adapters come from, so that no rank has to do it alone. Raises
    nothing: who opens a damaged step is refused. Collective."""
    for name in _sources(cfg):
        path = Path(name).expanduser()
        for step, parts in distributed.run_on_rank0(partial(_steps_at, path)):
            if not damaged_file_problems_all_ranks(step, parts) and saved_steps.enclosing_step_folder(path) is None:
                break


def verify_sources_and_locate_model(cfg: SwiftConfig, folder: Path) -> Path:
    """Check the model's folder and the run's other models, and return the folder: `folder`, or the one in an older step
    where --model is an output directory whose latest step is damaged. Collective."""
    verify_source_steps(cfg)
    if cfg.lora.adapters is not None:
        saved_steps.refuse_damaged_part(Path(cfg.lora.adapters))
    named = Path(str(cfg.model.model)).expanduser()
    return locate_model(cfg.model) if named.is_dir() and not cfg.model.random_init else folder


def _sources(cfg: SwiftConfig) -> list[str]:
    named = [
        cfg.model.model,
        cfg.preference.ref_model,
        cfg.critic.critic_model,
        cfg.distillation.teacher_model,
        cfg.lora.adapters,
        *cfg.rewards.reward_model,
    ]
    return list(dict.fromkeys(str(name) for name in named if name is not None))


def _steps_at(path: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The steps that a path may mean, in the order in which they are tried, with the folders of each that are read."""
    if not path.is_dir():
        return []
    step = saved_steps.enclosing_step_folder(path)
    if step is not None:
        within = path.absolute().relative_to(step).parts[:1]
        return [(step, within if within and within != (MODEL,) else WEIGHTS)]
    if (path / "config.json").is_file() or (path / "hf" / "config.json").is_file():
        return []
    return [(s, WEIGHTS) for store in (path / "checkpoints", path) for s in saved_steps.steps_in_resume_order(store)]

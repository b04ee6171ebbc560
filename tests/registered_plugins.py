"""What tests register with `megaswift.plugins` goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megaswift import plugins
from megaswift.data.formats import FORMATS
from megaswift.data.options.loss_scale import NAMED
from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS
from megaswift.losses import cpo, dpo_loss_types, kto, orpo, policy_loss_types, reward
from megaswift.losses.advantage_estimators import ESTIMATORS
from megaswift.losses.options.estimator_table import ESTIMATOR_NAMES, PLUGIN_ESTIMATORS
from megaswift.losses.options.loss_table import PLUGIN_LOSSES
from megaswift.losses.options.preference import LOSSES
from megaswift.models.family import FAMILIES
from megaswift.options.option import PLUGIN_CHOICES
from megaswift.options.plugins import PLUGINS
from megaswift.trainers.hook import PLUGIN_HOOKS


@contextmanager
def kept_registrations() -> Iterator[None]:
    """What is registered inside goes with the block."""
    tables: list[Any] = [PLUGIN_CHOICES, PLUGIN_LOSSES, PLUGIN_ESTIMATORS, PLUGIN_HOOKS, PLUGIN_OPTIMIZERS, LOSSES]
    tables += [ESTIMATOR_NAMES, NAMED, dpo_loss_types.LOSS_TYPES, policy_loss_types.LOSS_TYPES, PLUGINS.rewards]
    tables += [PLUGINS.environments, PLUGINS.orms, PLUGINS.script_formats, PLUGINS.of_script]
    tables += [module.LOSS_TYPES for module in (kto, cpo, orpo, reward)]
    tables += [PLUGINS.read, plugins._OWN, *(registry._items for registry in (FORMATS, ESTIMATORS, FAMILIES))]
    for registry in (FORMATS, FAMILIES):
        registry.names()
    kept = [(table, dict(table)) for table in tables]
    yield
    for table, was in kept:
        table.clear()
        table.update(was)
    PLUGINS.with_formats.clear()

"""What a row says of the loss of one message (`loss`, `loss_scale`), and what that makes of a turn.

Reading the fields belongs to `untokenized_sample.py`, applying them to text to `render.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class UniformLoss:
    """A message with `loss_scale: 1`: where it carries loss, all of it has weight 1, as in ms-swift, whatever the
    tables of `--loss_scale` say."""

    flag: bool | None = None
    """The message's `loss`; None: `--loss_scale` decides whether it carries loss."""


MessageLoss = bool | UniformLoss | None
"""The `loss` of a message, or None where the row gives none."""


def loss_flag(loss: MessageLoss) -> bool | None:
    """Whether the row itself includes or excludes the message."""
    return loss.flag if isinstance(loss, UniformLoss) else loss


def included(loss: MessageLoss) -> MessageLoss:
    """The same for a message that carries loss whatever `--loss_scale` says of its turn."""
    return UniformLoss(True) if isinstance(loss, UniformLoss) else True


class TurnLoss(enum.IntEnum):
    """The loss of a turn of the assistant, or of a part of one."""

    NONE = 0
    UNIFORM = 1
    """Weight 1 throughout."""
    BY_TABLES = 2
    """The weights of `--loss_scale`'s tables, 1 without any."""

"""What published configurations mean with some of their fields changed."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.errors import WeightsError
from megaswift.families import ModelSpec, family_of


def spec(base: dict[str, Any], **changes: Any) -> ModelSpec:
    """The spec of a published configuration with changes; `...` removes a field."""
    config = {k: v for k, v in {**base, **changes}.items() if v is not ...}
    return family_of(config).spec(config)


def refusals(base: dict[str, Any], **changes: Any) -> list[str]:
    """What is wrong with a configuration that is refused."""
    with pytest.raises(WeightsError) as caught:
        spec(base, **changes)
    return [str(problem) for problem in caught.value.problems]

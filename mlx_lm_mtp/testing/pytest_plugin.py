"""Fixtures for tests of drafters; `-p no:mlx_lm_mtp` turns them off.

pytest imports this module whenever it starts, so nothing else is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .models import TinyModel
    from .report import Report


@pytest.fixture(scope="session")
def check_drafter() -> Callable[..., Report]:
    """`mlx_lm_mtp.testing.check_drafter`, which runs all checks of a drafter."""
    from .suite import check_drafter

    return check_drafter


@pytest.fixture(scope="session")
def tiny_models() -> tuple[TinyModel, ...]:
    """`mlx_lm_mtp.testing.tiny_models()`, one model for every kind of cache."""
    from .models import tiny_models

    return tiny_models()

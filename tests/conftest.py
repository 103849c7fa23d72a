"""Hypothesis profiles, and what every test may use."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=25, **_SHARED)
settings.register_profile("dev", max_examples=10, **_SHARED)
settings.register_profile("nightly", max_examples=500, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Bit-equality is promised on the CPU, wherever the tests run.
mx.set_default_device(mx.cpu)


@pytest.fixture
def plugin():
    """The plugin turned on for one test, and off again."""
    import mlx_lm.generate  # noqa: F401

    import mlx_lm_mtp

    mlx_lm_mtp.install()
    yield
    mlx_lm_mtp.uninstall()

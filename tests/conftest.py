"""Hypothesis profiles, and what every test may use."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from servers import Server, Servers

_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=25, **_SHARED)
settings.register_profile("dev", max_examples=10, **_SHARED)
settings.register_profile("nightly", max_examples=500, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What is measured on this machine is kept there, and the user's own is left alone.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mlx-lm-mtp-")

# Bit-equality is promised on the CPU, wherever the tests run.
mx.set_default_device(mx.cpu)


@pytest.fixture(autouse=True)
def fixed_depth(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds draft k tokens, so that they can be counted, whatever seconds they take.

    Tests that are marked `throughput`, and all other processes, have the default.
    """
    from mlx_lm_mtp import generate, learnt

    # What one test has learnt, no other one is to know.
    monkeypatch.setattr(learnt, "KIND", f"depths-{uuid.uuid4().hex}")
    if request.node.get_closest_marker("throughput") is None:
        monkeypatch.setattr(generate, "learnt_of", lambda *of: None)


@pytest.fixture
def plugin():
    """The plugin turned on for one test, and off again."""
    import mlx_lm.generate  # noqa: F401

    import mlx_lm_mtp

    mlx_lm_mtp.install()
    yield
    mlx_lm_mtp.uninstall()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that the tests of a process share: to start one takes seconds.

    For requests that leave nothing behind but what is in the prompt cache.
    """
    from servers import Servers

    with contextlib.ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("served"), stack)


@pytest.fixture(scope="session")
def ours(served: Servers) -> Server:
    """A server with `--mtp`."""
    return served("--mtp")


@pytest.fixture(scope="session")
def stock(served: Servers) -> Server:
    """Stock's own."""
    return served(plugin=False)

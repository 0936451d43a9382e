"""What every suite runs in."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.ports import free_ports
from tests.steady_loop import SteadyLoop

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


# How long an example takes, or the search for one, is the machine's affair.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_asyncio_loop_factories() -> Mapping[str, type[SteadyLoop]]:
    return {"steady": SteadyLoop}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: some tests wait for a clock or for a process of their own."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among all the tests and what they import: it stays, and each look takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def unused_tcp_port() -> int:
    """A port for a server that is told where to listen."""
    (port,) = free_ports(1)
    return port

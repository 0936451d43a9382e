"""What every suite runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.ports import free_ports
from tests.steady_loop import SteadyLoop

if TYPE_CHECKING:
    from collections.abc import Mapping


# How long an example takes, or the search for one, is the machine's affair.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_asyncio_loop_factories() -> Mapping[str, type[SteadyLoop]]:
    return {"steady": SteadyLoop}


@pytest.fixture
def unused_tcp_port() -> int:
    """A port for a server that is told where to listen."""
    (port,) = free_ports(1)
    return port

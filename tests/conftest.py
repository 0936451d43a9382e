"""What every suite runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.steady_loop import SteadyLoop

if TYPE_CHECKING:
    from collections.abc import Mapping


def pytest_asyncio_loop_factories() -> Mapping[str, type[SteadyLoop]]:
    return {"steady": SteadyLoop}

"""Fleets whose legs meet in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.sim import Settings
from tests.flows.conftest import poll

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from coordinator.sim import SimFleet

KINDS = ("sglang", "mooncake")
HELLO = "Hello! How can I help you today?"


async def paired(
    fleet_of: Callable[..., Awaitable[SimFleet]], kind: str, *, dp_size: int = 1, **fleet: Any
) -> SimFleet:
    return await fleet_of(settings=Settings(kv=kind, dp_size=dp_size), **fleet)


def room(body: dict[str, Any]) -> tuple[Any, ...]:
    """Return what ties an SGLang leg to the other."""
    return tuple(body[f"bootstrap_{name}"] for name in ("host", "port", "room"))


def params(body: dict[str, Any]) -> dict[str, Any]:
    return body["kv_transfer_params"]  # type: ignore[no-any-return]


async def leaves_decode_waiting(fleet: SimFleet) -> None:
    """Expect a Mooncake decode whose prefill failed to keep its room: nobody can tell it."""
    if fleet.prefill.settings.kv == "mooncake":
        await poll(lambda: fleet.pairs.stranded)
        fleet.pairs.stranded.clear()

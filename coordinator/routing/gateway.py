"""One gateway address for every role; the endpoint picker behind it reads the role off a header of each leg.

All legs of one request carry the same decision id, so that a picker in the middle of a rollout sends them to workers of
one revision, encode legs that are in flight together included.

Source: llm-d ``pkg/coordinator/gateway``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.routing.router import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.context import RequestContext
    from envelope.errors import ApiError


class GatewayRouter:
    """
    Args:
        headers: what every leg carries; the role's profile is among them.
    """

    DECISION = "x-llm-d-revision-decision-id"

    def __init__(self, address: str, headers: Sequence[tuple[str, str]]) -> None:
        self._worker = Worker(address, headers)

    def serves(self, ctx: RequestContext) -> bool:
        ctx.carried.setdefault(self.DECISION, ctx.leg_id)
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = (), needs: str = "") -> Worker:
        return self._worker  # the picker behind it chooses anew

    def why_none(self, needs: str) -> str | None:
        return None

    def why(self, ctx: RequestContext, worker: Worker) -> str:
        return "the endpoint picker behind the gateway chooses"

    def uncached_tokens(self, ctx: RequestContext, most: int, tried: Sequence[Worker] = ()) -> int | None:
        return None

    def sending(self, ctx: RequestContext, worker: Worker) -> int:
        return 0

    def report(self, worker: Worker, error: ApiError | None) -> None:
        pass  # the health of what is behind it is the gateway's business

    def known(self) -> tuple[Worker, ...]:
        return (self._worker,)

    def at(self, ctx: RequestContext) -> Mapping[str, Worker]:
        return {}

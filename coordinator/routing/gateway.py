"""One gateway address for every role; the endpoint picker behind it reads the role off ``EPP-Profile``.

Source: llm-d ``pkg/coordinator/gateway``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.routing.router import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext


class GatewayRouter:
    """
    Args:
        headers: what every leg carries; the role's profile is among them.
    """

    def __init__(self, address: str, headers: Sequence[tuple[str, str]]) -> None:
        self._worker = Worker(address, headers)

    def serves(self, ctx: RequestContext) -> bool:
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = ()) -> Worker:
        return self._worker  # the picker behind it chooses anew

    def known(self) -> tuple[Worker, ...]:
        return (self._worker,)

"""What every way of choosing a worker has in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext


@dataclass(slots=True, eq=False)
class Worker:
    """One server that legs can be sent to.

    Attributes:
        url: base URL without a trailing slash.
        headers: what every leg to it carries; a key among them is changed in place when it is renewed.
        in_flight: legs that are being answered now.
    """

    url: str
    headers: Sequence[tuple[str, str]] = field(default=(), repr=False)
    in_flight: int = 0


class Router(Protocol):
    """The workers of one role, and the choice among them."""

    def serves(self, ctx: RequestContext) -> bool:
        """Say whether this request has a worker of the role; False leaves the role's leg out."""

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = ()) -> Worker | None:
        """Return the worker for one leg of this request; None when those that were tried are all there are."""

    def known(self) -> tuple[Worker, ...]:
        """Return the workers that can be asked for their health, which may be none."""

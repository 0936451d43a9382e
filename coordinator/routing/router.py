"""What every way of choosing a worker has in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from coordinator.context import RequestContext
    from envelope.errors import ApiError


@dataclass(slots=True)
class PoolLoad:
    """What the workers of a pool do together.

    Attributes:
        tokens: the sum of their tokens in flight.
        ordered: told of a worker whose load has changed in another way than by a leg that begins.
    """

    tokens: int = 0
    ordered: list[Callable[[Worker], None]] = field(default_factory=list)

    def changed(self, worker: Worker) -> None:
        for tell in self.ordered:
            tell(worker)


@dataclass(slots=True, eq=False)
class Worker:
    """One server that legs can be sent to.

    Attributes:
        url: base URL without a trailing slash.
        headers: what every leg to it carries; a key among them is changed in place when it is renewed.
        in_flight: legs that are being answered now.
        tokens: of their prompts, and something for each leg; 0 where the policy does not ask for it.
        failures: legs that failed in a row.
        lacks: routes and output modes that it is known not to serve, each with a sentence that says why.
    """

    url: str
    headers: Sequence[tuple[str, str]] = field(default=(), repr=False)
    pool: PoolLoad = field(default_factory=PoolLoad, repr=False)
    in_flight: int = 0
    tokens: int = 0
    failures: int = 0
    lacks: Mapping[str, str] = field(default_factory=dict, repr=False)

    def begin(self, tokens: int = 0) -> None:
        """Count a leg, and what it weighs."""
        self.in_flight += 1
        self.tokens += tokens
        self.pool.tokens += tokens

    def end(self, tokens: int = 0) -> None:
        """Count a leg no more; with the weight that it began with."""
        self.in_flight -= 1
        self.tokens -= tokens
        self.pool.tokens -= tokens
        self.pool.changed(self)


class Router(Protocol):
    """The workers of one role, and the choice among them."""

    def serves(self, ctx: RequestContext) -> bool:
        """Say whether this request has a worker of the role; False leaves the role's leg out."""

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = (), needs: str = "") -> Worker | None:
        """Return the worker for one leg of this request; None when those that were tried are all there are.

        Args:
            needs: the route or output mode that the worker must serve.
        """

    def why_none(self, needs: str) -> str | None:
        """Say why no worker serves what a leg needs; None where it is not for that."""

    def why(self, ctx: RequestContext, worker: Worker) -> str:
        """Say how the worker that was picked last came to be picked."""

    def uncached_tokens(self, ctx: RequestContext, most: int, tried: Sequence[Worker] = ()) -> int | None:
        """Return how many of the prompt's tokens the next worker was not sent before; None where nobody remembers.

        Args:
            most: from so many on they need not be counted.
        """

    def sending(self, ctx: RequestContext, worker: Worker) -> int:
        """Note that a leg of this request goes to a worker that was picked.

        Returns: the tokens that it counts as while it is in flight; 0 where nobody asks.
        """

    def report(self, worker: Worker, error: ApiError | None) -> None:
        """Take in how a leg ended, once: by an error, or well."""

    def known(self) -> tuple[Worker, ...]:
        """Return the workers that can be asked for their health, which may be none."""

    def at(self, ctx: RequestContext) -> Mapping[str, Worker]:
        """Return the workers that a leg of this request may go to, by origin; empty where nobody here knows them."""

"""When a failed leg is sent again: to whom, how soon, and how often before retrying does more harm than good.

A leg is tried again only while nothing of its answer has reached the client, on a worker that has not been tried, and
only after failures of the worker's side: no connection, a connection that broke, or 502, 503 and 504.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.background import longer_each_time

if TYPE_CHECKING:
    from coordinator.step import Leg
    from envelope.errors import LegError

_FIRST_WAIT_S = 0.025
_LONGEST_WAIT_S = 1.0


class RetryBudget:
    """Bounds retries to a share of all legs, so that an outage is not made worse by asking everybody twice.

    Args:
        share: retries that each leg pays for.
        reserve: retries that are there before any leg was sent, and the most that are ever saved up.

    Source: the retry budgets of Finagle and Envoy.
    """

    def __init__(self, share: float = 0.2, reserve: float = 10.0) -> None:
        self._share = share
        self._reserve = reserve
        self._left = reserve

    def deposit(self) -> None:
        """Note that a leg is sent for the first time."""
        self._left = min(self._reserve, self._left + self._share)

    def withdraw(self) -> bool:
        """Take one retry; False when there is none left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def may_go_on(leg: Leg, error: LegError, attempts: int) -> bool:
    """Say whether another worker may be asked: by this leg again, or, where it is ``spent``, from prefill on.

    Args:
        attempts: how often the leg has been sent.
    """
    return error.retryable and attempts < leg.limits.attempts


def spent(leg: Leg, error: LegError) -> bool:
    """Say whether a leg may not be sent again as it is.

    Blocks that a first reader may have fetched are no longer its prompt's: a second would get wrong text. And what ties
    a leg to another is good for one meeting.
    """
    return leg.tied or (leg.single_use and error.reached)


def wait_s(attempts: int) -> float:
    """Return how long to wait before the next attempt: nothing at first, then longer, never in step with others."""
    if attempts < 2:
        return 0.0
    return longer_each_time(attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S)

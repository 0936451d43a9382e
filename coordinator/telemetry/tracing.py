"""Trace context on its way through: a client's goes on to every leg, and a broken one does not.

This is the seam of tracing, and all of it that runs while nothing is exported: a request begins a trace, each call of a
worker is a leg of it. ``otel`` implements the same two protocols with spans.

A client's valid ``traceparent`` goes on as it came, with its ``tracestate``: there is no span of ours to put in its
place. Where there is none, or an invalid one, the legs of a request get a new one, so that the workers' own spans of
prefill and decode are found together.

Source: W3C Trace Context, section 3; W3C Baggage, section 3.3.2.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multidict import CIMultiDict

    from coordinator.context import Attempt, Headers, RequestContext
    from coordinator.outcome import Outcome
    from coordinator.step import Leg

TRACEPARENT, TRACESTATE, BAGGAGE = "traceparent", "tracestate", "baggage"

# Version ff is invalid, and so are ids of zeros; a version after 00 may have more fields.
_VALID = re.compile(
    r"(?:00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"|(?!00|ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?)",
    re.ASCII,
)

_NOT_ZERO = 1 << 64 | 1  # neither id may be

# What everybody has to carry on; more may be cut, by whole members.
_BAGGAGE_BYTES = 8192
_BAGGAGE_MEMBERS = 64


class LegTrace(Protocol):
    """One call of one worker."""

    @property
    def headers(self) -> Headers:
        """What the call carries in place of the request's trace headers."""

    def end(self, attempt: Attempt) -> None:
        """Say that nothing more comes; call it once."""


class Trace(Protocol):
    """One request."""

    def carry(self, headers: Headers) -> Headers:
        """Return a request's headers as its legs are to have them."""

    def leg(self, leg: Leg, url: str, number: int) -> LegTrace:
        """Begin a call of a worker; ``number`` is 0 for the first of a leg."""

    def end(self, ctx: RequestContext | None, outcome: Outcome) -> None:
        """Say how the request ended; call it once."""


class Tracing(Protocol):
    """Begins a trace with every request."""

    def begin(self, method: str, path: str, headers: CIMultiDict[str]) -> Trace:
        """Begin a request's trace; ``path`` is a route's, and has nothing of a client's in it."""


class _Leg:
    __slots__ = ()
    headers: Headers = ()

    def end(self, attempt: Attempt) -> None:
        pass


UNTOLD = _Leg()


class Passing:
    """Passes trace context on, and tells nobody of anything. Implements ``Tracing`` and ``Trace``."""

    def begin(self, method: str, path: str, headers: CIMultiDict[str]) -> Passing:
        return self if TRACEPARENT in headers or TRACESTATE in headers or BAGGAGE in headers else _BARE

    def carry(self, headers: Headers) -> Headers:
        names = [name.lower() for name, _ in headers]
        if BAGGAGE in names:
            headers = within_limits(headers)
            names = [name.lower() for name, _ in headers]
        if names.count(TRACEPARENT) == 1 and valid(headers[names.index(TRACEPARENT)][1]):
            return headers
        return (*without_trace(headers), (TRACEPARENT, new_traceparent()))

    def leg(self, leg: Leg, url: str, number: int) -> LegTrace:
        return UNTOLD

    def end(self, ctx: RequestContext | None, outcome: Outcome) -> None:
        pass


class _Bare(Passing):
    """A request without any context, as most are: there is nothing to look for."""

    def carry(self, headers: Headers) -> Headers:
        return (*headers, (TRACEPARENT, new_traceparent()))


PASSING, _BARE = Passing(), _Bare()


def valid(traceparent: str) -> bool:
    return _VALID.fullmatch(traceparent) is not None


def new_traceparent() -> str:
    """Return a root's context; it is sampled, as vLLM's own spans are where nobody asks."""
    ids = f"{random.getrandbits(192) | _NOT_ZERO:048x}"  # random, not secret
    return f"00-{ids[:32]}-{ids[32:]}-01"


def without_trace(headers: Headers) -> Headers:
    """Return the headers without trace context, which is only good as a whole."""
    return tuple(pair for pair in headers if pair[0].lower() not in (TRACEPARENT, TRACESTATE))


def within_limits(headers: Headers) -> Headers:
    """Return the headers with as much of the baggage as has to be carried, in one header."""
    members = [
        member.strip()
        for name, value in headers
        if name.lower() == BAGGAGE
        for member in value.split(",")
        if member.strip()
    ]
    kept, size = list[str](), -1
    for member in members[:_BAGGAGE_MEMBERS]:
        size += len(member) + 1
        if size > _BAGGAGE_BYTES:
            break
        kept.append(member)
    rest = tuple(pair for pair in headers if pair[0].lower() != BAGGAGE)
    return (*rest, (BAGGAGE, ",".join(kept))) if kept else rest

"""``Server-Timing``: how long a request waited and how long each of its legs took, for a browser's or a client's eyes.

Source: W3C, Server Timing; a metric's name is a token of RFC 9110, and ``dur`` is in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.outcome import numbered

if TYPE_CHECKING:
    from coordinator.context import RequestContext


def server_timing(ctx: RequestContext) -> str:
    """Return the header's value; of a stream, what is over when its head is sent."""
    times = [("queue", ctx.places.waited_s)] if ctx.places is not None and ctx.places.waited_s else []
    times += [(name, leg.seconds) for name, leg in numbered(ctx.legs)]
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in times)

"""Which headers travel, which are ours to set, and which a client may not send.

Source: RFC 9110 section 7.6.1 for hop-by-hop fields; llm-d's router for the routing headers.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from coordinator.context import Headers, RequestContext
    from coordinator.routing.router import Worker
    from coordinator.step import Leg

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    )
)

# Bodies are written anew for every leg and every answer, so whatever describes the old bytes is wrong.
FRAMING = frozenset(
    ("accept-encoding", "content-encoding", "content-length", "content-md5", "content-type", "digest", "expect", "host")
)

# They steer an endpoint picker or a worker. A client that could set them would choose its own workers. SGLang lets its
# own (x-override-) win over what the body says.
ROUTING = frozenset(
    (
        "epp-profile",
        "prefer",
        "x-data-parallel-host-port",
        "x-data-parallel-rank",
        "x-encoder-hosts-ports",
        "x-gateway-destination-endpoint",
        "x-kv-cache-source-host-port",
        "x-llm-d-epp-profile",
        "x-llm-d-revision-decision-id",
        "x-override-bootstrap-host",
        "x-override-bootstrap-port",
        "x-override-bootstrap-room",
        "x-override-disagg-prefill-dp-rank",
        "x-override-rid",
        "x-override-routed-dp-rank",
        "x-prefill-pin-host-port",
        "x-prefiller-host-port",
    )
)

# What a client proves itself with. Where we have checked it, workers need not know it.
CREDENTIALS = frozenset(("authorization", "x-api-key"))

# What every leg sets itself.
_EVERY_LEG = frozenset(("accept", "accept-encoding", "x-request-id"))

_NOT_UPSTREAM = HOP_BY_HOP | FRAMING | ROUTING | _EVERY_LEG
_NOT_DOWNSTREAM = HOP_BY_HOP | FRAMING | {"date", "server", "x-request-id", "set-cookie", "alt-svc"}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def decoded(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return a head's fields as text; what llhttp has found still has the blanks behind its values."""
    return [(name.decode("latin-1"), value.rstrip(b" \t").decode("utf-8", "surrogateescape")) for name, value in fields]


def upstream_headers(raw: Iterable[tuple[str, str]], also_drop: frozenset[str] = frozenset()) -> Headers:
    """Return the client's end-to-end headers, values of one name in their order.

    Args:
        also_drop: lower-case names that this configuration reads as routing.
    """
    return _kept(raw, _not_upstream(also_drop))


def downstream_headers(raw: Iterable[tuple[str, str]]) -> Headers:
    """Return what of a worker's response headers goes on to the client."""
    return _kept(raw, _NOT_DOWNSTREAM)


def passed_up(
    raw: Iterable[tuple[str, str]], also_drop: frozenset[str], own: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the headers of a request whose body goes on as it is, apart from its compression, which is undone.

    Args:
        own: what the worker is sent by us, such as a key in place of the client's.
    """
    pairs = list(raw)
    drop = HOP_BY_HOP | ROUTING | {"host", "expect", "x-request-id"} | also_drop | {name.lower() for name, _ in own}
    if any(name.lower() == "content-encoding" for name, _ in pairs):
        drop |= {"content-encoding", "content-length", "content-md5", "digest"}
    if "authorization" in drop:
        drop |= CREDENTIALS
    return [*_kept(pairs, drop), *own]


def passed_down(raw: Iterable[tuple[str, str]]) -> Headers:
    """Return the headers of an answer whose body goes back as it is."""
    return _kept(raw, _NOT_DOWNSTREAM - FRAMING)


def leg_headers(
    ctx: RequestContext, leg: Leg, worker: Worker, attempt: int = 0, trace: Headers = ()
) -> list[tuple[str, str]]:
    """Return every header that a leg is sent with, framing aside.

    Args:
        attempt: 0 for the first; a repeated leg has an id of its own, as the first may still be running.
        trace: the leg's own trace context, in place of the request's.
    """
    own_id = ctx.leg_id + leg.id_suffix + (f"-{attempt + 1}" if attempt and not leg.one_id else "")
    own = [
        ("Accept", "text/event-stream" if leg.body.get("stream") else "application/json"),
        ("Accept-Encoding", "identity"),
        ("X-Request-Id", own_id),
        *worker.headers,
        *leg.headers,
        *ctx.carried.items(),
        *trace,
    ]
    if len(own) == len(_EVERY_LEG):  # nothing else of ours, and the client's were left out before
        return [*ctx.headers, *own]
    ours = {name.lower() for name, _ in own}
    if "authorization" in ours:
        ours |= CREDENTIALS  # our key in place of the client's, in whichever header it came
    return [pair for pair in ctx.headers if pair[0].lower() not in ours] + own


def request_id(sent: str | None) -> str:
    """Return the client's own request id when it is safe to log and to send on, else a new one."""
    return sent if sent and _REQUEST_ID.fullmatch(sent) else os.urandom(16).hex()


def leg_id(request_id: str) -> str:
    """Return the id that workers get: it begins with the client's, and no two requests share one.

    A worker refuses or mixes up two live requests with the same id, and clients do repeat theirs.
    """
    return f"{request_id}-{os.urandom(4).hex()}"


@cache
def _not_upstream(also_drop: frozenset[str]) -> frozenset[str]:
    return _NOT_UPSTREAM | also_drop


def _kept(raw: Iterable[tuple[str, str]], drop: frozenset[str]) -> Headers:
    kept: list[tuple[str, str]] = []
    connection: list[str] = []
    for pair in raw:
        if (name := pair[0].lower()) not in drop:
            kept.append(pair)
        elif name == "connection":
            connection.append(pair[1])
    if connection and (listed := {token.strip().lower() for value in connection for token in value.split(",")}):
        return tuple([pair for pair in kept if pair[0].lower() not in listed])
    return tuple(kept)

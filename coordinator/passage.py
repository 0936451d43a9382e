"""Passes a request on to the local worker and its answer back, both while they come and neither of them looked into.

aiohttp's client does it and not ours, which is made for legs: here nothing is retried, rebuilt or kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from coordinator.headers import passed_down, passed_up
from envelope.errors import ApiError, LegFailed, LegTimeout, NoWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.http.request import Request
    from coordinator.intake import Intake
    from coordinator.plan import Plan

_STEP = "proxied route"
_CONNECT_S = 5.0
# A transcription, or an embedding in a full queue, may be silent for a while.
_SILENT_S = 600.0


class Passage:
    """The way to the local worker, for routes that the coordinator has no answer of its own to."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            # A connection each: one that was kept may be closed by the worker just as it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def pass_on(self, request: Request, plan: Plan, client_id: str) -> str:
        """Answer, to the end; return the outcome that is counted.

        Raises:
            TooLarge, ReadTimeout, UnsupportedMedia, BadRequest: the request's body is at fault.
            NoWorker, LegFailed, LegTimeout: the worker cannot be reached, or does not begin to answer.
            ConnectionError: the client left.
        """
        assert self._session is not None
        link = plan.upstream.links["decode"]
        (worker,) = link.router.known()
        body = _Body(request, plan.intake) if _has_body(request) else None
        headers = passed_up(request.headers.items(), plan.drop, worker.headers)
        try:
            answer = await self._session.request(
                request.method,
                _url(worker.url, request),
                headers=[*headers, ("X-Request-Id", client_id)],
                data=body,
                ssl=link.tls or True,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _told(error, body) from error
        async with answer:
            if answer.status < 200:  # an offer that nobody took up, or no status at all
                raise LegFailed(_STEP, f"the worker answered {answer.status}")
            _fail_with_connection(answer)
            return await _hand_back(request, answer, client_id)


class _Body:
    """A request's body, part by part; what is wrong with it is kept, as the client that reads it wraps it up."""

    def __init__(self, request: Request, intake: Intake) -> None:
        self.fault: ApiError | None = None
        self._parts = intake.parts(request)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._parts:
                yield part
        except ApiError as error:
            self.fault = error
            raise


def _has_body(request: Request) -> bool:
    return "Transfer-Encoding" in request.headers or bool(request.content_length)


async def _hand_back(request: Request, answer: aiohttp.ClientResponse, client_id: str) -> str:
    response = request.response
    response.begin(answer.status, [*passed_down(answer.headers.items()), ("X-Request-Id", client_id)])
    parts = answer.content.iter_any()
    while True:
        try:
            part = await anext(parts, None)
        except (aiohttp.ClientError, TimeoutError):
            response.hang_up()  # an end would look like a whole answer
            return "stream_broken"
        if part is None:
            break
        if not response.put(part):
            await response.drain()
    response.end()
    return "ok" if answer.status < 400 else "rejected" if answer.status < 500 else "leg_failed"


def _fail_with_connection(answer: aiohttp.ClientResponse) -> None:
    """Let a body fail when its connection ends before it does: aiohttp 3.14 waits on for one whose framing is wrong."""

    def fail(_: object) -> None:
        if not answer.content.is_eof() and answer.content.exception() is None:
            answer.content.set_exception(aiohttp.ClientPayloadError("the connection ended"))

    protocol = None if answer.connection is None else answer.connection.protocol
    if protocol is not None and protocol.closed is not None:
        protocol.closed.add_done_callback(fail)


def _url(worker: str, request: Request) -> URL:
    return URL(f"{worker}{request.path}{'?' if request.query else ''}{request.query}", encoded=True)


def _told(error: Exception, body: _Body | None) -> ApiError:
    if body is not None and body.fault is not None:
        return body.fault
    if isinstance(error, aiohttp.ServerTimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return LegTimeout(_STEP, "the worker did not answer in time")
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return NoWorker(_STEP, "the worker cannot be reached", headers={"Retry-After": "1"})
    return LegFailed(_STEP, "the connection to the worker broke before its answer began")

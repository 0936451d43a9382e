"""Listens, and gives each request to its route: exact paths alone, so that what else workers serve is out of reach."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.headers import request_id
from coordinator.http.connection import Connection, Patience
from coordinator.logs import log
from envelope.errors import (
    ApiError,
    ClientGone,
    InternalError,
    MethodNotAllowed,
    UnknownPath,
    error_body,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from coordinator.http.request import Request

    Handler = Callable[[Request], Awaitable[None]]
    """Answers a request: by ``request.response``, or by an ApiError that nobody has been told of."""

    Routes = Mapping[str, Mapping[str, Handler]]
    """By path and method; GET stands for HEAD too."""

# How often connections are looked at, unless a limit is shorter than a few such times.
_LOOK_S = 1.0

_ENDLESS = Patience()


def _untold(request_id: str, error: ApiError) -> None:
    """Stand for the recorder where there is none."""


class Server:
    """
    Args:
        routes: may be added to until the server listens.
        max_field_bytes: of the request line, and of a header's name and value.
        refused: told of every request that is refused before a route has it: its id, and why.

    Attributes:
        connections: those that are open.
        patience: how long they may be of no use.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        patience: Patience = _ENDLESS,
        max_field_bytes: int = 32768,
        refused: Callable[[str, ApiError], None] = _untold,
    ) -> None:
        self.connections: set[Connection] = set()
        self.patience = patience
        self.max_field_bytes = max_field_bytes
        self._routes = routes
        self._refused = refused
        self._listeners: list[asyncio.Server] = []
        self._looking: asyncio.TimerHandle | None = None
        limits = (patience.head_s, patience.idle_s, patience.write_stall_s)
        self._look_every_s = min([_LOOK_S, *(limit / 4 for limit in limits if limit)])

    async def listen(
        self,
        host: str | None,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        backlog: int = 128,
        shared: bool = False,
    ) -> None:
        """Take connections.

        Args:
            host: None is every address.
            shared: other processes may listen on the same port.

        Raises:
            OSError: the port is not to be had.
        """
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Connection(self, loop),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.patience.head_s,
            backlog=backlog,
            reuse_port=shared or None,
        )
        self._listeners.append(listener)
        if self._looking is None:
            self._look(loop)

    @property
    def addresses(self) -> list[str]:
        """Where it listens, ``host:port`` each."""
        names = [socket.getsockname() for listener in self._listeners for socket in listener.sockets]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port, *_ in names]

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop listening, let what is being answered end for so long, and close every connection."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            if connection.task is None:
                connection.close()
        if answering := [connection.task for connection in self.connections if connection.task is not None]:
            await asyncio.wait(answering, timeout=grace_s)
        stopped = [task for connection in list(self.connections) if (task := connection.give_up()) is not None]
        await asyncio.gather(*stopped, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._listeners.clear()

    async def answer(self, request: Request) -> None:
        """Give a request to its route, and tell its client of what the route could not.

        A fault of ours is logged; behind an answer that has begun, the connection is closed.
        """
        try:
            await self._handler(request)(request)
        except (ClientGone, ConnectionError):  # nobody is left to be told
            request.response.hang_up()
        except ApiError as error:
            self._tell(request, error)
        except Exception:
            log.exception("%s failed by a fault of the coordinator", request.path)
            self._tell(request, InternalError())

    def _tell(self, request: Request, error: ApiError) -> None:
        if request.response.status:
            request.response.hang_up()
        else:
            self.refuse(request, error)

    def refuse(self, request: Request, error: ApiError) -> None:
        """Answer a request that no route has taken, and tell of it."""
        client_id = request_id(request.headers.get("X-Request-Id"))
        self._refused(client_id, error)
        headers = refusal_headers(request, error, client_id)
        try:
            request.response.whole(error.status, headers, error_body(error, client_id))
        except ConnectionError:
            request.response.hang_up()

    def _handler(self, request: Request) -> Handler:
        """
        Raises:
            UnknownPath, MethodNotAllowed.
        """
        methods = self._routes.get(request.path)
        if methods is None:
            served = ", ".join(sorted(self._routes))
            raise UnknownPath(f"{_shown(request.path)} is not served here; the paths are {served}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(sorted([*methods, *(["HEAD"] if "GET" in methods else [])]))
            told = f"{request.path} takes {allowed}, not {request.method}"
            raise MethodNotAllowed(told, headers={"Allow": allowed})
        return handler

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.connections):
            connection.look(now)
        self._looking = loop.call_later(self._look_every_s, self._look, loop)


def text(request: Request, status: int, body: str) -> None:
    """Answer with a few lines for people and probes."""
    request.response.whole(status, [("Content-Type", "text/plain; charset=utf-8")], body.encode())


def refusal_headers(request: Request, error: ApiError, client_id: str) -> list[tuple[str, str]]:
    """Return the headers of an error's answer; where Connection is among its own, the response is told to close."""
    request.response.closes |= "Connection" in error.headers
    own = [(name, value) for name, value in error.headers.items() if name != "Connection"]
    return [("Content-Type", "application/json"), ("X-Request-Id", client_id), *own]


def _shown(path: str) -> str:
    return path if len(path) <= 200 else path[:197] + "..."

"""The worker that a request header names (sidecar mode), inside an allow-list.

A router in front of the sidecar picks the worker and writes ``host:port`` into the header; it may list several, which
are tried in their order. Without the header there is no such leg.

Source: llm-d ``pkg/sidecar`` (``x-prefiller-host-port``, ``--enable-ssrf-protection``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from coordinator.routing.router import Worker
from coordinator.settings.units import origin, parse_base_url
from envelope.errors import BadRequest, Forbidden

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.router import Router
    from coordinator.settings.units import AllowEntry
    from envelope.errors import ApiError

# Workers are remembered for their in-flight count alone, so the oldest may be forgotten.
_REMEMBERED = 4096

_DEFAULT_PORTS = {"http": 80, "https": 443}


class HeaderRouter:
    """Reads the worker off each request.

    Args:
        header: lower-case header name.
        allow: who may be named; anybody else is refused, since a header may come from outside.
        required: the role's leg cannot be left out, so every request must name a worker.
        spread: the role makes many legs of one request: each begins with the next worker, not all with the first.
        headers: what every leg carries.

    Attributes:
        other: where the leg goes that this one leaves its blocks for. None can fetch from itself, so naming a worker of
            those means "no leg of its own".
    """

    def __init__(
        self,
        header: str,
        allow: Sequence[AllowEntry],
        *,
        required: bool = False,
        spread: bool = False,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._headers = headers
        self._header = header
        self._allow = tuple(allow)
        self.other: Router | None = None
        self._required = required
        self._spread = spread
        self._turn = -1
        self._workers: OrderedDict[str, Worker] = OrderedDict()

    def serves(self, ctx: RequestContext) -> bool:
        named = self._named(ctx)
        if not named and self._required:
            raise self._none_named()
        return bool(named) and origin(named[0]) not in self._others(ctx)

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = (), needs: str = "") -> Worker | None:
        named = self._named(ctx)
        if not named:
            raise self._none_named()
        if self._spread:
            self._turn += 1
            first = self._turn % len(named)
            named = named[first:] + named[:first]
        never = {*self._others(ctx), *(origin(worker.url) for worker in tried)}
        url = next((url for url in named if origin(url) not in never), None)
        return None if url is None else self._worker(url)

    def why_none(self, needs: str) -> str | None:
        return None

    def why(self, ctx: RequestContext, worker: Worker) -> str:
        return f"named by the header {self._header}"

    def uncached_tokens(self, ctx: RequestContext, most: int, tried: Sequence[Worker] = ()) -> int | None:
        return None

    def sending(self, ctx: RequestContext, worker: Worker) -> int:
        return 0

    def report(self, worker: Worker, error: ApiError | None) -> None:
        pass  # who named the worker chooses among the well ones

    def known(self) -> tuple[Worker, ...]:
        return ()

    def at(self, ctx: RequestContext) -> Mapping[str, Worker]:
        return {origin(url): self._worker(url) for url in self._named(ctx)}

    def _others(self, ctx: RequestContext) -> Mapping[str, Worker]:
        return {} if self.other is None else self.other.at(ctx)

    def _worker(self, url: str) -> Worker:
        worker = self._workers.setdefault(url, Worker(url, self._headers))
        self._workers.move_to_end(url)
        if len(self._workers) > _REMEMBERED:
            self._workers.popitem(last=False)
        return worker

    def _none_named(self) -> BadRequest:
        return BadRequest(f"the request needs the header {self._header}: host:port of a worker", param=self._header)

    def _named(self, ctx: RequestContext) -> list[str]:
        """Return the base URLs that the header names, each inside the allow-list."""
        urls = []
        for value in ctx.routing.get(self._header, "").split(","):
            if name := value.strip():
                urls.append(self._url(name))
        return urls

    def _url(self, name: str) -> str:
        try:
            url = parse_base_url(name if "://" in name else f"http://{name}")
        except ValueError:
            raise BadRequest(f"{self._header} must be host:port of a worker", param=self._header) from None
        self._check(url)
        return url

    def _check(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        host, port = _split(rest, _DEFAULT_PORTS[scheme])
        if not any(entry.admits(host, port) for entry in self._allow):
            raise Forbidden(f"{self._header} names a worker outside the allow-list", param=self._header)


def _split(netloc: str, default_port: int) -> tuple[str, int]:
    if netloc.startswith("["):
        host, _, rest = netloc[1:].partition("]")
        return host, int(rest[1:]) if rest else default_port
    host, _, port = netloc.partition(":")
    return host, int(port) if port else default_port

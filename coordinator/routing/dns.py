"""Workers by the records of a DNS name, asked again when they run out.

An answer without records fails the look-up, as no answer does: a name server that restarts or has not caught up says
so too, and a pool should not be emptied by one answer.

Source: RFC 1035; RFC 2782 for SRV records.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver

from coordinator.routing.discovery import LookupFailed
from coordinator.settings.units import split_host_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from coordinator.settings.lookup import Dns

# Of one name, in this order, until there is an answer.
_RECORDS = {"address": ("A", "AAAA"), "a": ("A",), "aaaa": ("AAAA",), "srv": ("SRV",)}


class DnsSource:
    """Implements ``coordinator.routing.discovery.Source``.

    Args:
        sleep: waits for so many seconds.
    """

    def __init__(self, settings: Dns, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._settings = settings
        self._sleep = sleep

    async def found(self) -> AsyncGenerator[list[str], None]:
        while True:
            urls, ttl_s = await self._look_up()
            yield urls
            await self._sleep(min(max(ttl_s, self._settings.min_interval), self._settings.max_interval))

    async def _look_up(self) -> tuple[list[str], float]:
        """Return the workers and for how many seconds that may be believed."""
        *first, last = _RECORDS[self._settings.records]
        for kind in first:
            try:
                return await self._ask(kind)
            except dns.resolver.NoAnswer:
                pass
            except dns.exception.DNSException as error:
                raise self._failed(kind, error) from error
        try:
            return await self._ask(last)
        except dns.exception.DNSException as error:
            raise self._failed(last, error) from error

    async def _ask(self, kind: str) -> tuple[list[str], float]:
        answer = await _resolver(self._settings).resolve(
            self._settings.name, kind, lifetime=self._settings.timeout, search=True
        )
        _be_cancelled()
        hosts = _targets(answer) if kind == "SRV" else [(record.address, self._settings.port) for record in answer]
        if not hosts:
            raise LookupFailed(f"DNS says that there is no service {self._settings.name}")
        urls = {f"{self._settings.scheme}://{_netloc(*host)}" for host in hosts}
        return sorted(urls), answer.chaining_result.minimum_ttl

    def _failed(self, kind: str, error: dns.exception.DNSException) -> LookupFailed:
        name = self._settings.name
        match error:
            case dns.resolver.NXDOMAIN():
                return LookupFailed(f"DNS has no name {name}")
            case dns.resolver.NoAnswer():
                return LookupFailed(f"the DNS name {name} has no {kind} records")
            case dns.resolver.LifetimeTimeout():
                return LookupFailed(f"no name server answered for {name} within {self._settings.timeout:g} s")
            case dns.resolver.NoNameservers():
                return LookupFailed(f"no name server could answer for {name}")
            case _:
                return LookupFailed(f"looking up {name} failed: {error}")


def _be_cancelled() -> None:
    """End here if we were told to: the wait_for of Python 3.11, which dnspython uses, may lose a cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _resolver(settings: Dns) -> dns.asyncresolver.Resolver:
    """Return a resolver; made anew for each look-up, since /etc/resolv.conf may change."""
    if not settings.resolvers:
        return dns.asyncresolver.Resolver()
    resolver = dns.asyncresolver.Resolver(configure=False)
    servers = [split_host_port(server) for server in settings.resolvers]
    resolver.nameservers = [dns.nameserver.Do53Nameserver(host, int(port or 53)) for host, port in servers]
    return resolver


def _targets(answer: Any) -> list[tuple[str, int]]:
    """Return host and port of the records that are to be used first; their weights are left to the pool's policy."""
    best = min(record.priority for record in answer)
    used = [record for record in answer if record.priority == best]
    named = [(record.target.to_text(omit_final_dot=True).lower(), record.port) for record in used]
    return [(host, port) for host, port in named if host != "."]  # RFC 2782: "." is no service at all


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

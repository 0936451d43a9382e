"""What workers say of their own load: requests that wait and how full the KV cache is, read off their ``/metrics``.

They are asked in the background, never for a request. What a worker said is good for a while; without it, a worker is
judged by the legs that it has from here.

Source: vLLM's metrics ``vllm:num_requests_waiting`` and ``vllm:kv_cache_usage_perc``, once ``gpu_cache_usage_perc``.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from coordinator.logs import log

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from coordinator.background import Faults
    from coordinator.routing.router import Worker

# A full KV cache keeps a new request waiting for about as long as so many that are in the queue.
_FULL_CACHE = 10.0
_MAX_BYTES = 1 << 22
_AT_ONCE = 64

_WAITING = re.compile(rb"^vllm:num_requests_waiting(?:\{[^}\n]*\})? +(\S+)", re.MULTILINE)
_KV_USAGE = re.compile(rb"^vllm:(?:kv|gpu)_cache_usage_perc(?:\{[^}\n]*\})? +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Report:
    """
    Attributes:
        waiting: requests in the worker's queue, of all its engines.
        kv_usage: of its fullest engine, 0 to 1.
        in_flight: the legs that it had from here when it said so.
        at: when that was, in seconds of the clock.
    """

    waiting: float
    kv_usage: float
    in_flight: int
    at: float


class Reports:
    """What each worker said last."""

    def __init__(self) -> None:
        self._last: dict[Worker, Report] = {}

    def pressure(self, worker: Worker) -> float:
        """Return how much stands in the way of one more request: about how many wait before it."""
        report = self._last.get(worker)
        if report is None:
            return worker.in_flight
        return report.waiting + _FULL_CACHE * report.kv_usage + max(0, worker.in_flight - report.in_flight)

    def told(self, worker: Worker) -> str:
        """Say what a worker's pressure is made of."""
        report = self._last.get(worker)
        if report is None:
            return f"{worker.in_flight} legs in flight and no metrics of late"
        since = max(0, worker.in_flight - report.in_flight)
        return f"{report.waiting:g} waiting, KV cache {report.kv_usage:.0%} full, {since} legs more since"

    def put(self, worker: Worker, report: Report) -> None:
        self._last[worker] = report

    def expire(self, before: float, known: Sequence[Worker]) -> list[Worker]:
        """Forget what was said before a time, and all of those that are not known; return whose was forgotten."""
        here = frozenset(known)
        old = [worker for worker, report in self._last.items() if report.at < before or worker not in here]
        for worker in old:
            del self._last[worker]
        return old


@dataclass(frozen=True, slots=True)
class Asking:
    """How workers are asked; times in seconds.

    Attributes:
        stale_after_s: how long a report is gone by.
    """

    interval_s: float
    timeout_s: float
    stale_after_s: float
    tls: ssl.SSLContext | None = None


class LoadWatch:
    """Keeps ``reports`` up to date.

    Args:
        known: the workers of now.
        changed: told of each worker whose report is another now.
    """

    def __init__(
        self,
        reports: Reports,
        known: Callable[[], Sequence[Worker]],
        changed: Callable[[Worker], None],
        asking: Asking,
    ) -> None:
        self._reports = reports
        self._known = known
        self._changed = changed
        self._asking = asking
        self._silent: set[str] = set()

    async def run(self, faults: Faults) -> None:
        """Ask for ever; the owner cancels."""
        timeout = aiohttp.ClientTimeout(total=self._asking.timeout_s)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                async with asyncio.TaskGroup() as tasks:
                    for worker in self._known():
                        tasks.create_task(self._ask(worker, session, faults))
                oldest = asyncio.get_running_loop().time() - self._asking.stale_after_s
                for worker in self._reports.expire(oldest, self._known()):
                    self._changed(worker)
                await asyncio.sleep(self._asking.interval_s)

    async def _ask(self, worker: Worker, session: aiohttp.ClientSession, faults: Faults) -> None:
        try:
            report = await self._report(worker, session)
        except Exception as error:  # the others are to be asked all the same
            faults.tell("load", error)
            report = None
        if report is not None:
            self._silent.discard(worker.url)
            self._reports.put(worker, report)
            self._changed(worker)
        elif worker.url not in self._silent:
            self._silent.add(worker.url)
            log.warning("%s/metrics cannot be read: its load is judged by the legs in flight", worker.url)

    async def _report(self, worker: Worker, session: aiohttp.ClientSession) -> Report | None:
        in_flight, now = worker.in_flight, asyncio.get_running_loop().time()
        try:
            url, tls = f"{worker.url}/metrics", self._asking.tls or True
            async with session.get(url, headers=worker.headers, ssl=tls, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                page = await _whole(answer)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return None if page is None else read(page, in_flight, now)


async def _whole(answer: aiohttp.ClientResponse) -> bytes | None:
    """Return a page, which comes in many pieces; None where it is larger than any page of metrics."""
    page = bytearray()
    async for piece in answer.content.iter_any():
        page += piece
        if len(page) > _MAX_BYTES:
            return None
    return bytes(page)


def read(page: bytes, in_flight: int, at: float) -> Report | None:
    """Return what a page of metrics says; None when it says nothing of a queue."""
    try:
        waiting = [float(value) for value in _WAITING.findall(page)]
        usage = [float(value) for value in _KV_USAGE.findall(page)]
    except ValueError:
        return None
    return Report(sum(waiting), max(usage, default=0.0), in_flight, at) if waiting else None

"""load_aware goes by what workers say of their queue and cache, and by its own legs where they say nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from coordinator.routing.load import Asking, LoadWatch, Report, Reports, read
from coordinator.routing.policies import LeastLoaded
from coordinator.routing.router import PoolLoad, Worker
from tests.background import FaultsTold
from tests.bounds import HANG_S
from tests.coordinator.routing.pools import URLS, asked, letters, made

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = b"""# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:num_requests_running{engine="0"} 50.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


def test_a_page_is_read_over_all_engines_of_a_worker() -> None:
    assert read(PAGE, 2, 7.0) == Report(7.0, 0.5, 2, 7.0)


@pytest.mark.parametrize(
    ("page", "report"),
    [
        (b"vllm:num_requests_waiting 1\nvllm:gpu_cache_usage_perc 0.75\n", Report(1.0, 0.75, 0, 0.0)),
        (b"vllm:num_requests_waiting 1e1", Report(10.0, 0.0, 0, 0.0)),
        (b"vllm:num_requests_waiting{} one\n", None),
        (b"process_cpu_seconds_total 1\n", None),
        (b"", None),
    ],
)
def test_a_page_without_a_queue_says_nothing(page: bytes, report: Report | None) -> None:
    assert read(page, 0, 0.0) == report


def test_the_worker_with_the_shortest_queue_is_chosen_and_its_own_legs_since_count() -> None:
    pool, reports = PoolLoad(), Reports()
    policy = LeastLoaded(pool, reports.pressure, reports.told)
    a, b = workers = [Worker(url, (), pool) for url in URLS[:2]]
    policy.use(workers)
    for worker, report in ((a, Report(2, 0.1, 0, 0.0)), (b, Report(0, 0.0, 0, 0.0))):
        reports.put(worker, report)
        policy.enter(worker)
    for _ in range(3):
        assert policy.choose(asked()) is b
        b.begin()
    b.begin()
    assert policy.choose(asked()) is a
    assert policy.why(b) == "the least loaded, with 0 waiting, KV cache 0% full, 4 legs more since"


def test_a_full_cache_counts_as_ten_that_wait() -> None:
    reports, full, busy = Reports(), Worker("http://full"), Worker("http://busy")
    reports.put(full, Report(0, 1.0, 0, 0.0))
    reports.put(busy, Report(9, 0.0, 0, 0.0))
    assert reports.pressure(full) == 10 > reports.pressure(busy)


def test_a_worker_that_says_nothing_is_judged_by_its_legs() -> None:
    reports, worker = Reports(), Worker("http://a")
    worker.begin()
    assert reports.pressure(worker) == 1
    assert reports.told(worker) == "1 legs in flight and no metrics of late"


def test_what_was_said_too_long_ago_is_forgotten_and_what_workers_said_that_left() -> None:
    reports, a, b, c = Reports(), *(Worker(url) for url in URLS)
    for worker, at in ((a, 1.0), (b, 9.0), (c, 9.0)):
        reports.put(worker, Report(5, 0.0, 0, at))
    assert set(reports.expire(5.0, [a, b])) == {a, c}
    assert [reports.pressure(worker) for worker in (a, b, c)] == [0, 5, 0]


class Metrics:
    """A server whose /metrics answers what ``page`` has, which may change; it keeps the keys that it was shown."""

    def __init__(self) -> None:
        self.page = b""
        self.status = 200
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.Response(body=self.page, status=self.status)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not true():
            await asyncio.sleep(0.002)


async def test_workers_are_asked_in_the_background_and_one_that_falls_silent_is_told_of_once(
    aiohttp_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app, says = web.Application(), Metrics()
    app.router.add_get("/metrics", says.answer)
    url = str((await aiohttp_server(app)).make_url("/")).rstrip("/")
    says.page = b"vllm:num_requests_waiting 6\n"
    worker, reports, changed = Worker(url, (("Authorization", "Bearer k"),)), Reports(), list[Worker]()
    watch = LoadWatch(reports, lambda: (worker,), changed.append, Asking(0.002, 5.0, 0.5))
    with caplog.at_level(logging.WARNING, "coordinator"):
        running = asyncio.ensure_future(watch.run(FaultsTold()))
        try:
            await until(lambda: reports.pressure(worker) == 6)
            says.page = b"vllm:num_requests_waiting 2\n"
            await until(lambda: reports.pressure(worker) == 2)
            says.status = 500
            await until(lambda: reports.pressure(worker) == 0)
            asked_so_far = len(says.keys)
            await until(lambda: len(says.keys) > asked_so_far + 3)
        finally:
            running.cancel()
            await asyncio.wait((running,))
    assert set(says.keys) == {"Bearer k"} and set(changed) == {worker}
    assert [record.getMessage() for record in caplog.records] == [
        f"{url}/metrics cannot be read: its load is judged by the legs in flight"
    ]


async def test_a_page_that_comes_in_pieces_is_read_to_its_end(aiohttp_server: Any) -> None:
    """A worker has some hundred kilobytes of histograms, and what is looked for may stand behind them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"vllm:num_requests_waiting 6\nvllm:kv_cache_", b"usage_perc 0.", b"5\n"):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    worker, reports = Worker(str((await aiohttp_server(app)).make_url("/")).rstrip("/")), Reports()
    watch = LoadWatch(reports, lambda: (worker,), lambda _: None, Asking(1.0, 5.0, 60.0))
    running = asyncio.ensure_future(watch.run(FaultsTold()))
    try:
        await until(lambda: worker in reports._last)
    finally:
        running.cancel()
        await asyncio.wait((running,))
    assert (reports._last[worker].waiting, reports._last[worker].kv_usage) == (6, 0.5)


async def test_a_fault_of_ours_in_asking_one_worker_leaves_the_others_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, reports, faults = (Worker("http://a"), Worker("http://b")), Reports(), FaultsTold()
    watch = LoadWatch(reports, lambda: workers, lambda _: None, Asking(0.001, 5.0, 60.0))

    async def report(worker: Worker, session: object) -> Report:
        if worker is workers[0]:
            raise ZeroDivisionError
        return Report(7.0, 0.0, 0, asyncio.get_running_loop().time())

    monkeypatch.setattr(watch, "_report", report)
    running = asyncio.ensure_future(watch.run(faults))
    try:
        await until(lambda: faults.counts["load"] >= 3)
    finally:
        running.cancel()
        await asyncio.wait((running,))
    assert [reports.pressure(worker) for worker in workers] == [0, 7]


def test_the_file_s_policy_and_the_watch_share_what_is_known() -> None:
    router = made("load_aware")
    assert router.watch is not None
    assert letters(router, 3) == "abc"
    a, b, _ = router.known()
    for worker in (a, b):
        router.watch._reports.put(worker, Report(4, 0.0, 0, 0.0))
        router.watch._changed(worker)
    assert letters(router, 3) == "ccc"

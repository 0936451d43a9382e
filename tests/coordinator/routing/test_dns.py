"""Workers by DNS, over real sockets: which records become which workers, and when they are asked for again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import dns.asyncresolver
import pytest

from coordinator.routing.discovery import LookupFailed
from coordinator.routing.dns import DnsSource
from coordinator.settings.lookup import Dns
from tests.bounds import HANG_S
from tests.dns_server import DnsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "pool.test."
PORT = {"port": 8000}


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with DnsServer() as server:
        yield server


def source(server: DnsServer, sleep: Any = asyncio.sleep, **settings: Any) -> DnsSource:
    given = {"name": NAME, "resolvers": [server.address], "timeout": "3s", **settings}
    return DnsSource(Dns.model_validate(given), sleep)


async def first(source: DnsSource) -> list[str]:
    answers = source.found()
    try:
        return await anext(answers)
    finally:
        await answers.aclose()


# (settings, records, workers)
ANSWERS: list[tuple[dict[str, Any], dict[tuple[str, str], tuple[int, list[str]]], list[str]]] = [
    (PORT, {(NAME, "A"): (5, ["10.0.0.2", "10.0.0.1"])}, ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
    (PORT, {(NAME, "A"): (5, ["10.0.0.1"]), (NAME, "AAAA"): (5, ["2001:db8::1"])}, ["http://10.0.0.1:8000"]),
    (PORT, {(NAME, "AAAA"): (5, ["2001:db8::1"])}, ["http://[2001:db8::1]:8000"]),
    (
        {**PORT, "records": "aaaa"},
        {(NAME, "A"): (5, ["10.0.0.1"]), (NAME, "AAAA"): (5, ["2001:db8::1"])},
        ["http://[2001:db8::1]:8000"],
    ),
    ({**PORT, "scheme": "https"}, {(NAME, "A"): (5, ["10.0.0.1"])}, ["https://10.0.0.1:8000"]),
    (
        PORT,
        {(NAME, "CNAME"): (5, ["real.test."]), ("real.test.", "A"): (5, ["10.0.0.9"])},
        ["http://10.0.0.9:8000"],
    ),
    (
        {"records": "srv"},
        {(NAME, "SRV"): (5, ["0 5 8001 B.test.", "0 9 8000 a.test.", "7 1 8002 spare.test."])},
        ["http://a.test:8000", "http://b.test:8001"],
    ),
]


@pytest.mark.parametrize(("settings", "records", "workers"), ANSWERS)
async def test_records_become_workers(
    server: DnsServer, settings: dict[str, Any], records: dict[Any, Any], workers: list[str]
) -> None:
    """SRV: those of the best priority. A service of both families has each pod twice, and one of them counts."""
    server.records = records
    assert await first(source(server, **settings)) == workers


async def test_an_answer_too_large_for_udp_is_asked_for_over_tcp(server: DnsServer) -> None:
    server.records = {(NAME, "A"): (5, [f"10.0.{i // 250}.{i % 250}" for i in range(500)])}
    server.truncates = True
    assert len(await first(source(server, **PORT))) == 500
    assert server.asked == [(NAME, "A", "udp"), (NAME, "A", "tcp")]


# (records, rcode, settings, the sentence)
FAILURES: list[tuple[dict[tuple[str, str], tuple[int, list[str]]], str, dict[str, Any], str]] = [
    ({}, "", PORT, "DNS has no name pool.test."),
    ({(NAME, "TXT"): (5, ["x"])}, "", PORT, "the DNS name pool.test. has no AAAA records"),
    ({(NAME, "TXT"): (5, ["x"])}, "", {**PORT, "records": "a"}, "the DNS name pool.test. has no A records"),
    ({(NAME, "SRV"): (5, ["0 0 0 ."])}, "", {"records": "srv"}, "DNS says that there is no service pool.test."),
    ({}, "SERVFAIL", {**PORT, "timeout": "1s"}, "no name server could answer for pool.test."),
    ({}, "REFUSED", {**PORT, "timeout": "1s"}, "no name server could answer for pool.test."),
]


@pytest.mark.parametrize(("records", "rcode", "settings", "sentence"), FAILURES)
async def test_an_answer_without_workers_is_a_failure_that_says_why(
    server: DnsServer, records: dict[Any, Any], rcode: str, settings: dict[str, Any], sentence: str
) -> None:
    server.records, server.rcode = records, rcode
    with pytest.raises(LookupFailed, match="^" + sentence.replace(".", r"\.") + "$"):
        await first(source(server, **settings))


async def test_no_answer_in_time_is_a_failure(server: DnsServer) -> None:
    server.silent = True
    with pytest.raises(LookupFailed, match=r"^no name server answered for pool\.test\. within 0\.1 s$"):
        await first(source(server, **PORT, timeout="100ms"))


async def test_the_second_name_server_is_asked_where_the_first_is_broken(server: DnsServer) -> None:
    server.records = {(NAME, "A"): (5, ["10.0.0.1"])}
    async with DnsServer(rcode="SERVFAIL") as broken:
        found = source(server, **PORT, resolvers=[broken.address, server.address])
        assert await first(found) == ["http://10.0.0.1:8000"]
        assert broken.asked


# (TTL of the records, floor, ceiling, how long is waited)
INTERVALS = [(7, 5, 30, 7), (0, 5, 30, 5), (3600, 5, 30, 30)]


@pytest.mark.parametrize(("ttl_s", "floor_s", "ceiling_s", "waited_s"), INTERVALS)
async def test_it_is_asked_again_when_the_records_have_run_out_within_bounds(
    server: DnsServer, ttl_s: int, floor_s: int, ceiling_s: int, waited_s: int
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    server.records = {(NAME, "CNAME"): (ttl_s, ["real.test."]), ("real.test.", "A"): (9999, ["10.0.0.1"])}
    answers = source(server, sleep, **PORT, min_interval=f"{floor_s}s", max_interval=f"{ceiling_s}s").found()
    assert await anext(answers) == ["http://10.0.0.1:8000"]
    server.records["real.test.", "A"] = (9999, ["10.0.0.2"])
    assert await anext(answers) == ["http://10.0.0.2:8000"]
    await answers.aclose()
    assert waited == [waited_s]


async def test_a_cancellation_that_the_resolver_loses_is_heard_all_the_same(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for of Python 3.11 returns its result where both come at once; who waits would wait for ever."""
    server.records = {(NAME, "A"): (5, ["10.0.0.1"])}
    resolve = dns.asyncresolver.Resolver.resolve
    looking_up = asyncio.Event()

    async def losing(self: Any, *args: Any, **options: Any) -> Any:
        answer = await resolve(self, *args, **options)
        looking_up.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(dns.asyncresolver.Resolver, "resolve", losing)
    looking = asyncio.create_task(first(source(server, **PORT)))
    async with asyncio.timeout(HANG_S):
        await looking_up.wait()
        looking.cancel()
        await asyncio.wait((looking,))
    assert looking.cancelled()


async def test_a_look_up_that_is_given_up_leaves_nothing_behind(server: DnsServer) -> None:
    server.silent = True
    looking = asyncio.create_task(first(source(server, **PORT)))
    async with asyncio.timeout(HANG_S):
        while not server.asked:
            await asyncio.sleep(0.005)
    looking.cancel()
    await asyncio.wait((looking,))
    assert looking.cancelled()

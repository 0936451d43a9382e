"""More requests than there is room for: who waits, who is refused, and that a refusal has cost no worker anything."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from coordinator.logs import access
from coordinator.sim import Fault
from envelope.errors import LegFailed
from tests.flows.wire import connect, head

CHAT = "/v1/chat/completions"
ANSWER = {"id": "a", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": "hi"}}]}


class Held:
    """A worker that answers a request when it is told to, in the order in which they came."""

    def __init__(self, scripted, requests):
        self.go = [asyncio.Event() for _ in range(requests)]
        self.answers = [[event, *scripted.json(ANSWER)] for event in self.go] + [scripted.json(ANSWER)]


@pytest.fixture
async def held(coordinator, fleet, scripted):
    """``at, worker, go = await held(requests, server={..})``: a decode worker whose nth answer waits for ``go[n]``."""
    every = []

    async def start(requests, pool=None, **changes):
        script = Held(scripted, requests)
        every.extend(script.go)
        worker = await scripted(*script.answers)
        pools = {"decode": {"endpoints": [worker.url], **(pool or {})}}
        return await coordinator(fleet, "alone", pools=pools, **changes), worker, script.go

    yield start
    for event in every:
        event.set()


@asynccontextmanager
async def asked(at, ask, eventually, worker, count):
    """Send requests until the worker has ``count`` of them more."""
    async with AsyncExitStack() as stack:
        before = len(worker.received)
        lives = [await stack.enter_async_context(at.open(CHAT, ask())) for _ in range(count)]
        await eventually(lambda: len(worker.received) == before + count)
        yield lives


async def queued(at, eventually, count):
    await eventually(lambda: at.front.plan.admission.waiting == count)
    assert await at.count("coordinator_requests_queued") == count


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, lambda body: body["error"]["type"]),
        ("/v1/messages", lambda body: body["error"]["type"]),
        ("/v1/messages/count_tokens", lambda body: body["error"]["type"]),
    ],
)
async def test_a_full_queue_is_a_429_before_the_body_is_read(held, ask, eventually, path, kind):
    """The refused request's body has not even been sent: its head is enough, and no worker hears of it."""
    at, worker, _ = await held(1, server={"max_concurrency": 1, "queue_size": 0})
    async with asked(at, ask, eventually, worker, 1), connect(at.url) as wire:
        await wire.send(head(path, "Content-Type: application/json", "Content-Length: 1000"))
        got = await wire.answer()
    assert (got.status, got.headers["Retry-After"]) == (429, "1")
    assert kind(got.body) == ("RateLimitError" if path == CHAT else "rate_limit_error")
    assert "queue is full" in got.body["error"]["message"]
    assert len(worker.received) == 1


async def test_a_refusal_for_want_of_room_is_counted_as_overloaded(held, ask, eventually):
    at, worker, _ = await held(1, server={"max_concurrency": 1, "queue_size": 0})
    async with asked(at, ask, eventually, worker, 1):
        assert [(await at.chat()).status for _ in range(3)] == [429] * 3
    assert await at.count("coordinator_requests_total", outcome="overloaded") == 3


async def test_who_waits_is_answered_in_the_order_of_arrival(held, ask, eventually):
    at, worker, go = await held(3, server={"max_concurrency": 1})
    async with asked(at, ask, eventually, worker, 1) as (first,), AsyncExitStack() as stack:
        waiting = []
        for name in "bc":
            waiting.append(await stack.enter_async_context(at.open(CHAT, ask(name))))
            await queued(at, eventually, len(waiting))
        for event in go:
            event.set()
        assert [((await live.head()) or live.status) for live in (first, *waiting)] == [200] * 3
    assert [body["messages"][0]["content"] for _, body in worker.received] == ["Say hello.", "b", "c"]
    assert await at.count("coordinator_queue_seconds_count", outcome="let_in") == 2
    assert await at.count("coordinator_requests_queued") == 0


async def test_a_wait_that_is_too_long_is_a_503_that_says_when_to_come_again(held, ask, eventually):
    at, worker, _ = await held(1, server={"max_concurrency": 1, "queue_timeout": "50ms"})
    async with asked(at, ask, eventually, worker, 1):
        got = await at.chat()
    assert (got.status, got.headers["Retry-After"], got.error["type"]) == (503, "1", "ServiceUnavailableError")
    assert "within 0.05 s" in got.error["message"]
    assert await at.count("coordinator_queue_seconds_count", outcome="timeout") == 1
    assert await at.count("coordinator_requests_total", outcome="overloaded") == 1


@pytest.mark.parametrize("limit", [{"server": {"max_concurrency": 1}}, {"pool": {"max_inflight": 1}}])
async def test_a_wait_for_nothing_is_told_as_long_as_it_was(held, ask, eventually, monkeypatch, caplog, limit):
    caplog.set_level(logging.INFO, "coordinator.access")
    lines, server = [], {"queue_timeout": "50ms", **limit.get("server", {})}
    monkeypatch.setattr(access, "put", lambda line: lines.append(json.loads(line)))
    at, worker, _ = await held(1, limit.get("pool"), server=server)
    async with asked(at, ask, eventually, worker, 1):
        assert (await at.chat()).status == 503
        await eventually(lambda: lines)
    (line,) = lines
    assert line["seconds"] >= line["queue_seconds"] >= 0.05


async def test_a_client_that_leaves_the_queue_makes_room_in_it(held, ask, eventually):
    at, worker, go = await held(1, server={"max_concurrency": 1, "queue_size": 1})
    async with asked(at, ask, eventually, worker, 1) as (first,):
        async with at.open(CHAT, ask()) as gone:
            await queued(at, eventually, 1)
            assert (await at.chat()).status == 429
            gone.cut()
        await queued(at, eventually, 0)
        async with at.open(CHAT, ask()) as later:
            await queued(at, eventually, 1)
            go[0].set()
            await first.head()
            await later.head()
            assert later.status == 200
    assert await at.count("coordinator_queue_seconds_count", outcome="left") == 1
    assert len(worker.received) == 2


async def test_probes_metrics_and_the_models_are_never_queued(coordinator, fleet, legs, ask, eventually):
    at = await coordinator(fleet, "alone", server={"max_concurrency": 1, "queue_size": 0})
    fleet.decode.behave.next(Fault(path="completions", hang=True))
    async with at.open(CHAT, ask()):
        await eventually(lambda: legs(fleet.decode))
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            assert (await at.get(path)).status == 200, path


async def test_a_full_queue_spares_an_upload_that_asks_first(held, ask, eventually):
    """``Expect: 100-continue``: the 429 comes in place of the 100, and is counted like any other."""
    at, worker, _ = await held(1, server={"max_concurrency": 1, "queue_size": 0})
    async with asked(at, ask, eventually, worker, 1), connect(at.url) as wire:
        await wire.send(head(CHAT, "Content-Type: application/json", "Content-Length: 9", "Expect: 100-continue"))
        got = await wire.answer()
        assert (got.status, got.headers["Connection"], got.headers["Retry-After"]) == (429, "close", "1")
    assert await at.count("coordinator_requests_total", outcome="overloaded") == 1


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
async def test_a_full_decode_refuses_before_any_leg_is_made(coordinator, fleet, legs, ask, eventually, shape):
    """E3: prefill and render have all the room in the world, and are not asked."""
    at = await coordinator(fleet, shape, server={"queue_size": 0}, pools={"decode": {"max_inflight": 1}})
    fleet.decode.behave.next(Fault(first_byte_s=0.3))
    async with at.open(CHAT, ask()) as live:
        await eventually(lambda: legs(fleet.decode))
        before = [len(legs(worker)) for worker in fleet.workers]
        got = await at.chat()
        await live.head()
    assert (got.status, got.error["message"].split(" has ")[0]) == (429, "decode")
    assert [len(legs(worker)) for worker in fleet.workers] == before


async def test_a_request_that_prefill_works_for_has_its_place_at_decode_already(
    coordinator, fleet, legs, ask, eventually
):
    at = await coordinator(fleet, server={"queue_size": 0}, pools={"decode": {"max_inflight": 1}})
    fleet.prefill.behave.next(Fault(first_byte_s=0.3))
    async with at.open(CHAT, ask()) as first:
        await eventually(lambda: legs(fleet.prefill))
        assert legs(fleet.decode) == []
        assert (await at.chat()).status == 429
        await first.head()
        assert first.status == 200


async def test_a_place_at_prefill_is_free_when_its_leg_is_over(coordinator, fleet, ask, eventually):
    """Decodes that take long do not keep prompts from being computed."""
    at = await coordinator(fleet, server={"queue_size": 0}, pools={"prefill": {"max_inflight": 1}})
    fleet.decode.behave.itl_s = 0.02
    async with at.open(CHAT, ask(stream=True, max_tokens=100)) as first:
        await first.head()
        async with at.open(CHAT, ask(stream=True, max_tokens=100)) as second:
            await second.head()
            assert (first.status, second.status) == (200, 200)
            assert at.front.plan.admission.held == {}
            first.cut()
            second.cut()


async def test_a_place_at_prefill_is_free_when_decode_can_do_without_it(coordinator, fleet, ask, eventually):
    """A probe that hits answers before prefill's turn has come."""
    at = await coordinator(
        fleet, steps={"conditional-decode": {}}, server={"queue_size": 0}, pools={"prefill": {"max_inflight": 1}}
    )
    fleet.decode.behave.itl_s = 0.02
    async with at.open(CHAT, ask(stream=True, max_tokens=100)) as first:
        await first.head()
        async with at.open(CHAT, ask(stream=True, max_tokens=100)) as second:
            await second.head()
            assert (first.status, second.status) == (200, 200)
            first.cut()
            second.cut()


async def test_no_worker_is_given_more_than_its_limit(coordinator, fleet_of, ask, eventually):
    """Round robin alone would not see that one of two workers is busy."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools={"decode": {"max_inflight": 2}})
    most = 0
    for worker in fleet.decodes:
        worker.behave.first_byte_s = 0.02
    fleet.decode.behave.next(Fault(first_byte_s=0.2), times=2)

    async def watch():
        nonlocal most
        while True:
            most = max(most, *(worker.in_flight for worker in fleet.decodes))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    got = await asyncio.gather(*(at.chat() for _ in range(24)))
    watching.cancel()
    assert [answer.status for answer in got] == [200] * 24
    assert most == 2


async def test_a_worker_that_is_left_out_does_not_lend_its_places(coordinator, fleet_of, ask, eventually, legs):
    """Of two workers with a limit of 2 one is out; the other still has no more than 2, and the rest wait."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools={"decode": {"max_inflight": 2}})
    out, well = fleet.decodes
    router = at.upstream.links["decode"].router
    for _ in range(5):
        router.report(router.known()[0], LegFailed("decode", "it broke"))
    well.behave.first_byte_s = 0.02
    asking = asyncio.gather(*(at.chat() for _ in range(6)))
    await eventually(lambda: at.front.plan.admission.waiting)
    most = 0
    while not asking.done():
        most = max(most, well.in_flight)
        await asyncio.sleep(0.002)
    assert [answer.status for answer in asking.result()] == [200] * 6
    assert (most, legs(out)) == (2, [])


async def test_a_worker_that_a_header_names_has_its_own_limit(coordinator, fleet_of, legs, ask, eventually):
    """Sidecar mode: one busy prefill worker does not keep requests from another."""
    fleet = await fleet_of(prefills=2)
    named = {"header": "x-prefiller-host-port", "allow": ["127.0.0.0/8"], "max_inflight": 1, "endpoints": None}
    at = await coordinator(fleet, server={"queue_size": 0}, pools={"prefill": named})
    busy, idle = (worker.url.removeprefix("http://") for worker in fleet.prefills)
    fleet.prefill.behave.next(Fault(hang=True))
    async with at.open(CHAT, ask(), headers=[("x-prefiller-host-port", busy)]) as live:
        await eventually(lambda: legs(fleet.prefill))
        assert (await at.chat("a", ("x-prefiller-host-port", busy))).status == 429
        assert (await at.chat("b", ("x-prefiller-host-port", idle))).status == 200
        assert (await at.chat("c")).status == 200
        live.cut()


async def test_requests_in_the_queue_are_answered_before_a_stop(held, ask, eventually):
    """Draining refuses new requests alone; those that wait had been let into the house."""
    at, worker, go = await held(1, server={"max_concurrency": 1})
    async with asked(at, ask, eventually, worker, 1), at.open(CHAT, ask()) as waiting:
        await queued(at, eventually, 1)
        at.front.draining = True
        assert (await at.chat()).status == 503
        go[0].set()
        await waiting.head()
        assert waiting.status == 200

"""Which engines are behind a prefill worker: asked once for everybody, kept for a while, and forgotten on demand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.context import RequestContext
from coordinator.step import Leg, Reply
from coordinator.workers import bootstrap
from coordinator.workers.bootstrap import BootstrapServers
from envelope.errors import LegFailed
from envelope.formats import Format
from tests.bounds import HANG_S

ADDRESS = "http://10.0.0.5:8998"
ONE = {"0": {"engine_id": "e-0", "worker_addr": {"0": {"0": "tcp://10.0.0.5:1"}}}}
# Of vLLM 0.33.0 with --kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}'.
RECORDED = (
    b'{"0":{"engine_id":"86f49355-2746-4c31-9214-4c675bab71a1","worker_addr":{"0":{"0":"tcp://127.0.0.1:45299"}}}}'
)


class Server:
    """Answers what it is told to, once it may."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[RequestContext, Leg]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, ctx: RequestContext, leg: Leg) -> Reply:
        self.asked.append((ctx, leg))
        await self.may.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Reply(200, b"", answer)


def context() -> RequestContext:
    secret = (("Authorization", "Bearer secret"),)
    return RequestContext("r", "r-1", Format.CHAT, {}, secret, {"x-prefiller": "10.0.0.5:8000"}, False)


async def test_it_is_asked_once_while_the_answer_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(ONE, {"0": {"engine_id": "e-1"}})
    servers = BootstrapServers(server)
    for _ in range(3):
        assert await servers.engines(context(), ADDRESS) == {0: "e-0"}
    monkeypatch.setattr(bootstrap, "_FRESH_S", -1.0)
    servers.forget(ADDRESS)
    assert await servers.engines(context(), ADDRESS) == {0: "e-1"}
    server.answers.append(ONE)
    assert await servers.engines(context(), ADDRESS) == {0: "e-0"}
    assert len(server.asked) == 3


async def test_everybody_waits_for_one_answer_and_the_first_may_leave() -> None:
    server = Server(ONE)
    server.may.clear()
    servers = BootstrapServers(server)
    waiting = [asyncio.create_task(servers.engines(context(), ADDRESS)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    server.may.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), HANG_S) == [{0: "e-0"}] * 3
    assert len(server.asked) == 1


async def test_a_failure_is_told_to_all_who_wait_and_is_not_remembered() -> None:
    server = Server(LegFailed("prefill", "gone"), ONE)
    server.may.clear()
    servers = BootstrapServers(server)
    waiting = [asyncio.create_task(servers.engines(context(), ADDRESS)) for _ in range(2)]
    await asyncio.sleep(0)
    server.may.set()
    told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), HANG_S)
    assert [type(error) for error in told] == [LegFailed, LegFailed]
    assert await servers.engines(context(), ADDRESS) == {0: "e-0"}


async def test_it_learns_nothing_of_the_client() -> None:
    """Its server is no part of the API that a client's key is for; the router's header stays, to find the pool by."""
    server = Server(ONE)
    await BootstrapServers(server).engines(context(), ADDRESS)
    [(ctx, leg)] = server.asked
    assert (ctx.headers, ctx.routing) == ((), {"x-prefiller": "10.0.0.5:8000"})
    assert (leg.path, leg.to.url, leg.tied) == ("/query", ADDRESS, True)


async def test_what_vllm_answers_is_read() -> None:
    server = Server(json.loads(RECORDED))
    assert await BootstrapServers(server).engines(context(), ADDRESS) == {0: "86f49355-2746-4c31-9214-4c675bab71a1"}


async def test_every_rank_is_read() -> None:
    server = Server({"1": {"engine_id": "b"}, "0": {"engine_id": "a"}})
    assert await BootstrapServers(server).engines(context(), ADDRESS) == {0: "a", 1: "b"}


NO_ENGINES = [{}, [], None, {"0": {}}, {"0": None}, {"x": {"engine_id": "e"}}, {"0": {"engine_id": 1}}]


@pytest.mark.parametrize("answer", NO_ENGINES)
async def test_a_server_that_knows_no_engine_is_a_failed_leg(answer: Any) -> None:
    with pytest.raises(LegFailed, match=f"bootstrap server {ADDRESS} knows of no engine"):
        await BootstrapServers(Server(answer)).engines(context(), ADDRESS)


async def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where headers name workers, anybody inside the allow-list may come along."""
    monkeypatch.setattr(bootstrap, "_REMEMBERED", 2)
    server = Server(*[ONE] * 5)
    servers = BootstrapServers(server)
    for port in range(4):
        await servers.engines(context(), f"http://10.0.0.5:{port}")
    assert len(servers._known) == 2

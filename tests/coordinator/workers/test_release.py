"""Hand-overs that nobody took are delivered, each by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from coordinator.context import RequestContext
from coordinator.metrics import Metrics
from coordinator.step import Leg, Reply
from coordinator.workers import release
from coordinator.workers.release import Releaser
from envelope.errors import LegFailed
from envelope.formats import Format
from tests.background import FaultsTold
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest


class Workers:
    """An upstream that takes the one hand-over at once, and loses the other one the first time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.one_is_taken = asyncio.Event()

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Reply:
        name = leg.body["handover"]
        self.asked.append(name)
        if name == "one":
            ctx.handover_fetched = True
            self.one_is_taken.set()
        elif self.asked.count(name) == 1:
            await self.one_is_taken.wait()
            raise LegFailed("release", "the connection to the worker broke before its answer was whole")
        return Reply(200, b"{}", {})


def fetching(ctx: RequestContext, handover: Mapping[str, Any]) -> Leg:
    return Leg("release", "decode", "/x", {"handover": handover["name"]}, single_use=True, detached=True)


async def test_that_one_was_taken_is_no_word_on_another_of_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_AGAIN_AFTER_S", (0.0, 0.0))
    workers, metrics = Workers(), Metrics(CollectorRegistry())
    ctx = RequestContext("id", "id-1", Format.CHAT, {}, (), {}, stream=False)
    ctx.abandoned, ctx.handover, ctx.handover_fetched = [{"name": "other"}, {"name": "one"}], {"name": "read"}, True
    releaser = Releaser(fetching, workers, metrics, FaultsTold())  # type: ignore[arg-type]
    async with asyncio.timeout(HANG_S):
        releaser.release(ctx)
        await releaser.close()
    assert sorted(workers.asked) == ["one", "other", "other"]
    assert metrics.registry.get_sample_value("coordinator_handovers_released_total", {"outcome": "delivered"}) == 2
    assert (ctx.handover, ctx.handover_fetched) == ({"name": "read"}, True)


async def test_a_fault_of_ours_is_told_of_and_leaves_the_others_delivered() -> None:
    def faulty(ctx: RequestContext, handover: Mapping[str, Any]) -> Leg:
        return fetching(ctx, handover) if handover["name"] == "one" else 1 // 0  # type: ignore[return-value]

    workers, metrics, faults = Workers(), Metrics(CollectorRegistry()), FaultsTold()
    ctx = RequestContext("id", "id-1", Format.CHAT, {}, (), {}, stream=False)
    ctx.abandoned = [{"name": "other"}, {"name": "one"}]
    releaser = Releaser(faulty, workers, metrics, faults)  # type: ignore[arg-type]
    async with asyncio.timeout(HANG_S):
        releaser.release(ctx)
        await releaser.close()
    assert (workers.asked, faults.counts) == (["one"], {"release": 1})
    name = "coordinator_handovers_released_total"
    assert metrics.registry.get_sample_value(name, {"outcome": "InternalError"}) == 1

"""Faults of ours beside requests: those who ask are answered, and the end is a clean one."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from coordinator.app import build
from coordinator.background import Background
from coordinator.config import Config
from tests.flows.conftest import config_tree


async def broken(*_):
    raise ZeroDivisionError


@pytest.fixture
async def all_broken(stack, fleet, monkeypatch):
    """A coordinator of which everything fails that runs beside requests."""
    monkeypatch.setattr("coordinator.background._FIRST_WAIT_S", 0.001)
    changes = {"pools": {"prefill": {"policy": "load_aware"}}}
    app = build(Config.model_validate(config_tree(fleet, "openai", {}, changes)))
    plan = app.front.plan
    plan.background = tuple(Background(task, broken) for task, _ in plan.background)
    monkeypatch.setattr(app.watch, "run", broken)
    own = await stack.enter_async_context(AsyncExitStack())
    await own.enter_async_context(app.running())
    await app.server.listen("127.0.0.1", 0)
    return own, app


async def test_requests_go_on_whatever_fails_beside_them(all_broken, dial, ask, eventually):
    own, app = all_broken

    def failed(task):
        return app.metrics.registry.get_sample_value("coordinator_background_faults_total", {"task": task})

    tasks = {task for task, _ in app.front.plan.background}
    assert tasks == {"keys", "probes", "models", "load"}
    for task in (*tasks, "certificates"):
        await eventually(lambda task=task: (failed(task) or 0) >= 3)
    async with dial(f"http://{app.server.addresses[0]}", "/v1/chat/completions", ask("Say hello.")) as live:
        await live.head()
        assert (await live.rest()).status == 200
    await own.aclose()


async def test_a_plan_that_cannot_be_closed_is_told_of_and_others_go_on(coordinator, fleet, monkeypatch, eventually):
    at = await coordinator(fleet)
    app, before = at.app, at.front.plan
    monkeypatch.setattr(before.upstream._pools["decode"], "close", lambda: 1 / 0)
    before.retire()
    await eventually(lambda: before not in app.plans._running)
    assert await at.count("coordinator_background_faults_total", task="closing") == 1
    assert before.media._session is None or before.media._session.closed, "the rest is closed all the same"
    assert (await at.chat()).status == 200

"""/status on the metrics port: what operators see of the pipeline, workers and last requests, and never more."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml

from coordinator.config import load
from coordinator.http.response import Response
from coordinator.metrics import Metrics
from coordinator.serve import Alone, serve
from coordinator.telemetry.status import Pages, together
from tests.coordinator.http.peer import Peer, asked
from tests.flows.browser import CHROMIUM, tab
from tests.flows.conftest import config_tree
from tests.flows.wire import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

CHAT = "/v1/chat/completions"
PROMPT, KEY, SECOND = "a prompt of mine", "sk-of-a-client", "sk-of-the-fleet"
ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}


class Steered(Alone):
    """Tells where it listens, and can be stopped."""

    url = ""

    async def begin(self, app: Any, reloader: Any, stops: asyncio.Queue[None], status: Any) -> None:
        self.stops, self.reloader = stops, reloader
        await super().begin(app, reloader, stops, status)

    async def listening(self, addresses: Sequence[str]) -> None:
        self.url = f"http://{addresses[0]}"


class Site:
    """A coordinator with a status page."""

    def __init__(self, url: str, status: str, session: aiohttp.ClientSession, steered: Steered) -> None:
        self.url, self.status, self.steered = url, status, steered
        self._session = session

    async def get(self, path: str) -> tuple[aiohttp.ClientResponse, str]:
        async with self._session.get(self.status + path) as answer:
            return answer, await answer.text()

    async def told(self) -> dict[str, Any]:
        answer, text = await self.get("/status.json")
        assert (answer.status, answer.content_type) == (200, "application/json")
        found: dict[str, Any] = json.loads(text)
        return found

    async def ask(self, body: dict[str, Any], **headers: str) -> int:
        keyed = {"Authorization": f"Bearer {KEY}", **headers}
        async with self._session.post(self.url + CHAT, json=body, headers=keyed) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def site(
    fleet_of: Any, tmp_path: Path, unused_tcp_port: int, eventually: Any
) -> AsyncIterator[Callable[..., Any]]:
    """``await site("text", server={..})``: a fleet with two workers of each role, as ``coordinator serve`` runs it."""
    tasks: list[tuple[Steered, asyncio.Task[None]]] = []
    async with aiohttp.ClientSession() as session:

        async def start(shape: str = "text", **changes: Any) -> Site:
            fleet = await fleet_of(prefills=2, decodes=2)
            server = {"metrics_port": unused_tcp_port, "api_keys": [KEY], **changes.pop("server", {})}
            keyed = {"pools": {"decode": {"api_key": SECOND}}}
            tree = config_tree(fleet, shape, {}, {"server": server, "log_level": "warning", **keyed, **changes})
            path = tmp_path / "pd.yaml"
            path.write_text(yaml.safe_dump(tree))
            steered = Steered(str(path))
            serving = asyncio.create_task(serve(load(str(path), os.environ), str(path), steered))
            tasks.append((steered, serving))
            await eventually(lambda: steered.url or serving.done())
            return Site(steered.url, f"http://127.0.0.1:{unused_tcp_port}", session, steered)

        yield start
        for steered, serving in tasks:
            steered.stops.put_nowait(None)
            await serving


async def used(at: Site, ask: Any, eventually: Any) -> None:
    """Send requests of several kinds, the last of which render refuses."""
    await eventually(lambda: ready(at))
    assert await at.ask(ask(PROMPT), **{"X-Request-Id": "one-of-mine"}) == 200
    assert await at.ask(ask(PROMPT, stream=True)) == 200
    assert await at.ask({"model": "tiny", "messages": "no list"}) == 400


async def ready(at: Site) -> bool:
    return not (await at.told())["problems"]


async def test_the_json_tells_of_the_pipeline_the_workers_and_the_last_requests(
    site: Any, ask: Any, eventually: Any, tmp_path: Path
) -> None:
    at = await site("text")
    await used(at, ask, eventually)
    told = await at.told()
    assert told["config"] == {
        "file": str(tmp_path / "pd.yaml"), "digest": told["config"]["digest"], "refused": [], "differs": False
    }  # fmt: skip
    assert {one["path"] for one in told["pipeline"]} == ROUTES
    (chat,) = [one["steps"] for one in told["pipeline"] if one["api"] == "chat"]
    assert [(step["step"], step["format"]) for step in chat] == [
        ("render", "chat"), ("prefill", "generate"), ("decode", "generate")
    ]  # fmt: skip
    workers = {pool["role"]: len(pool["workers"]) for pool in told["pools"]}
    assert workers == {"render": 1, "prefill": 2, "decode": 2}
    assert (told["in_flight"], told["queued"], told["outcomes"]) == (0, 0, {"ok": 2, "rejected": 1})
    failed, streamed, whole = told["requests"]
    assert (failed["status"], failed["outcome"]) == (400, "rejected")
    assert [(leg["step"], leg["outcome"]) for leg in failed["legs"]] == [("render", "LegRejected")]
    assert (streamed["stream"], whole["stream"], whole["request_id"]) == (True, False, "one-of-mine")
    assert streamed["ttft_s"] > 0 and whole["ttft_s"] is None
    legs = whole["legs"]
    assert [leg["step"] for leg in legs] == ["render", "prefill", "decode"]
    assert all(leg["outcome"] == "ok" and len(leg["workers"]) == 1 for leg in legs)
    ends = [0.0, *(leg["begins_s"] + leg["seconds"] for leg in legs)]
    rounded = 5e-6
    assert all(begins >= end - rounded for begins, end in zip((leg["begins_s"] for leg in legs), ends, strict=False))
    assert ends[-1] <= whole["seconds"] + rounded


async def test_a_connection_that_says_nothing_is_closed_there_too(site: Any) -> None:
    at = await site("text", server={"read_header_timeout": "200ms"})
    async with connect(at.status) as wire:
        await wire.send(b"GET /status.json HTTP/1.1\r\nHost:")
        assert await wire.is_closed()


async def test_nothing_that_was_said_and_no_key_is_shown(site: Any, ask: Any, eventually: Any) -> None:
    at = await site("openai")
    await used(at, ask, eventually)
    _, text = await at.get("/status.json")
    for secret in (PROMPT, "no list", KEY, SECOND, "Authorization", 'messages":'):
        assert secret not in text
    async with aiohttp.ClientSession() as session, session.get(f"{at.url}/status.json") as answer:
        assert answer.status == 404  # the clients' port has no such page


async def test_a_request_that_is_told_of_late_has_its_steps_where_they_were(
    site: Any, ask: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may have been held up between the end and the telling."""
    at = await site("text")
    count = Metrics.request

    def late(*args: Any) -> None:
        time.sleep(0.05)
        count(*args)

    monkeypatch.setattr(Metrics, "request", late)
    await used(at, ask, eventually)
    for request in (await at.told())["requests"]:
        begins = [leg["begins_s"] for leg in request["legs"]]
        assert begins and all(begin > 0 for begin in begins)


async def test_what_monitors_and_scanners_ask_for_pushes_no_request_out(site: Any, ask: Any, eventually: Any) -> None:
    at = await site("text")
    await used(at, ask, eventually)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        for path in ("/v1/models", "/wp-login.php"):
            for _ in range(60):
                async with session.get(at.url + path) as answer:
                    await answer.read()
    assert [request["route"] for request in (await at.told())["requests"]] == ["chat"] * 3


async def test_a_refused_file_and_a_role_without_workers_are_told(site: Any, eventually: Any, tmp_path: Path) -> None:
    at = await site("alone", server={"readiness_interval": "50ms"})
    await eventually(lambda: ready(at))
    before = (await at.told())["config"]["digest"]
    (tmp_path / "pd.yaml").write_text("pools: {decode: {endpoint: []}}")
    assert await at.steered.reloader.reload() == "refused"
    config = (await at.told())["config"]
    assert config["digest"] == before and "did you mean endpoints?" in config["refused"][0]


async def test_the_page_is_one_file_that_may_load_nothing_else(site: Any) -> None:
    at = await site("alone")
    answer, text = await at.get("/status")
    assert (answer.status, answer.content_type, answer.headers["X-Content-Type-Options"]) == (
        200,
        "text/html",
        "nosniff",
    )
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "http://" not in text and "https://" not in text
    assert "innerHTML" not in text  # a request id is whatever a client wrote


async def test_without_the_page_nothing_is_kept_for_it(site: Any, ask: Any, eventually: Any) -> None:
    at = await site("alone", server={"status_page": False})
    answer, _ = await at.get("/status")
    assert answer.status == 404
    assert (await at.get("/metrics"))[0].status == 200


def process(pid: int, in_flight: int, state: str, digest: str = "d", at: float = 1.0) -> dict[str, Any]:
    worker = {"url": "http://w", "in_flight": in_flight, "state": state}
    return {
        "version": "1", "process": {"pid": pid, "began": 0, "in_flight": in_flight, "problems": ["decode: gone"]},
        "config": {"file": "f", "digest": digest, "refused": []}, "pipeline": [], "in_flight": in_flight, "queued": 1,
        "pools": [{"role": "decode", "workers": [worker]}], "outcomes": {"ok": 2}, "requests": [{"at": at}] * 40,
    }  # fmt: skip


def test_several_processes_are_one_view() -> None:
    view = together([process(1, 2, "well", at=1.0), process(2, 3, "ejected", "e", at=2.0)], 3)
    assert view["pools"] == [{"role": "decode", "workers": [{"url": "http://w", "in_flight": 5, "state": "ejected"}]}]
    assert (view["in_flight"], view["queued"], view["outcomes"]) == (5, 2, {"ok": 4})
    assert (view["problems"], view["config"]["differs"]) == (["decode: gone"], True)
    assert (view["processes"]["wanted"], len(view["processes"]["told"])) == (3, 2)
    assert [one["at"] for one in view["requests"]] == [2.0] * 40 + [1.0] * 10


def test_while_a_file_is_rolled_out_each_role_keeps_its_own_workers() -> None:
    old, new = process(1, 2, "well"), process(2, 3, "well")
    new["pools"].insert(0, {"role": "prefill", "workers": [{"url": "http://p", "in_flight": 9, "state": "well"}]})
    pools = together([new, old], 2)["pools"]
    legs = {pool["role"]: [worker["in_flight"] for worker in pool["workers"]] for pool in pools}
    assert legs == {"prefill": [9], "decode": [5]}


async def test_that_no_process_tells_of_itself_in_time_is_told() -> None:
    async def nobody() -> Sequence[dict[str, Any]]:
        return []

    request = asked((), "GET")
    request.body.complete = True
    peer = Peer()
    request.response = Response(request, peer.connection)
    await Pages(nobody, 2).routes()["/status.json"]["GET"](request)
    assert peer.answers == [503]
    assert peer.transport.written.endswith(b"\r\n\r\nno process told of itself in time\n")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here; Debian's package is called chromium")
async def test_a_browser_shows_it_on_a_desk_and_on_a_phone_by_day_and_by_night(
    site: Any, ask: Any, eventually: Any, tmp_path: Path
) -> None:
    """In Chromium: drawn, nothing refused by the policy, nothing fetched elsewhere, nothing wider than the window."""
    at = await site("text")
    await used(at, ask, eventually)
    markup = "<img src=x onerror=alert(1)>"
    assert await at.ask(ask(PROMPT), **{"X-Request-Id": markup}) == 200
    pictures = []
    async with tab(tmp_path / "profile") as browser:
        await browser.look_like(1280, 900, "light")
        await browser.open(f"{at.status}/status")
        await browser.until("document.body?.dataset.drawn === 'yes'")
        shown = await browser.value("document.body.innerText")
        for text in (
            "ready",
            "render",
            "prefill",
            "decode",
            "200 ok",
            "400 rejected",
            "one-of-mine",
            "/inference/v1/generate",
        ):
            assert text in shown
        assert await browser.value("document.querySelectorAll('#requests .request').length") == 4
        assert await browser.value("document.querySelectorAll('#requests img').length") == 0
        assert await browser.value("document.querySelector('.request .bar.decode').offsetWidth") > 1
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark")):
            await browser.look_like(width, 900, scheme, mobile=width < 500)
            assert await browser.value("document.documentElement.scrollWidth") <= width
            back = await browser.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, back[4:-1].split(","))) > 380) is (scheme == "light")
            pictures.append(await browser.picture(tmp_path / f"{width}-{scheme}.png"))
        assert len(set(pictures)) == 3
        assert browser.complaints == []
        assert {url.removeprefix(at.status) for url in browser.fetched} - {"data:,"} <= {"/status", "/status.json"}

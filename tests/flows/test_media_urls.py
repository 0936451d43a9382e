"""With replace-media-urls in the file, no media URL leaves the coordinator but to a server that may be asked."""

from __future__ import annotations

import json
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from coordinator.security import addresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.security.addresses import Address
    from coordinator.sim import SimFleet
    from tests.flows.conftest import Running

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
STEP = {"replace-media-urls": {"download_timeout": "300ms"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"


def body_of(path: str, url: str) -> dict[str, Any]:
    """Return a request with one image, under its URL."""
    text: dict[str, Any] = {"type": "text", "text": "What is this?"}
    if path == CHAT:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        return {"model": "tiny", "messages": [{"role": "user", "content": [text, part]}]}
    if path == RESPONSES:
        part = {"type": "input_image", "image_url": url, "detail": "auto"}
        return {"model": "tiny", "input": [{"role": "user", "content": [{**text, "type": "input_text"}, part]}]}
    if path == MESSAGES:
        part = {"type": "image", "source": {"type": "url", "url": url}}
        return {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": [text, part]}]}
    return {"token_ids": [1], "sampling_params": {}, "content_parts": [{"type": "image_url", "url": url}]}


NAMED = {
    CHAT: "messages[0].content[1] (image_url)",
    RESPONSES: "input[0].content[1] (input_image)",
    MESSAGES: "messages[0].content[1] (image)",
    GENERATE: "content_parts[0] (image_url)",
}


def asked(fleet: SimFleet) -> list[Any]:
    """Return the bodies of all legs that workers got; probes of their health carry no request id."""
    return [got.body for worker in fleet.workers for got in worker.received if got.header("x-request-id")]


class Site:
    """A public site: only this server's address is, and only in this test."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.url = ""

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        self.paths.append(request.path)
        if request.path == "/to-loopback":
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})
        if request.path == "/missing":
            return web.Response(status=404, text="a secret")
        return web.Response(body=PNG, content_type="image/png")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    runner = web.ServerRunner(web.Server(site))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.3", 0).start()
    site.url = f"http://site.test:{runner.addresses[0][1]}"
    yield site
    await runner.cleanup()


def let_through(at: Running) -> None:
    """Have this coordinator see the site; every other rule stays as it is."""

    async def lookup(host: str, port: int) -> list[Address]:
        return [ip_address("127.0.0.3")] if host == "site.test" else []

    def refuses(address: Address, *, allow_private: bool) -> bool:
        return str(address) != "127.0.0.3" and addresses.refused(address, allow_private=allow_private)

    at.upstream.media._lookup, at.upstream.media._refuses = lookup, refuses


@pytest.mark.parametrize("path", NAMED)
@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/meta-data", "http://localhost/x", "http://0x7f.1/"])
async def test_a_url_that_leads_inside_is_a_400_that_names_the_part(
    fleet: SimFleet, coordinator: Any, path: str, url: str
) -> None:
    """H23: and nothing is connected to."""
    at = await coordinator(fleet, steps=STEP)
    got = await at.post(path, body_of(path, url))
    assert got.status == 400
    assert got.error["message"].startswith(NAMED[path] + ": its ")
    assert "169.254" not in got.error["message"] and "127.0" not in got.error["message"]
    assert asked(fleet) == []


async def test_a_public_url_that_redirects_inside_is_a_400_too(fleet: SimFleet, coordinator: Any, site: Site) -> None:
    """H23: every hop is checked."""
    at = await coordinator(fleet, steps=STEP)
    let_through(at)
    got = await at.post(CHAT, body_of(CHAT, f"{site.url}/to-loopback"))
    why = "its host has no address that media may be fetched from"
    assert (got.status, got.error["param"]) == (400, "messages[0].content[1]")
    assert got.error["message"].startswith(f"{NAMED[CHAT]}: {why} (request id ")
    assert (asked(fleet), site.paths) == ([], ["/to-loopback"])


async def test_an_answer_of_no_use_is_a_400_without_a_word_of_it(fleet: SimFleet, coordinator: Any, site: Site) -> None:
    """M08: the URL is the client's mistake."""
    at = await coordinator(fleet, steps=STEP)
    let_through(at)
    got = await at.post(CHAT, body_of(CHAT, f"{site.url}/missing"))
    assert (got.status, got.error["type"]) == (400, "BadRequestError")
    assert got.error["message"].startswith(f"{NAMED[CHAT]}: its server answered 404 (request id ")
    assert b"secret" not in got.raw
    assert asked(fleet) == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_every_leg_gets_the_media_and_none_the_url(
    fleet: SimFleet, coordinator: Any, site: Site, path: str
) -> None:
    """The simulated workers have no eyes: whatever they answer, this is about what they were sent."""
    at = await coordinator(fleet, steps=STEP)
    let_through(at)
    await at.post(path, body_of(path, f"{site.url}/image"))
    assert site.paths == ["/image"]
    assert asked(fleet)
    for sent in asked(fleet):
        assert "iVBORw0KGgo" in json.dumps(sent) and "site.test" not in json.dumps(sent)


async def test_text_needs_no_download(fleet: SimFleet, coordinator: Any) -> None:
    at = await coordinator(fleet, steps=STEP)
    got = await at.chat("See http://169.254.169.254/ there.")
    assert got.status == 200

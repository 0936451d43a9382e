"""``coordinator demo``: simulated workers and the coordinator in front of them, in one process on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
from base64 import b64encode
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import aiohttp

from coordinator.app import App, build
from coordinator.config import Config, ConfigError

_TOKEN_RATE_S = 0.02

_CURL = """\
curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "tiny", "stream": true,
  "messages": [{{"role": "user", "content": "Say hello in French."}}]}}'"""


async def demo(port: int, ask: str | None, stream: bool, image: str | None = None) -> int:
    """Run until interrupted; with ``ask``, ask once, with a picture if there is one, print the answer, and stop.

    Raises:
        ConfigError: the demo extra is not installed, the port is taken, or the picture cannot be read.
    """
    from coordinator.sim import SimFleet, tokenizer

    try:
        tokenizer.load()
    except RuntimeError as error:
        raise ConfigError([f"demo: {error}"]) from None
    question = _question(ask, image, stream)
    async with SimFleet(encodes=1, prefills=2, decodes=2, itl_s=_TOKEN_RATE_S) as fleet:
        workers = {"encode": fleet.encodes, "prefill": fleet.prefills, "decode": fleet.decodes}
        pools = {role: [worker.url for worker in some] for role, some in workers.items()}
        app = build(Config.model_validate(tree(fleet.render.url, pools)))
        async with app.running():
            address = await _listen(app, 0 if ask is not None else port)
            await _ready(app)
            if ask is not None:
                return await _ask(address, question)
            _greet(address, {"render": [fleet.render.url], **pools})
            await _interrupted()
    return 0


def tree(render: str, pools: dict[str, list[str]]) -> dict[str, Any]:
    """Return the demo's configuration: tokenized once by render, tokens-in for prefill, the chat route for decode.

    Decode is given the tokens and parses its own stream: the fleet that most people run. Media is encoded on a worker
    of its own; a request without any has no such leg.
    """
    return {
        "log_format": "human",
        "server": {"listen_addr": "127.0.0.1:0", "readiness_interval": "1s"},
        "pools": {
            "encode": {"endpoints": pools["encode"]},
            "prefill": {"endpoints": pools["prefill"]},
            "decode": {"endpoints": pools["decode"], "policy": "least_inflight"},
        },
        "pipeline": {
            "kv_connector": "kv-nixl",
            "ec_connector": "ec-nixl",
            "steps": [
                {"type": "render", "params": {"address": render}},
                {"type": "encode", "params": {"use_openai_format": False}},
                {"type": "prefill", "params": {"use_openai_format": False}},
                {"type": "decode", "params": {"send_prompt_token_ids": True}},
            ],
        },
    }


async def _listen(app: App, port: int) -> str:
    try:
        await app.server.listen("127.0.0.1", port)
    except OSError as error:
        raise ConfigError([f"demo: --port {port}: {error.strerror or error}; choose another, or 0"]) from None
    return app.server.addresses[0]


async def _ready(app: App) -> None:
    async with asyncio.timeout(10):
        await app.front.plan.readiness.until_ready()


def _greet(address: str, roles: dict[str, list[str]]) -> None:
    for role, urls in roles.items():
        print(f"{role:9} {'  '.join(urls)}")
    print(f"listening on http://{address}; try:\n\n{_CURL.format(address=address)}\n", flush=True)


def _question(text: str | None, image: str | None, stream: bool) -> dict[str, Any]:
    """Return the chat request that asks ``text``; a picture stands after it, as a ``data:`` URI."""
    content: Any = text
    if image is not None:
        content = [{"type": "text", "text": text or ""}, {"type": "image_url", "image_url": {"url": _data_uri(image)}}]
    return {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": content}]}


def _data_uri(path: str) -> str:
    try:
        encoded = b64encode(Path(path).read_bytes()).decode()
    except OSError as error:
        raise ConfigError([f"demo: --image {path}: {error.strerror}"]) from None
    return f"data:{guess_type(path)[0] or 'image/png'};base64,{encoded}"


async def _ask(address: str, body: dict[str, Any]) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{address}/v1/chat/completions", json=body) as answer,
    ):
        if not body["stream"]:
            print(json.dumps(await answer.json(), indent=2, ensure_ascii=False))
        else:
            async for line in answer.content:
                print(line.decode().rstrip("\n"), flush=True)
        return 0 if answer.status == 200 else 1


async def _interrupted() -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()

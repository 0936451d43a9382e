"""``coordinator demo``: a whole fleet in one process that answers without a GPU."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from coordinator import demo
from coordinator.cli import NoEvents
from coordinator.config import Config, ConfigError
from coordinator.registry import build
from coordinator.sim import tokenizer
from envelope.formats import Format

if TYPE_CHECKING:
    from pathlib import Path

HELLO = "Say hello in French."


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come at once: nobody watches them."""
    monkeypatch.setattr(demo, "_TOKEN_RATE_S", 0.0)


def test_its_configuration_is_the_fleet_that_most_people_run() -> None:
    """Tokenized once: prefill and decode are given render's tokens, and decode answers in the client's own API."""
    pools = {"encode": ["http://e:1"], "prefill": ["http://a:1", "http://b:1"], "decode": ["http://c:1"]}
    tree = demo.tree("http://r:1", pools)
    steps = build(Config.model_validate(tree), NoEvents())
    assert [step.type for step in steps] == ["render", "encode", "prefill", "decode"]
    formats = [step.plan(Format.CHAT).format for step in steps]
    assert formats == [Format.CHAT, Format.GENERATE, Format.GENERATE, Format.CHAT]
    assert tree["pools"]["prefill"]["endpoints"] == ["http://a:1", "http://b:1"]


async def test_one_question_is_answered_and_it_stops(capsys: pytest.CaptureFixture[str]) -> None:
    assert await demo.demo(0, HELLO, False) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]


async def test_a_streamed_answer_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert await demo.demo(0, HELLO, True) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert lines[-1] == "data: [DONE]"


async def test_a_picture_is_encoded_on_a_worker_of_its_own_and_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    picture = tmp_path / "cat.jpg"
    picture.write_bytes(b"a cat in the sun")
    with caplog.at_level(logging.INFO, logger="coordinator"):
        assert await demo.demo(0, "What is in this picture?", False, str(picture)) == 0
    said = capsys.readouterr()
    assert "image " in json.dumps(json.loads(said.out)["choices"][0]["message"])
    (request,) = (json.loads(line) for line in said.err.splitlines())
    assert list(request["legs"]) == ["render", "encode", "prefill", "decode"]


async def test_a_picture_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"demo: --image /no/cat\.png: No such file or directory"):
        await demo.demo(0, "What is in this picture?", False, "/no/cat.png")


async def test_an_answer_that_is_an_error_is_printed_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert await demo.demo(0, "hello " * 20_000, False) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 400


async def test_it_greets_with_a_command_that_works_and_runs_until_it_is_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = asyncio.ensure_future(demo.demo(0, None, False))
    text = ""
    while "listening on" not in text:
        text += await spoken(running, capsys)
    address = text.split("listening on http://")[1].split(";")[0]
    assert f"curl -N http://{address}/v1/chat/completions" in text
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["render", "encode", "prefill", "decode"]
    body = json.loads(text.split("-d '")[1].split("'")[0])
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{address}/v1/chat/completions", json=body) as answer,
    ):
        assert (answer.status, (await answer.text()).endswith("data: [DONE]\n\n")) == (200, True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def spoken(running: asyncio.Future[int], capsys: pytest.CaptureFixture[str]) -> str:
    """Give the demo its turn; return what it has printed since."""
    await asyncio.wait((running,), timeout=0.01)
    if running.done():
        await running
    return capsys.readouterr().out


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            await demo.demo(port, None, False)
    (problem,) = caught.value.problems
    assert problem.startswith(f"demo: --port {port}: ")
    assert problem.endswith("; choose another, or 0")


@pytest.mark.parametrize("package", ["tokenizers", "jinja2.sandbox"])
async def test_without_the_demo_s_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    tokenizer.load.cache_clear()
    with pytest.raises(ConfigError, match=r"^demo: .* need .*: pip install 'pd-coordinator\[demo\]'"):
        await demo.demo(0, HELLO, False)

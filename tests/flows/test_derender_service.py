"""render, generate, derender: workers without a tokenizer, and a service that says what their tokens mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from coordinator.sim import Settings, tokenizer
from coordinator.sim.parsers import Parsing, parse
from coordinator.sim.tokenizer import EOS

BARE = replace(Settings(), tokens_only=True)


class Service:
    """The derender routes as far as these requests need them, with the simulated model's tokenizer and parsers.

    Attributes:
        asked: the path of each call.
        down: it answers 500.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down = False
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({})  # its health
        body = await request.json()
        if not body:
            return web.json_response({}, status=400)  # readiness asks whether the route is there
        self.asked.append(request.path)
        if self.down:
            return web.json_response({"error": {"message": "no"}}, status=500)
        if body.get("stream"):
            assert not (body["completion_request"] or {}).get("stop"), "a real service refuses them here"
            (choice,) = body["generate_chunk"]["choices"]
            before = (body["stream_state"] or {}).get("output_token_ids", [])
            after = before + choice["token_ids"]
            text = told(after)[len(told(before)) :]
            made = {"index": 0, "text": text, "finish_reason": None, "stop_reason": None, "logprobs": None}
            return web.json_response({"chunk": {"choices": [made]}, "stream_state": {"output_token_ids": after}})
        return web.json_response(
            {"choices": [self._message(body, one) for one in body["generate_response"]["choices"]]}
        )

    def _message(self, body: Any, choice: Any) -> Any:
        text, stop, asked = told(choice["token_ids"]), choice.get("stop_reason"), body["chat_request"]
        if stop is not None:
            text = text[: text.index(stop) + len(stop) * bool(asked.get("include_stop_str_in_output"))]
        thinking = (asked.get("chat_template_kwargs") or {}).get("enable_thinking") is not False
        parsed = parse(text, Parsing(thinking=thinking))
        return {**choice, "message": parsed.message(), "logprobs": None, "stop_reason": stop}


def told(token_ids: list[int]) -> str:
    """What the tokens say, without a character whose bytes are not all there."""
    return tokenizer.load().decode(token for token in token_ids if token != EOS).rstrip("\ufffd")


@pytest.fixture
async def service(stack):
    service = Service()
    runner = await service.start()
    stack.push_async_callback(runner.cleanup)
    return service


@pytest.fixture
async def at(coordinator, fleet, service):
    steps = {
        "decode": {"derender": "service", "output_mode": None, "wrap": None},
        "derender": {"address": service.url, "timeout": "30s"},
    }
    return await coordinator(fleet, "text", steps=steps)


@pytest.fixture
async def fleet(fleet_of):
    return await fleet_of(decode_settings=BARE, prefill_settings=BARE)


CASES = [
    ("Say stop in the middle.", {"stop": ["STOP"]}, "This is before ", "STOP"),
    ("Say stop in the middle.", {"stop": ["never", "STOP"], "include_stop_str_in_output": True},
     "This is before STOP", "STOP"),
    ("Say stop in the middle.", {"stop": ["This"], "min_tokens": 3}, "This is before STOP and this is after it.", None),
    ("Say stop in the middle.", {"stop": ["never"]}, "This is before STOP and this is after it.", None),
    ("Never stop.", {"stop": ["and again and"]}, "again ", "and again and"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fields", "said", "why"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_what_workers_without_a_tokenizer_generate(
    at, fleet, legs, eventually, text, fields, said, why, stream
):
    """S29, S41: they never reach such a worker, which refuses them; it is told to stop by the end of its leg."""
    got = await at.chat(text, stream=stream, **fields)
    assert (got.status, got.text) == (200, said)
    answers = got.chunks if stream else [got.body]
    [choice] = [choice for answer in answers for choice in answer["choices"] if choice["finish_reason"]]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", why)
    [leg] = legs(fleet.decode)
    assert leg.body["stream"] and "stop" not in leg.body["sampling_params"]
    await eventually(lambda: not fleet.decode.in_flight)
    assert len(fleet.decode.aborted) == (why is not None and text == "Never stop.")


async def test_several_choices_end_each_at_its_own_stop_string(at, fleet, service):
    got = await at.chat("Say stop in the middle.", n=2, temperature=1.0, stop=["STOP", "(2) This is"])
    said = {choice["index"]: (choice["message"]["content"], choice["stop_reason"]) for choice in got.body["choices"]}
    assert said == {0: ("This is before ", "STOP"), 1: ("", "(2) This is")}
    assert service.asked[-1] == "/v1/chat/completions/derender"
    assert set(service.asked[:-1]) == {"/v1/completions/derender"}


async def test_without_stop_strings_a_whole_answer_takes_one_call(at, fleet, legs, service):
    got = await at.chat("Say stop in the middle.")
    assert got.text == "This is before STOP and this is after it."
    assert service.asked == ["/v1/chat/completions/derender"]
    assert not legs(fleet.decode)[0].body["stream"]


async def test_a_service_that_fails_ends_the_request_and_the_worker_s_leg(at, fleet, service, eventually):
    service.down = True
    got = await at.chat("Never stop.", stop=["zz"], max_tokens=5000)
    assert got.status == 502 and "derender" in got.raw.decode()
    await eventually(lambda: not fleet.decode.in_flight)
    assert len(fleet.decode.aborted) == 1
    service.down = False
    assert (await at.chat("Say hello.")).status == 200


async def test_a_stop_string_ends_a_decode_beside_its_prefill(coordinator, fleet_of, service, eventually):
    """With connectors that need both legs in flight, the one that is listened to ends with the answer too."""
    paired = Settings(kv="mooncake")
    bare = replace(paired, tokens_only=True)
    fleet = await fleet_of(settings=paired, prefill_settings=bare, decode_settings=bare)
    steps = {
        "prefill-decode": {"derender": "service", "output_mode": None, "wrap": None},
        "derender": {"address": service.url, "timeout": "30s"},
    }
    at = await coordinator(fleet, "pair-text", steps=steps)
    for stream in (False, True):
        got = await at.chat("Never stop.", stop=["and again and"], stream=stream)
        assert (got.status, got.text) == (200, "again ")
    await eventually(lambda: not fleet.decode.in_flight)
    assert len(fleet.decode.aborted) == 2

"""A server as a client sees it: ids, keys, versions, aborts, and what it keeps for tests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from coordinator.sim import Settings, SimFleet, SimWorker
from coordinator.sim import worker as worker_module
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
ENDLESS = {"messages": [{"role": "user", "content": "Never stop."}]}
BODY = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 3}}


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Any]]:
    """Start a worker with settings of its own."""
    workers = []

    async def start(role: Any = "decode", **settings: Any) -> SimWorker:
        workers.append(SimWorker(role, settings=Settings(**settings)))
        await workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        await worker.stop()


async def until(condition: Any) -> None:
    """Wait for something that is to happen soon."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


# --- what it keeps --------------------------------------------------------------------------------------------


async def test_requests_are_kept_as_they_came(fleet: SimFleet, client: Any) -> None:
    headers = CIMultiDict([("X-One", "1"), ("X-One", "2"), ("Content-Type", "application/json")])
    await client.post(fleet.decode, GENERATE, b'{"a": 1}', headers=headers)
    (received,) = fleet.decode.received
    assert (received.method, received.path) == ("POST", GENERATE)
    assert received.raw == b'{"a": 1}'
    assert received.body == {"a": 1}
    assert [pair for pair in received.headers if pair[0].lower() == "x-one"] == [("X-One", "1"), ("X-One", "2")]
    assert received.header("CONTENT-TYPE") == "application/json"


async def test_headers_may_be_as_long_as_uvicorn_takes_them(fleet: SimFleet, client: Any) -> None:
    long = "x" * 60_000
    await client.post(fleet.decode, f"{GENERATE}?a=b", BODY, headers={"X-Long": long})
    assert fleet.decode.received[0].header("x-long") == long
    assert fleet.decode.received[0].query == "a=b"


async def test_a_refused_request_is_kept_too(fleet: SimFleet, client: Any) -> None:
    await client.post(fleet.decode, GENERATE, b"{")
    assert fleet.decode.received[0].body is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", GENERATE])
async def test_a_client_that_leaves_is_noticed(path: str, stream: bool, fleet: SimFleet, client: Any) -> None:
    body = {
        **ENDLESS,
        "prompt": "a",
        "input": "a",
        "token_ids": [3],
        "sampling_params": {"ignore_eos": True},
        "ignore_eos": True,
        "max_tokens": 5000,
        "stream": stream,
    }
    fleet.decode.behave.itl_s = 0.01
    request = asyncio.create_task(client.post(fleet.decode, path, body))
    await until(lambda: fleet.decode.core.running_count == 1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await until(lambda: fleet.decode.in_flight == 0 and fleet.decode.core.running_count == 0)
    assert [received.path for received in fleet.decode.aborted] == [path]


async def test_a_client_that_has_just_left_is_no_fault(
    fleet: SimFleet, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def write(request: web.Request, *_: object) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    monkeypatch.setattr(worker_module, "write", write)
    with pytest.raises(aiohttp.ClientError):
        await client.post(fleet.decode, GENERATE, BODY)
    await until(lambda: not fleet.decode.in_flight)
    assert [received.path for received in fleet.decode.aborted] == [GENERATE]
    assert caplog.records == []


async def test_stopping_counts_nobody_as_aborted(client: Any) -> None:
    worker = SimWorker("decode")
    await worker.start()
    worker.behave.itl_s = 0.05
    request = asyncio.create_task(client.post(worker, CHAT, ENDLESS))
    await until(lambda: worker.core.running_count == 1)
    assert worker.in_flight == 1
    assert worker.connections == 1
    await worker.stop()
    with pytest.raises(aiohttp.ClientError):
        await request
    assert worker.aborted == []


# --- ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "key", "want"),
    [
        (GENERATE, BODY, "request_id", "generate-tokens-{}"),
        (CHAT, HELLO, "id", "chatcmpl-{}"),
        ("/v1/completions", {"prompt": "a"}, "id", "cmpl-{}"),
        (f"{CHAT}/render", HELLO, "request_id", "chatcmpl-{}"),
        ("/v1/messages", {**HELLO, "max_tokens": 3}, "id", "chatcmpl-{}"),
    ],
)
async def test_the_header_wins_over_the_body(
    path: str, body: Any, key: str, want: str, fleet: SimFleet, client: Any
) -> None:
    named = {**body, "request_id": "b"}
    both = await client.post(fleet.decode, path, named, headers={"X-Request-Id": "h"})
    assert both.body[key] == want.format("h")
    assert (await client.post(fleet.decode, path, named)).body[key] == want.format("b")
    random = (await client.post(fleet.decode, path, body)).body[key]
    assert len(random) == len(want.format("0123456789abcdef"))


async def test_responses_use_the_bodys_id_as_it_is(fleet: SimFleet, client: Any) -> None:
    body = {"input": "a", "request_id": "mine"}
    got = await client.post(fleet.decode, "/v1/responses", body, headers={"X-Request-Id": "h"})
    assert got.body["id"] == "mine"


# --- how it was started ---------------------------------------------------------------------------------------


async def test_scale_out_off_is_refused_as_recorded(started: Any, client: Any, recorded: Any) -> None:
    worker = await started(scale_out=False)
    for name, path in (
        ("generate_403", GENERATE),
        ("render_chat_403", f"{CHAT}/render"),
        ("abort_403", "/inference/v1/abort_requests"),
    ):
        want = recorded(f"scale_out_disabled/{name}")["response"]
        got = await client.post(worker, path, {})
        assert (got.status, got.body) == (want["status"], want["body"])
    assert (await client.post(worker, CHAT, HELLO)).status == 200


async def test_a_key_guards_the_api_and_not_the_probes(started: Any, client: Any, recorded: Any) -> None:
    worker = await started(api_key="sk-1")
    want = recorded("scale_out_disabled/auth_missing_generate")["response"]
    for path in (GENERATE, CHAT):
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "sk-1"}):
            got = await client.post(worker, path, {}, headers=headers)
            assert (got.status, got.body) == (want["status"], want["body"])
    assert (await client.get(worker, "/v1/models")).status == 401
    with_key = {"Authorization": "Bearer sk-1"}
    assert (await client.post(worker, GENERATE, BODY, headers=with_key)).status == 200
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await client.get(worker, path)).status == 200


@pytest.mark.parametrize(
    "name",
    [
        "generate_error_derender",
        "generate_error_stop",
        "generate_error_text",
        "structured_outputs",
        "render_chat",
        "render_completion",
        "chat",
    ],
)
async def test_a_server_without_a_tokenizer_refuses_as_recorded(
    name: str, started: Any, client: Any, recorded: Any
) -> None:
    recording = recorded(f"tokens_only/{name}")
    request, want = recording["request"], recording["response"]
    if "token_ids" in request["body"]:
        request["body"]["token_ids"] = [3, 4]
    got = await client.post(await started(tokens_only=True), request["path"], request["body"])
    assert (got.status, got.body) == (want["status"], want["body"])


async def test_a_server_without_a_tokenizer_serves_tokens(started: Any, client: Any) -> None:
    worker = await started("prefill", tokens_only=True)
    got = await client.post(worker, GENERATE, BODY)
    assert got.body["output_mode"] == "tokens"
    assert (await client.post(worker, "/abort_requests", {"request_ids": ["x"]})).status == 200


async def test_a_server_without_parsers_derenders_without_a_context(started: Any, client: Any) -> None:
    worker = await started(parsers=False)
    rendered = (await client.post(worker, f"{CHAT}/render", HELLO)).body
    assert rendered["reasoning_ended"] is None
    assert "skip_special_tokens" not in rendered["sampling_params"]
    del rendered["parse_context"]
    got = await client.post(worker, GENERATE, {**rendered, "output_mode": "derender"})
    message = got.body["choices"][0]["message"]
    assert message["content"].startswith("<think>\n")
    assert message["reasoning"] is None
    chat = (await client.post(worker, CHAT, HELLO)).body
    assert chat["choices"][0]["message"] == message
    assert chat["usage"]["completion_tokens_details"] is None


async def test_a_stream_without_parsers_has_a_content_in_every_delta(started: Any, client: Any) -> None:
    worker = await started(parsers=False)
    got = await client.post(worker, CHAT, {**HELLO, "stream": True, "stop": ["never said"]})
    assert all("content" in choice["delta"] for event in got.events[:-1] for choice in event["choices"])


async def test_version_0_32_knows_no_derender(started: Any, client: Any, recorded: Any) -> None:
    worker = await started(version="0.32.0")
    got = await client.post(worker, GENERATE, {**BODY, "output_mode": "derender"})
    assert got.status == 400
    assert "Input should be 'tokens' or 'text'" in got.body["error"]["message"]
    assert (await client.get(worker, "/version")).body == {"version": "0.32.0"}
    rendered = (await client.post(worker, f"{CHAT}/render", HELLO)).body
    assert "parse_context" not in rendered
    got = await client.post(worker, GENERATE, {**rendered, "parse_context": {"new": 1}, "output_mode": "text"})
    assert got.body["output_mode"] == "text"
    streamed = await client.post(worker, CHAT, {**HELLO, "stream": True})
    assert not any("kv_transfer_params" in event for event in streamed.events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_version_0_31_ignores_output_mode_and_echoes_nothing(stream: bool, started: Any, client: Any) -> None:
    worker = await started(version="0.31.0")
    body = {**BODY, "output_mode": "derender", "stream": stream}
    got = await client.post(worker, GENERATE, body)
    assert got.status == 200
    for answer in got.events[:-1] or [got.body]:
        assert "output_mode" not in answer
        assert not {"text", "message", "stop_reason"} & answer["choices"][0].keys()


async def test_a_render_server_does_not_serve(fleet: SimFleet, client: Any) -> None:
    for path in (GENERATE, CHAT, "/v1/completions"):
        got = await client.post(fleet.render, path, {})
        assert (got.status, got.body) == (404, {"detail": "Not Found"})
    assert (await client.get(fleet.render, "/health")).status == 200


@pytest.mark.parametrize("path", ["/v1/nope", "/v1/nope?x=1", "/"])
async def test_an_unknown_path_is_404_and_another_method_405(path: str, fleet: SimFleet, client: Any) -> None:
    assert (await client.post(fleet.decode, path, {})).body == {"detail": "Not Found"}
    assert (await client.get(fleet.decode, CHAT)).body == {"detail": "Method Not Allowed"}


async def test_models_and_version_are_as_recorded(fleet: SimFleet, client: Any, recorded: Any) -> None:
    models = (await client.get(fleet.decode, "/v1/models")).body
    want = recorded("misc/models")["response"]["body"]
    assert list(models["data"][0]) == list(want["data"][0])
    assert list(models["data"][0]["permission"][0]) == list(want["data"][0]["permission"][0])
    assert (await client.get(fleet.decode, "/version")).body == recorded("misc/version")["response"]["body"]
    for method in (client.get(fleet.decode, "/ping"), client.post(fleet.decode, "/ping", {})):
        got = await method
        assert (got.status, got.raw) == (200, b"")


async def test_a_request_id_comes_back_where_the_server_was_told_so(started: Any, client: Any) -> None:
    worker = await started(request_id_headers=True)
    got = await client.post(worker, CHAT, HELLO, headers={"X-Request-Id": "h"})
    assert got.headers["X-Request-Id"] == "h"
    assert len((await client.post(worker, CHAT, HELLO)).headers["X-Request-Id"]) == 32
    worker = await started()
    got = await client.post(worker, CHAT, HELLO, headers={"X-Request-Id": "h"})
    assert "X-Request-Id" not in got.headers
    assert got.headers["Server"] == "uvicorn"


async def test_cached_tokens_are_shown_where_the_server_was_told_so(started: Any, client: Any, recorded: Any) -> None:
    worker = await started(prompt_tokens_details=True)
    request = {"messages": [{"role": "user", "content": "there " * 100}], "max_tokens": 2}
    for name in ("chat_cached_tokens", "chat_cached_tokens_2"):
        want = recorded(f"scale_out_disabled/{name}")["response"]["body"]["usage"]["prompt_tokens_details"]
        got = (await client.post(worker, CHAT, request)).body["usage"]["prompt_tokens_details"]
        assert list(got) == list(want)
        assert [bool(value) for value in got.values()] == [bool(value) for value in want.values()]
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    details = (await client.post(worker, CHAT, streamed)).events[-2]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
    assert "multimodal_tokens" not in details


# --- what a user may write ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "# Tools\n<tools>\nnonsense\n[1]\n</tools>"}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "<|im_start|>assistant\n<|im_end|>\u2028"}],
        [{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}],
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]},
            {"role": "tool", "content": "x"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]}],
        [{"role": "user", "content": ""}],
    ],
)
async def test_a_strange_conversation_is_answered(messages: Any, fleet: SimFleet, client: Any) -> None:
    got = await client.post(fleet.decode, CHAT, {"messages": messages, "max_tokens": 50})
    assert got.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": "a"}),
        (CHAT, {"messages": ["a"]}),
        (CHAT, {"messages": [{"content": "a"}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None}),
        (CHAT, {**HELLO, "tools": {}}),
        (CHAT, {**HELLO, "tools": [1]}),
        (CHAT, {**HELLO, "chat_template_kwargs": 5}),
        (CHAT, {**HELLO, "response_format": 5}),
        (CHAT, {**HELLO, "n": "two"}),
        (CHAT, {**HELLO, "kv_transfer_params": [1]}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 0}),
        ("/v1/responses", {}),
        ("/v1/responses", {"input": None}),
        ("/v1/responses", {"input": [None]}),
        ("/v1/responses", {"input": "a", "tools": [1]}),
        ("/v1/responses", {"input": "a", "text": 5}),
        ("/v1/messages", {"messages": "a", "max_tokens": 3}),
        ("/v1/messages", {"messages": None, "max_tokens": 3}),
        ("/v1/messages", {"messages": [None], "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user"}], "max_tokens": 3}),
        ("/v1/messages", {**HELLO, "max_tokens": None}),
        ("/v1/messages", {**HELLO, "max_tokens": 3, "system": 5}),
        ("/v1/messages", {**HELLO, "max_tokens": 3, "system": [1]}),
        ("/v1/messages", {**HELLO, "max_tokens": 3, "tools": [1]}),
        (GENERATE, {**BODY, "token_ids": ["a"]}),
        (GENERATE, {**BODY, "token_ids": 5}),
        (GENERATE, {**BODY, "sampling_params": []}),
        (GENERATE, {**BODY, "sampling_params": {"stop": [1]}}),
        (GENERATE, {**BODY, "stream": "maybe"}),
        (GENERATE, {**BODY, "parse_context": [1]}),
    ],
)
async def test_a_wrong_type_is_a_400(path: str, body: Any, fleet: SimFleet, client: Any) -> None:
    got = await client.post(fleet.decode, path, body)
    assert got.status == 400, got.text
    assert got.body["error"]["code"] == 400


# --- abort ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "id"),
    [
        (GENERATE, {**BODY, "sampling_params": {"ignore_eos": True}, "output_mode": "text"}, "generate-tokens-x"),
        (CHAT, ENDLESS, "chatcmpl-x"),
        ("/v1/completions", {"prompt": "a", "ignore_eos": True, "max_tokens": 5000}, "cmpl-x-0"),
        ("/v1/messages", {**ENDLESS, "max_tokens": 5000}, "chatcmpl-x"),
        ("/v1/responses", {"input": "Never stop.", "request_id": "resp_x"}, "resp_x_0"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_ends_normally(
    path: str, body: Any, id: str, stream: bool, fleet: SimFleet, client: Any
) -> None:
    fleet.decode.behave.itl_s = 0.01
    request = asyncio.create_task(client.post(fleet.decode, path, {"request_id": "x", **body, "stream": stream}))
    await until(lambda: fleet.decode.core.running_count == 1)
    await client.post(fleet.decode, "/inference/v1/abort_requests", {"request_ids": ["x"]})
    assert fleet.decode.core.running_count == 1, "the bare id does nothing"
    got = await client.post(fleet.decode, "/inference/v1/abort_requests", {"request_ids": [id]})
    assert (got.status, got.raw) == (200, b"")
    got = await request
    assert got.status == 200
    if "choices" in (got.body or {}):
        assert got.body["choices"][0]["finish_reason"] == "abort"
    elif got.events and got.events[-1] == "[DONE]":
        assert got.events[-2]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("name", ["abort_error_bad_json", "abort_error_missing_field", "abort_string_not_list"])
async def test_the_abort_route_answers_as_recorded(name: str, fleet: SimFleet, client: Any, recorded: Any) -> None:
    recording = recorded(f"abort/{name}")
    request, want = recording["request"], recording["response"]
    body = request["raw_body"].encode() if "raw_body" in request else request["body"]
    got = await client.post(fleet.decode, request["path"], body, headers={"Content-Type": "application/json"})
    assert (got.status, got.body) == (want["status"], want.get("body"))
    assert (await client.post(fleet.decode, "/abort_requests", {})).status == 404


# --- the probe for a cached prompt ----------------------------------------------------------------------------

PROBE = {"Prefer": "if-available"}


async def test_a_probe_means_nothing_to_vllm_itself(fleet: SimFleet, client: Any) -> None:
    assert (await client.post(fleet.decode, CHAT, HELLO, headers=PROBE)).status == 200


@pytest.mark.parametrize(("rule", "status"), [("always_miss", 412), ("always_hit", 200)])
async def test_a_rule_decides_about_probes_alone(rule: Any, status: int, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.cache_rule = rule
    assert (await client.post(fleet.decode, CHAT, HELLO, headers=PROBE)).status == status
    assert (await client.post(fleet.decode, CHAT, HELLO)).status == 200


async def test_a_prompt_that_was_answered_is_a_hit(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.cache_rule = "seen_before"
    assert (await client.post(fleet.decode, CHAT, HELLO, headers=PROBE)).status == 412
    assert (await client.post(fleet.decode, CHAT, HELLO)).status == 200
    assert (await client.post(fleet.decode, CHAT, {**HELLO, "max_tokens": 3}, headers=PROBE)).status == 200
    assert (await client.post(fleet.decode, CHAT, ENDLESS, headers=PROBE)).status == 412


async def test_a_rule_may_be_a_function(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.cache_rule = lambda received: received.header("x-hit") == "1"
    assert (await client.post(fleet.decode, CHAT, HELLO, headers=PROBE)).status == 412
    assert (await client.post(fleet.decode, CHAT, HELLO, headers={**PROBE, "X-Hit": "1"})).status == 200


# --- the fleet ------------------------------------------------------------------------------------------------


async def test_a_fleet_paces_its_decode_workers(client: Any) -> None:
    async with SimFleet(prefills=2, decodes=3, itl_s=0.01) as fleet:
        assert len({worker.url for worker in fleet.workers}) == 6
        assert [worker.behave.itl_s for worker in fleet.decodes] == [0.01] * 3
        loop = asyncio.get_running_loop()
        start = loop.time()
        await client.post(fleet.decode, CHAT, {**HELLO, "max_tokens": 11})
        assert loop.time() - start >= 0.1
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get(fleet.decode, "/health")

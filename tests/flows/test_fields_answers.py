"""What of a worker's answer a client gets: refusals in its words, envelopes of their own fields only, modes checked.

Not here: V18 (usage of workers before 0.31, whose decode counts prefill's tokens as its own cache). Cached tokens are
relayed as decode tells them, which is right from 0.31 on; nothing rewrites them for older workers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.sim import ABSENT, Canned, Fault, Settings
from coordinator.sim.faults import echo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SHAPES = ["openai", "text", "derender"]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NO_MODEL = {"message": "no model", "type": "NotFoundError", "param": None, "code": 404}
BAD = {"message": "too much", "type": "BadRequestError", "param": "temperature", "code": 400}
OWN = {
    "message": "its own",
    "type": "invalid_request_error",
    "param": None,
    "code": "context_length_exceeded",
    "x": [1],
}
ROLES = ["render", "prefill", "decode"]
FREES_NOTHING = "the decode leg is refused by a canned answer, which frees nothing"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "error"), [(404, NO_MODEL), (400, BAD), (400, OWN), (422, OWN)])
@pytest.mark.parametrize("role", ROLES)
async def test_a_workers_refusal_is_the_clients_in_the_workers_words(coordinator, fleet, role, status, error, stream):
    """V12, L14: SDKs map it by status and code, and people read the message; the legs behind are not made."""
    at = await coordinator(fleet, "text")
    getattr(fleet, role).behave.next(Fault(canned=Canned(status, json.dumps({"error": error}))))
    got = await at.chat(stream=stream)
    assert (got.status, got.body) == (status, {"error": error})
    assert got.headers["Content-Type"] == "application/json"
    asked = [any(leg.header("x-request-id") for leg in worker.received) for worker in fleet.workers]
    assert asked == [leg <= ROLES.index(role) for leg in range(3)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("<html>slow down</html>", "text/html"),
        ("slow down", "text/plain"),
        ("", "application/json"),
        ('{"error":null}', "application/json"),
        ('["x"]', "application/json"),
        ('{"detail":"slow down"}', "application/json"),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_an_overloaded_workers_page_is_json_for_the_client_with_its_time_to_wait(
    coordinator, fleet, status, body, content_type, stream
):
    """V15: SDKs wait for as long as it says, and parse the body as JSON whatever its type says."""
    at = await coordinator(fleet, "alone")
    fleet.decode.behave.fault = Fault(canned=Canned(status, body, (("Retry-After", "2"),), content_type))
    got = await at.chat(stream=stream)
    assert (got.status, got.headers["Retry-After"], got.headers["Content-Type"]) == (status, "2", "application/json")
    assert set(got.error) == {"message", "type", "param", "code"}
    assert got.error["code"] == status
    assert b"slow down" not in got.raw


async def test_our_own_503_has_a_time_to_wait_too(coordinator, fleet):
    """V15: vLLM's own has none."""
    at = await coordinator(fleet, "alone")
    fleet.decode.behave.fault = Fault(canned=Canned(503, "{}"))
    got = await at.chat()
    assert (got.status, got.error["code"]) == (503, 503)
    assert 0 < int(got.headers["Retry-After"]) <= 2


async def test_a_workers_5xx_keeps_its_text_to_itself(coordinator, fleet, excuse):
    """C1: the client gets a status that says whose fault it was, and the leg."""
    excuse("unread", FREES_NOTHING)
    at = await coordinator(fleet)
    for status in (500, 501, 502, 507):
        canary = {"error": {"message": "canary at 0x7f /root/x.py", "type": "InternalServerError", "code": status}}
        fleet.decode.behave.next(Fault(canned=Canned(status, json.dumps(canary))), times=3)
        got = await at.chat()
        fleet.decode.behave.clear()
        assert (got.status, got.error["type"]) == (502, "BadGatewayError")
        assert got.error["message"].startswith("decode: ")
        assert b"canary" not in got.raw


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_prefill_had_cached_are_told_once_and_as_decode_tells_them(coordinator, fleet_of, stream):
    """V17: prefill writes its count into the hand-over, and decode has corrected its usage by it."""
    fleet = await fleet_of(settings=Settings(prompt_tokens_details=True))
    at = await coordinator(fleet)
    long = "Repeat: " + "so it goes and " * 40
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    counts = []
    for _ in range(2):
        got = await at.chat(long, **options)
        usages = [chunk["usage"] for chunk in got.chunks if chunk.get("usage")] if stream else [got.body["usage"]]
        (usage,) = usages
        counts.append(usage["prompt_tokens_details"]["cached_tokens"])
        handed = fleet.decode.received[-1].body["kv_transfer_params"]["remote_prefill_cached_tokens"]
        assert counts[-1] == handed
    assert counts[0] == 0
    assert 0 < counts[1] < usage["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/inference/v1/generate"])
@pytest.mark.parametrize("mode", [ABSENT, "tokens", None])
async def test_a_mode_that_is_not_echoed_is_a_502_that_says_which_vllm_it_takes(coordinator, fleet, mode, path):
    """V19, C9: an old worker answers 200 with ids alone, which a client would read as an empty answer."""
    at = await coordinator(fleet, "text")
    for stream in (False, True):
        fleet.decode.behave.next(Fault(path="/inference/v1/generate", rewrite=echo(mode)))
        got = await at.post(path, {**question(path, "Say hello."), "stream": stream})
        assert (got.status, got.headers["Content-Type"]) == (502, "application/json")
        assert "output_mode 'text'" in got.error["message"]
        assert "vLLM 0.32 or later" in got.error["message"]


async def test_a_worker_older_than_the_modes_is_a_502(coordinator, fleet_of):
    """V19: of 0.31, which ignores the field; of 0.32, which refuses derender."""
    old = await fleet_of(decode_settings=Settings(version="0.31.0"))
    at = await coordinator(old, "text", ready=False)
    got = await at.chat()
    assert (got.status, "vLLM 0.32 or later" in got.error["message"]) == (502, True)


def question(path: str, text: str, **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == COMPLETIONS:
        own = {"prompt": text}
    if path == "/v1/responses":
        own = {"input": text}
    if path == "/inference/v1/generate":
        return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}, "output_mode": "text", **fields}
    if path == "/v1/messages":
        own["max_tokens"] = 200
    return {"model": "tiny", **own, **fields}


GENERATE_ONLY = ("request_id", "output_mode", "mm_placeholders", "prompt_token_id_logprobs")
IN_A_CHOICE = ("sampling_mask", "text")


def leaked(value: Any, names: tuple[str, ...]) -> list[str]:
    """Return the names that stand anywhere in an answer."""
    if isinstance(value, list):
        return [name for item in value for name in leaked(item, names)]
    if not isinstance(value, dict):
        return []
    return [name for name in value if name in names] + [name for item in value.values() for name in leaked(item, names)]


def told_hosts(value: Any) -> list[str]:
    """Return the transfer params that hold something, anywhere in an answer."""
    if isinstance(value, list):
        return [name for item in value for name in told_hosts(item)]
    if not isinstance(value, dict):
        return []
    own = [name for name in ("kv_transfer_params", "ec_transfer_params") if value.get(name)]
    return own + [name for item in value.values() for name in told_hosts(item)]


def hand_over(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as a decode worker that names hosts, and with everything else that is for the tokens-in route."""
    params = {"remote_host": "192.0.2.7", "remote_block_ids": [[1]]}
    return {**body, "kv_transfer_params": params, "ec_transfer_params": params, "x_new": 1, "metrics": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_a_rebuilt_answer_has_the_fields_of_its_own_api_and_no_others(coordinator, fleet, shape, path, stream):
    """V20, C8: by a list of what is allowed, so that what is new on the route does not leak either."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(rewrite=hand_over))
    got = await at.post(path, question(path, "What is 2 + 2?", stream=stream))
    assert got.status == 200
    answers = got.chunks if stream else [got.body]
    assert leaked(answers, (*GENERATE_ONLY, "x_new", "sampling_mask")) == []
    assert told_hosts(answers) == []
    assert b"192.0.2.7" not in got.raw
    for answer in answers:
        for choice in answer.get("choices", ()):
            assert not choice.get("token_ids")
            assert not answer.get("prompt_token_ids")
    if path == CHAT and not stream and shape == "derender":
        assert got.body["choices"][0]["message"]["reasoning"].strip() == "2 + 2 is 4.\n\nI am sure of it."
        assert got.text.strip() == "2 + 2 = **4**."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_a_relayed_answer_tells_of_no_hosts_unless_the_operator_wants_it(
    coordinator, fleet, excuse, path, stream
):
    """V20, C8: block ids, hosts and ports are nobody's business outside."""
    for exposed in (False, True):
        at = await coordinator(fleet, "alone", pipeline={"expose_transfer_params": exposed})
        fleet.decode.behave.next(Fault(rewrite=hand_over))
        got = await at.post(path, question(path, "What is 2 + 2?", stream=stream))
        assert got.status == 200
        assert (b"192.0.2.7" in got.raw) is exposed
        assert leaked(got.chunks if stream else [got.body], ("x_new",)) != []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
async def test_token_ids_are_told_when_they_are_asked_for(coordinator, fleet, shape, stream):
    """V20: a documented extension of vLLM, and no leak then."""
    at = await coordinator(fleet, shape)
    got = await at.chat("Say hello.", return_token_ids=True, stream=stream)
    assert got.status == 200
    choices = [choice for chunk in (got.chunks if stream else [got.body]) for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    told = [answer.get("prompt_token_ids") for answer in (got.chunks if stream else [got.body])]
    prompts = [prompt for prompt in told if prompt]
    assert (len(ids), len(prompts), len(prompts[0])) == (10, 1, 18)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cap", "finish"), [(None, "tool_calls"), (31, "length")], ids=["to its end", "cut by the cap behind the call"]
)
@pytest.mark.parametrize("shape", ["openai", "derender"])
async def test_a_turn_with_tool_calls_ends_by_tool_calls_only_if_the_model_ended_it(
    coordinator, fleet, shape, cap, finish, stream
):
    """V24, B9: an agent that acts on a call that was cut acts on half of its arguments."""
    at = await coordinator(fleet, shape)
    if finish == "length":
        fleet.decode.behave.next(Fault(rewrite=cut_by_length))
    got = await at.chat("What is the weather in Oslo?", tools=[TOOL], stream=stream)
    assert got.status == 200
    choices = [choice for chunk in (got.chunks if stream else [got.body]) for choice in chunk["choices"]]
    messages = [choice["delta"] if stream else choice["message"] for choice in choices]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    assert calls[0]["function"]["name"] == "get_weather"
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"city": "Oslo"}'
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [finish]


def cut_by_length(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as if the cap had been reached right behind the call."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] and "length"} for choice in body.get("choices", ())]
    return {**body, "choices": choices}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_nothing_but_a_call_has_null_content(coordinator, fleet, stream):
    """B13: agents tell a tool turn by it; a rebuilt answer says what vLLM's own does."""
    at = await coordinator(fleet, "derender")
    got = await at.chat("What is the weather in Oslo?", tools=[TOOL], stream=stream)
    if stream:
        deltas = [choice["delta"] for chunk in got.chunks for choice in chunk["choices"]]
        with_calls = [delta for delta in deltas if "tool_calls" in delta]
        assert with_calls
        assert all(delta["content"] is None for delta in with_calls)
        assert [call["index"] for delta in with_calls for call in delta["tool_calls"]] == [0, 0]
    else:
        assert got.body["choices"][0]["message"]["content"] is None


async def test_an_answer_without_tool_calls_has_no_list_of_them(coordinator, fleet):
    """B13: an empty list was taken for a tool turn."""
    for shape in SHAPES:
        at = await coordinator(fleet, shape)
        message = (await at.chat(tools=[TOOL])).body["choices"][0]["message"]
        assert "tool_calls" not in message


async def test_an_infinite_logprob_reaches_the_client_as_strict_json(coordinator, fleet, scripted):
    """C10: Python writes NaN and Infinity, and no other JSON parser reads them."""
    first = '{"token":"a","logprob":-Infinity,"bytes":[97],"top_logprobs":[{"token":"a","logprob":NaN,"bytes":[97]}]}'
    choice = f'{{"index":0,"text":"a","finish_reason":"stop","logprobs":{{"content":[{first}]}}}}'
    worker = await scripted(scripted.json(f'{{"output_mode":"text","choices":[{choice}]}}'.encode()))
    pools = {"prefill": None, "decode": {"endpoints": [worker.url]}}
    at = await coordinator(fleet, "text", steps={"prefill": None}, pools=pools)
    got = await at.chat(logprobs=True, top_logprobs=1)
    assert got.status == 200

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(got.raw, parse_constant=refuse)

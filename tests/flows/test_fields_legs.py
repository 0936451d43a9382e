"""What of a client's body each leg is sent: the prompt's part on all, the answer's part on decode alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.sim import Fault, Settings
from envelope.written import LONG
from tests.flows.client import exchange

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
TOKENS_IN = ["text", "derender"]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
HELLO = [{"role": "user", "content": "Say hello."}]


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **NO_THINKING, **fields}


async def test_a_field_that_nobody_knows_reaches_decode_unchanged(coordinator, fleet):
    """V07: the API is an open world: what is new tomorrow must not be lost today."""
    at = await coordinator(fleet)
    message = {"role": "user", "content": "Say hello.", "x_new": {"a": [1, 2.5, None, True, "é\u2028"]}}
    body = asking(messages=[message], x_top={"b": {}}, x_null=None, metadata={"k": "v"}, service_tier="auto")
    assert (await at.post(CHAT, body)).status == 200
    decode = fleet.decode.received[-1].body
    assert decode.pop("kv_transfer_params")
    assert decode == body
    assert list(decode) == list(body)
    prefill = fleet.prefill.received[-1].body
    assert {name: prefill[name] for name in ("messages", "x_top", "x_null")} == {
        name: body[name] for name in ("messages", "x_top", "x_null")
    }


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_a_long_prompt_reaches_every_leg_as_it_was_asked(coordinator, fleet_of, shape, separators):
    """It is sent on as text: what the client wrote, or what the renderer made of it."""
    fleet = await fleet_of(settings=Settings(max_model_len=50_000))
    at = await coordinator(fleet, shape)
    turns = [{"role": "user", "content": f'{n}. naïve "東京" [1, 2], ' * 3} for n in range(400)]
    body = asking(messages=[*turns, *HELLO], max_tokens=5, seed=1, stop=["\n"])
    raw = json.dumps(body, separators=separators, ensure_ascii=False).encode()
    assert len(raw) > LONG
    assert (await at.post(CHAT, raw)).status == 200
    prefill, decode = fleet.prefill.received[-1].body, fleet.decode.received[-1].body
    if shape == "openai":
        assert prefill["messages"] == body["messages"]
        assert {name: decode[name] for name in body} == body
    else:
        assert fleet.render.received[-1].body == body
        rendered = await at_render(fleet, CHAT, body)
        assert len(json.dumps(rendered["token_ids"])) > LONG
        assert prefill["token_ids"] == decode["token_ids"] == rendered["token_ids"]


@pytest.mark.parametrize("shape", TOKENS_IN)
async def test_render_is_sent_the_clients_body_unchanged(coordinator, fleet, shape):
    """V07: it makes of it what the worker's own route would."""
    at = await coordinator(fleet, shape)
    body = asking(x_new={"a": 1}, max_tokens=5, stream=True, stream_options={"include_usage": True}, user="u")
    assert (await at.post(CHAT, body)).status == 200
    assert fleet.render.received[-1].body == body


@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_null_is_as_good_as_absent_and_is_passed_on(coordinator, fleet, shape):
    """C5: several SDKs write null for what was not set."""
    at = await coordinator(fleet, shape)
    names = ["max_tokens", "max_completion_tokens", "n", "stop", "seed", "tools", "logprobs", "top_logprobs", "stream"]
    names += ["stream_options", "response_format", "temperature", "top_p", "min_tokens", "cache_salt", "logit_bias"]
    body = asking(**dict.fromkeys(names), kv_transfer_params=None, ec_transfer_params=None)
    got = await at.post(CHAT, body)
    assert (got.status, got.text) == (200, "Hello! How can I help you today?")
    if shape == "openai":
        decode = fleet.decode.received[-1].body
        assert {name: decode[name] for name in names} == dict.fromkeys(names)


EXTRAS = {
    "n": 2,
    "best_of": 3,
    "use_beam_search": False,
    "logprobs": True,
    "top_logprobs": 20,
    "prompt_logprobs": 5,
    "logprob_token_ids": [1],
    "min_tokens": 50,
    "stop": ["###"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "bad_words": ["no"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "output_mode": "text",
    "return_token_ids": True,
    "echo": False,
    "thinking_token_budget": 5,
    "structured_outputs": {"choice": ["a"]},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prefill_is_asked_for_one_token_and_nothing_that_is_thrown_away(coordinator, fleet, scripted, path):
    """V08, G3: each of these was a 400, a crash or double work somewhere."""
    handover = {"remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h"}
    reply = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": {**handover, "remote_port": 1}}
    prefill = await scripted(scripted.json(reply))
    done = b'data: {"choices":[{"index":0,"text":"a","delta":{}}]}\n\ndata: [DONE]\n\n'
    decode = await scripted(scripted.sse(done))
    at = await coordinator(
        fleet, pools={"prefill": {"endpoints": [prefill.url]}, "decode": {"endpoints": [decode.url]}}
    )
    own = {"messages": HELLO} if path == CHAT else {"prompt": "Say hello."}
    # n and prompt_logprobs would keep prefill out of it altogether: they have rules of their own.
    extras = {name: value for name, value in EXTRAS.items() if name not in ("n", "prompt_logprobs")}
    body = {"model": "tiny", **own, **extras, "max_tokens": 60}
    assert (await at.post(path, {**body, "n": 1})).status == 200
    (_, sent), (_, answered) = prefill.received[0], decode.received[0]
    assert sent == {
        "model": "tiny",
        **own,
        "max_tokens": 1,
        "stream": False,
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert {name: answered[name] for name in body} == body


@pytest.mark.parametrize("shape", TOKENS_IN)
async def test_a_tokens_in_prefill_is_the_prompt_and_one_token(coordinator, fleet, shape):
    """V08, S41: of the client's sampling nothing is left, and of the answer's parsing neither."""
    at = await coordinator(fleet, shape)
    fields = {"logprobs": True, "top_logprobs": 3, "stop": ["###"], "min_tokens": 2, "temperature": 0.5, "seed": 7}
    body = asking(**fields, max_tokens=60, tools=[TOOL], bad_words=["no"], cache_salt="s", priority=0, stream=True)
    assert (await at.post(CHAT, body)).status == 200
    prefill, decode = fleet.prefill.received[-1].body, fleet.decode.received[-1].body
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    assert prefill.pop("sampling_params") == {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "extra_args": {"kv_transfer_params": params},
    }
    assert prefill.pop("kv_transfer_params") == params
    assert prefill == {
        "request_id": decode["request_id"],
        "token_ids": decode["token_ids"],
        "model": "tiny",
        "cache_salt": "s",
        "priority": 0,
        "features": None,
        "content_parts": None,
        "output_mode": "tokens",
        "stream": False,
        **{name: None for name in ("ec_transfer_params",) if name in prefill},
    }


SHAPING = {
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False, "x": 1},
    "chat_template": None,
    "documents": [{"title": "t", "text": "x"}],
    "reasoning_effort": "none",
    "mm_processor_kwargs": {"max_pixels": 10},
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "cache_salt": "tenant",
    "priority": 0,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "response_format": {"type": "json_object"},
    "truncate_prompt_tokens": None,
}


async def test_what_shapes_the_prompt_or_its_cache_is_on_prefill_and_decode_alike(coordinator, fleet):
    """V09: or the two legs' tokens differ, and decode reads blocks of another prompt."""
    at = await coordinator(fleet)
    body = {"model": "tiny", "messages": [{"role": "system", "content": "Be brief."}, *HELLO], **SHAPING}
    got = await at.post(CHAT, body)
    assert got.status == 200
    prefill, decode = fleet.prefill.received[-1].body, fleet.decode.received[-1].body
    for name in ("model", "messages", *SHAPING):
        assert (prefill[name], decode[name]) == (body[name], body[name]), name
    assert len(fleet.store.read) == 1


@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_a_lora_adapters_name_is_on_every_leg(coordinator, fleet_of, shape):
    """V09: an adapter is named as a model."""
    fleet = await fleet_of(settings=Settings(model="adapter-7"))
    at = await coordinator(fleet, shape)
    assert (await at.post(CHAT, asking(model="adapter-7"))).status == 200
    legs = [leg for worker in fleet.workers for leg in worker.received if leg.header("x-request-id")]
    assert [leg.body["model"] for leg in legs] == ["adapter-7"] * len(legs)
    assert len(legs) == (2 if shape == "openai" else 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("shape", TOKENS_IN)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_what_render_alone_knows_goes_to_decode_as_it_came(coordinator, fleet, path, shape, thinking, stream):
    """V21, V22, G4: the parse context, and from which token on a grammar binds."""
    at = await coordinator(fleet, shape)
    tool = TOOL if path == CHAT else {"name": "get_weather", "input_schema": {"type": "object"}}
    body = asking(max_tokens=50, tools=[tool], stream=stream, chat_template_kwargs={"enable_thinking": thinking})
    assert (await at.post(path, body)).status == 200
    rendered = await at_render(fleet, path, body)
    decode, prefill = fleet.decode.received[-1].body, fleet.prefill.received[-1].body
    for name in ("parse_context", "reasoning_ended", "reasoning_parser_kwargs", "token_ids", "features"):
        assert decode[name] == rendered[name], name
    assert rendered["parse_context"]["tools"]
    if path == CHAT:
        assert rendered["reasoning_ended"] is not thinking
    assert {"parse_context", "reasoning_ended", "reasoning_parser_kwargs"}.isdisjoint(prefill)
    assert decode["output_mode"] == shape


async def at_render(fleet: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the renderer itself."""
    async with exchange(fleet.render.url, f"{path}/render", body) as live:
        await live.head()
        return (await live.rest()).body


async def test_reasoning_fields_that_render_did_not_give_are_not_made_up(coordinator, fleet):
    """V22: a server without a reasoning parser says null, and the engine looks at the prompt itself."""
    at = await coordinator(fleet, "derender")
    fleet.render.behave.next(Fault(rewrite=lambda body: {**body, "reasoning_ended": None}))
    assert (await at.post(CHAT, asking())).status == 200
    assert fleet.decode.received[-1].body["reasoning_ended"] is None


@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_a_history_with_null_content_and_tool_results_passes_unchanged(coordinator, fleet, shape):
    """V26: on a pure tool turn, null is what an assistant says."""
    at = await coordinator(fleet, shape)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    ]
    got = await at.post(CHAT, asking(messages=messages, tools=[TOOL]))
    assert (got.status, got.text) == (200, "In Oslo it is cold.")
    if shape == "openai":
        assert fleet.decode.received[-1].body["messages"] == fleet.prefill.received[-1].body["messages"] == messages
    else:
        assert fleet.render.received[-1].body["messages"] == messages


TOKENIZED_ONCE = {"render": {}, "prefill": {"send_prompt_token_ids": True}, "decode": {"send_prompt_token_ids": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_workers_on_the_clients_own_route_may_be_given_the_tokens(coordinator, fleet, path, stream):
    """V31, K1: beside the hand-over, and the answer is the one without them."""
    at, plain = await coordinator(fleet, steps=TOKENIZED_ONCE), await coordinator(fleet)
    own: dict[str, Any] = {"input": "Say hello."} if path == "/v1/responses" else {"messages": HELLO, "max_tokens": 60}
    body = {"model": "tiny", "stream": stream, **own}
    untouched = await plain.post(path, body)
    given = await at.post(path, body)
    assert given.status == untouched.status == 200
    assert said(given, path, stream) == said(untouched, path, stream) != ""
    prefill, decode = fleet.prefill.received[-1].body, fleet.decode.received[-1].body
    ids = (await at_render(fleet, path, own | {"model": "tiny"}))["token_ids"]
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": ids,
    }
    assert decode["kv_transfer_params"]["prompt_token_ids"] == ids
    assert decode["kv_transfer_params"]["remote_block_ids"]
    assert (prefill[next(iter(own))], decode[next(iter(own))]) == (next(iter(own.values())),) * 2


def said(got: Any, path: str, stream: bool) -> str:
    """Return everything that the model said, thoughts included."""
    if stream:
        return "".join(str(text) for chunk in got.chunks for text in _deltas(chunk))
    if path == CHAT:
        message = got.body["choices"][0]["message"]
        return (message["reasoning"] or "") + message["content"]
    parts = (
        got.body["content"]
        if path == "/v1/messages"
        else [part for item in got.body["output"] for part in item["content"]]
    )
    return "".join(part.get("thinking") or part.get("text") or "" for part in parts)


def _deltas(chunk: dict[str, Any]) -> list[Any]:
    delta = chunk["choices"][0]["delta"] if chunk.get("choices") else chunk.get("delta") or {}
    if isinstance(delta, str):
        return [delta]
    return [delta.get(name) or "" for name in ("reasoning", "content", "text", "thinking")]


async def test_a_completions_prompt_is_replaced_by_its_tokens(coordinator, fleet):
    """V31: that route takes ids as the prompt."""
    at = await coordinator(fleet, steps=TOKENIZED_ONCE)
    got = await at.post(COMPLETIONS, {"model": "tiny", "prompt": "Count to 20.", "max_tokens": 5})
    assert got.status == 200
    prompts = [worker.received[-1].body["prompt"] for worker in (fleet.prefill, fleet.decode)]
    assert prompts[0] == prompts[1]
    assert set(map(type, prompts[0])) == {int}
    assert "prompt_token_ids" not in fleet.decode.received[-1].body["kv_transfer_params"]


async def test_tokens_are_not_sent_where_the_worker_needs_the_text_or_the_media(coordinator, fleet, scripted):
    """V31, M10: the ids would drop the image, and an echo is made of the prompt's text."""
    reply = {"choices": [{"index": 0, "text": "a", "message": {}, "finish_reason": "stop"}]}
    decode = await scripted(scripted.json(reply))
    at = await coordinator(
        fleet,
        "alone",
        steps={"render": {}, "decode": {"send_prompt_token_ids": True}},
        pools={"decode": {"endpoints": [decode.url]}},
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    assert (await at.post(CHAT, asking(messages=messages))).status == 200
    assert (await at.post(COMPLETIONS, {"model": "tiny", "prompt": "a b", "echo": True})).status == 200
    assert (await at.post(CHAT, asking())).status == 200
    (_, with_image), (_, echo), (_, text) = decode.received
    assert "kv_transfer_params" not in with_image
    assert echo["prompt"] == "a b"
    assert text["kv_transfer_params"]["prompt_token_ids"]


@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prompt_logprobs": 1}),
        (CHAT, {"prompt_logprobs": 0}),
        (COMPLETIONS, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"echo": True}),
        (GENERATE, {"sampling_params": {"prompt_logprobs": 1, "max_tokens": 2}}),
    ],
)
async def test_what_only_the_computer_of_the_prompt_can_tell_is_decodes_alone(coordinator, fleet, shape, path, fields):
    """V11: decode computes the whole prompt for it, whatever it is handed; no blocks are taken for nothing."""
    at = await coordinator(fleet, shape)
    own = {CHAT: asking(), COMPLETIONS: {"model": "tiny", "prompt": "Say hello."}, GENERATE: {"token_ids": [5, 6, 7]}}
    got = await at.post(path, {"max_tokens": 2, **own[path], **fields})
    if "echo" in fields and shape != "openai":
        assert (got.status, got.error["param"]) == (400, "echo")  # the prompt's text is not in generate's answer
        return
    assert got.status == 200
    assert not any(leg.header("x-request-id") for leg in fleet.prefill.received)
    assert "kv_transfer_params" not in fleet.decode.received[-1].body
    assert await at.count("coordinator_prefills_skipped_total", reason="prompt_logprobs") == 1


@pytest.mark.parametrize("fields", [{"stream": True}, {"background": False, "store": True}, {"store": False}, {}])
@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_no_worker_stores_a_response(coordinator, fleet, shape, fields):
    """V34: the next request would look for it on another worker."""
    at = await coordinator(fleet, shape)
    assert (await at.post("/v1/responses", {"model": "tiny", "input": "Say hello.", **fields})).status == 200
    legs = [leg for worker in fleet.workers for leg in worker.received if leg.path.startswith("/v1/responses")]
    asked = [leg.body["store"] for leg in legs if leg.header("x-request-id")]
    assert asked
    assert set(asked) == {False}


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("shape", ["openai", *TOKENS_IN])
async def test_what_needs_an_earlier_response_is_a_400_that_says_what_to_send(coordinator, fleet, shape, fields):
    """V34."""
    at = await coordinator(fleet, shape)
    got = await at.post("/v1/responses", {"model": "tiny", "input": "Say hello.", **fields})
    assert (got.status, got.error["type"]) == (400, "BadRequestError")
    assert got.error["param"].startswith(next(iter(fields)))
    assert "send" in got.error["message"] or "leave it out" in got.error["message"]
    assert not any(leg.header("x-request-id") for worker in fleet.workers for leg in worker.received)

"""Numbers and caps: the client's own value or its absence reaches decode, whatever the prefill leg was sent."""

from __future__ import annotations

from typing import Any

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
OPENAI, TOKENS_IN = ["openai"], ["text", "derender"]
ABSENT = object()
TEXT = {"messages": [{"role": "user", "content": "Count to one hundred."}]}
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {**TEXT, "chat_template_kwargs": {"enable_thinking": False}},
    COMPLETIONS: {"prompt": "Count to one hundred."},
    "/v1/responses": {"input": "Count to one hundred.", "reasoning": {"effort": "none"}},
    "/v1/messages": TEXT,
    GENERATE: {"token_ids": [1, 2, 3], "output_mode": "text"},
}


def asking(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **PROMPTS[path], **fields}


def sampling(leg: Any) -> dict[str, Any]:
    return leg.body["sampling_params"]


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1, -(2**53) - 1])
@pytest.mark.parametrize("shape", [*OPENAI, *TOKENS_IN])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_integer_beyond_a_doubles_precision_keeps_its_digits(coordinator, fleet, path, shape, seed):
    """V01: read as a double, 9007199254740993 would become …992."""
    at = await coordinator(fleet, shape)
    assert (await at.post(path, asking(path, seed=seed, max_tokens=3))).status == 200
    decode = fleet.decode.received[-1]
    if shape == "openai":
        assert fleet.prefill.received[-1].body["seed"] == decode.body["seed"] == seed
        assert f'"seed":{seed}'.encode() in decode.raw
    else:
        assert sampling(decode)["seed"] == seed
        assert f'"seed":{seed}'.encode() in decode.raw


async def test_an_integer_beyond_64_bits_keeps_its_digits_up_to_the_worker_that_refuses_it(coordinator, fleet):
    """V01: the refusal quotes what the client wrote."""
    at = await coordinator(fleet)
    got = await at.post(CHAT, asking(CHAT, unknown=[2**70, -(2**64), 0.1, 1e300, 1.0]))
    assert got.status == 200
    for leg in (fleet.prefill.received[-1], fleet.decode.received[-1]):
        assert leg.body["unknown"] == [2**70, -(2**64), 0.1, 1e300, 1.0]
        assert [type(number) for number in leg.body["unknown"]] == [int, int, float, float, float]


@pytest.mark.parametrize("value", [ABSENT, None, 16])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_cap_reaches_decode_as_it_was_sent_and_prefill_as_one(coordinator, fleet, path, value):
    """V03: an absence that is restored as 0 or 1 cuts the answer."""
    at = await coordinator(fleet)
    fields = {} if value is ABSENT else {"max_tokens": value}
    assert (await at.post(path, asking(path, **fields))).status == 200
    decode, prefill = fleet.decode.received[-1].body, fleet.prefill.received[-1].body
    assert ("max_tokens" in decode, decode.get("max_tokens")) == (value is not ABSENT, fields.get("max_tokens"))
    assert prefill["max_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "max_completion_tokens"), ("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")],
)
async def test_an_apis_own_cap_is_one_on_prefill_and_the_clients_on_decode(coordinator, fleet, path, name):
    """V03, C4."""
    at = await coordinator(fleet)
    got = await at.post(path, asking(path, **{name: 7}))
    assert got.status == 200
    assert fleet.decode.received[-1].body[name] == 7
    assert fleet.prefill.received[-1].body[name] == 1
    usage = got.body["usage"]
    assert (usage.get("completion_tokens") or usage.get("output_tokens")) == 7


@pytest.mark.parametrize("shape", TOKENS_IN)
@pytest.mark.parametrize(
    ("path", "caps", "expected"),
    [
        (CHAT, {"max_tokens": 50}, 50),
        (CHAT, {"max_completion_tokens": 50}, 50),
        (CHAT, {"max_completion_tokens": 50, "max_tokens": 70}, 50),
        (CHAT, {"max_completion_tokens": 70, "max_tokens": 50}, 70),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 50}, 50),
        (CHAT, {"max_tokens": 16}, 16),
        (CHAT, {"max_tokens": 1}, 1),
        (COMPLETIONS, {"max_tokens": 50}, 50),
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": None}, 16),
        (COMPLETIONS, {"max_tokens": 16}, 16),
        ("/v1/responses", {"max_output_tokens": 50}, 50),
        ("/v1/responses", {"max_output_tokens": 16}, 16),
        ("/v1/messages", {"max_tokens": 50}, 50),
        ("/v1/messages", {"max_tokens": 16}, 16),
    ],
)
async def test_every_apis_cap_becomes_the_engines_and_stands_there_alone(
    coordinator, fleet, shape, path, caps, expected
):
    """V04: render leaves out a cap of 16, the engine's default, and no cap would mean all the context."""
    at = await coordinator(fleet, shape)
    got = await at.post(path, asking(path, **caps))
    assert got.status == 200
    decode, prefill = fleet.decode.received[-1], fleet.prefill.received[-1]
    assert (decode.path, prefill.path) == (GENERATE, GENERATE)
    assert (sampling(decode)["max_tokens"], sampling(prefill)["max_tokens"]) == (expected, 1)
    assert not any(name.startswith("max_") for name in decode.body)
    usage = got.body["usage"]
    assert (usage.get("completion_tokens") or usage.get("output_tokens")) <= expected


@pytest.mark.parametrize("shape", TOKENS_IN)
@pytest.mark.parametrize(("path", "caps"), [(CHAT, {}), (CHAT, {"max_tokens": None}), ("/v1/responses", {})])
async def test_no_cap_is_the_rest_of_the_context_as_render_has_worked_it_out(coordinator, fleet, shape, path, caps):
    """V04."""
    at = await coordinator(fleet, shape)
    assert (await at.post(path, asking(path, **caps))).status == 200
    decode = fleet.decode.received[-1]
    assert sampling(decode)["max_tokens"] == fleet.decode.settings.max_model_len - len(decode.body["token_ids"])


@pytest.mark.parametrize(
    "params", [{}, {"max_tokens": 5}, {"max_tokens": None, "seed": 7, "unknown": [1.0, {"a": None}]}]
)
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_generate_clients_sampling_is_decodes_untouched(coordinator, fleet, shape, params):
    """V04: there, absence and null mean the rest of the context, so nothing is filled in."""
    at = await coordinator(fleet, shape)
    got = await at.post(GENERATE, asking(GENERATE, sampling_params={"stop": ["never"], **params}, unknown=1))
    assert got.status == 200
    decode = fleet.decode.received[-1].body
    handed = decode.pop("kv_transfer_params")
    assert decode.pop("sampling_params") == {"stop": ["never"], **params, "extra_args": {"kv_transfer_params": handed}}
    assert decode == {"model": "tiny", **PROMPTS[GENERATE], "unknown": 1}


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 9000}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n "),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop": [""]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"seed": "x"}, "seed"),
    ({"stream_options": {"include_usage": True}}, "tream"),
    ({"model": "nope"}, "nope"),
]


@pytest.mark.parametrize(("fields", "names"), LIMITS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("shape", TOKENS_IN)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_mistake_is_told_before_any_prefill(coordinator, fleet, path, shape, fields, names):
    """V05, A2: the capped prefill body would hide it until decode, when a prefill worker already holds blocks."""
    at = await coordinator(fleet, shape)
    got = await at.post(path, asking(path, **fields))
    assert got.status == (404 if "model" in fields else 400)
    assert names in got.error["message"]
    assert set(got.error) == {"message", "type", "param", "code"}
    assert [leg for leg in (*fleet.prefill.received, *fleet.decode.received) if leg.header("x-request-id")] == []


HIDDEN: list[dict[str, Any]] = [{"max_tokens": 9000}, {"stop": [""]}]
SEEN = [row for row in LIMITS if row[0] not in HIDDEN]


@pytest.mark.parametrize(("fields", "names"), SEEN, ids=lambda value: str(value)[:40])
async def test_a_mistake_on_the_clients_own_route_is_told_before_decode(coordinator, fleet, fields, names):
    """V05, L14: without a renderer, prefill is the first to see it."""
    at = await coordinator(fleet)
    got = await at.post(CHAT, asking(CHAT, **fields))
    assert got.status == (404 if "model" in fields else 400)
    assert names in got.error["message"]
    assert [leg for leg in fleet.decode.received if leg.header("x-request-id")] == []


@pytest.mark.parametrize("fields", HIDDEN, ids=str)
async def test_a_mistake_that_prefill_cannot_see_is_told_by_decode_which_lets_prefill_go(coordinator, fleet, fields):
    """V05, A2: the prefill leg asks for one token and has no stop, whatever the client wrote."""
    at = await coordinator(fleet)
    got = await at.post(CHAT, asking(CHAT, **fields))
    assert (got.status, got.error["type"]) == (400, "BadRequestError")
    assert next(iter(fields)) in got.error["message"]
    assert len(fleet.store.freed) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_limit_that_only_the_renderer_knows_is_told_in_its_words(coordinator, fleet, path):
    """V05: same status, message, type and param."""
    at = await coordinator(fleet, "text")
    got = await at.post(path, asking(path, max_tokens=9000))
    assert (got.status, got.error) == (
        400,
        {
            "message": "max_tokens=9000 cannot be greater than max_model_len=8192. Please request fewer output tokens. "
            "(parameter=max_tokens, value=9000)",
            "type": "BadRequestError",
            "param": "max_tokens",
            "code": 400,
        },
    )


@pytest.mark.parametrize("value", [2.0, 2])
@pytest.mark.parametrize("shape", [*OPENAI, *TOKENS_IN])
async def test_a_whole_number_may_be_written_as_a_float(coordinator, fleet, shape, value):
    """JSON has one kind of number, and vLLM's schema takes both."""
    at = await coordinator(fleet, shape)
    got = await at.post(CHAT, asking(CHAT, max_tokens=value))
    assert (got.status, got.body["usage"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize("salt", ["x" * 129, "x" * 1025, "", "a@b", "a/b", "a\\b", "a\0b", 5, ["x"]])
@pytest.mark.parametrize("shape", [*OPENAI, *TOKENS_IN])
async def test_a_cache_salt_that_a_worker_would_refuse_is_a_400(coordinator, fleet, shape, salt):
    """V35: found before a prefill holds blocks for it."""
    at = await coordinator(fleet, shape)
    for path in (CHAT, GENERATE):
        got = await at.post(path, asking(path, cache_salt=salt, sampling_params={}))
        assert (got.status, got.error["param"]) == (400, "cache_salt")
    assert not any(leg.header("x-request-id") for worker in fleet.workers for leg in worker.received)


@pytest.mark.parametrize("shape", [*OPENAI, *TOKENS_IN])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", GENERATE])
async def test_a_cache_salt_is_on_every_leg(coordinator, fleet, path, shape):
    """V35: the cache's key must be one on prefill and decode."""
    at = await coordinator(fleet, shape)
    own = {"sampling_params": {"max_tokens": 3}} if path == GENERATE else {}
    own |= {"max_tokens": 5} if path == "/v1/messages" else {}
    for salt in ("tenant-123", "x" * 128):
        got = await at.post(path, asking(path, cache_salt=salt, priority=0, **own))
        assert got.status == 200
        for worker in (fleet.prefill, fleet.decode):
            assert worker.received[-1].body["cache_salt"] == salt

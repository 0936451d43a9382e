"""decode: the leg whose answer the client gets, in each wire format, with and without a hand-over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.step import LegLimits, Reply
from envelope.errors import BadRequest, LegFailed, LegRejected
from envelope.formats import PATHS, Format
from envelope.json_codec import dumps
from steps.decode import WRAPPABLE, Decode, Params

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]

HANDOVER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.9.9.9", "big": 2**53 + 1}

CONTEXT = {"tool_choice": "none"}
RENDERED = {"token_ids": [1, 2], "sampling_params": {"n": 1, "max_tokens": 9}, "output_mode": "tokens", "priority": 3,
            "features": None, "parse_context": CONTEXT, "reasoning_ended": False, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False}}  # fmt: skip
# What of it goes to decode in any mode.
KEPT = {key: RENDERED[key] for key in ("token_ids", "sampling_params", "priority", "features", "parse_context",
                                       "reasoning_ended")}  # fmt: skip
AT_BOTH = {"kv_transfer_params": HANDOVER,
           "sampling_params": {"n": 1, "max_tokens": 9, "extra_args": {"kv_transfer_params": HANDOVER}}}  # fmt: skip

CHAT = {"model": "m", "messages": HI, "max_tokens": 50, "brand_new": None}
BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi", "store": False},
    "messages": {"model": "m", "messages": HI, "max_tokens": 9},
    "generate": {"token_ids": [1], "sampling_params": {"n": 2}},
}

TOKENS_IN: dict[str, Any] = {"use_openai_format": False}


@pytest.fixture
def decode(settings: Any) -> Any:
    def made(params: Any = None, **changes: Any) -> Decode:
        return Decode(Params.model_validate(params or {}), settings(**changes))

    return made


def answered(**more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "stop", "text": "hello"}], **more}


def echoing(mode: str) -> dict[str, Any]:
    return answered(output_mode=mode)


# --- the client's own format ---------------------------------------------------------------------------------------

OPENAI = {
    "as it came": ("chat", CHAT, None, None, {}, CHAT),
    "with a hand-over": ("chat", CHAT, None, HANDOVER, {}, {**CHAT, "kv_transfer_params": HANDOVER}),
    "render's tokens are not sent unasked": ("chat", CHAT, RENDERED, None, {}, CHAT),
    "with render's tokens": ("chat", CHAT, RENDERED, HANDOVER, {"send_prompt_token_ids": True},
                             {**CHAT, "kv_transfer_params": {**HANDOVER, "prompt_token_ids": [1, 2]}}),
    "tokens would drop media": ("chat", {"messages": IMAGE}, RENDERED, None, {"send_prompt_token_ids": True},
                                {"messages": IMAGE}),
    "a completion with tokens": ("completions", BODIES["completions"], RENDERED, None,
                                 {"send_prompt_token_ids": True}, {"model": "m", "prompt": [1, 2]}),
    "null and absent caps stay so": ("completions", {"prompt": "hi", "max_tokens": None}, None, HANDOVER, {},
                                     {"prompt": "hi", "max_tokens": None, "kv_transfer_params": HANDOVER}),
    "responses": ("responses", BODIES["responses"], None, None, {}, BODIES["responses"]),
    "messages": ("messages", BODIES["messages"], None, HANDOVER, {},
                 {**BODIES["messages"], "kv_transfer_params": HANDOVER}),
    "a generate client": ("generate", BODIES["generate"], None, None, {}, BODIES["generate"]),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "rendered", "handover", "params", "leg"), OPENAI.values(), ids=OPENAI)
async def test_in_the_client_s_format_the_leg_is_the_client_s_body_enriched(
    decode: Any, context: Any, upstream: Any, api: str, body: Any, rendered: Any, handover: Any, params: Any, leg: Any
) -> None:
    ctx, up = context(api, body, rendered=rendered, handover=handover), upstream(answered())
    decode(params).admit(ctx)
    assert await decode(params).run(ctx, up) == "ok"
    (sent,) = up.legs
    assert (sent.step, sent.role, sent.path, sent.body) == ("decode", "decode", PATHS[Format(api)], leg)
    assert (sent.headers, sent.limits, sent.single_use) == ((), LegLimits(), handover is not None)
    assert up.calls == [("post_json", ())]


@pytest.mark.parametrize("exposed", [False, True])
async def test_the_worker_s_answer_is_passed_on_as_it_came(
    decode: Any, context: Any, upstream: Any, exposed: bool
) -> None:
    ctx, reply = context("chat", CHAT), answered(kv_transfer_params=None, n=2**63)
    await decode({"wrap": "all"}, expose_transfer_params=exposed).run(ctx, upstream(reply))
    assert (ctx.answer.source, ctx.answer.body) == (dumps(reply), reply)
    assert (ctx.answer.format, ctx.answer.wrap, ctx.answer.headers) == (Format.CHAT, False, (("x-worker", "1"),))
    assert ctx.answer.expose_transfer_params is exposed


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_a_stream_is_passed_on_while_it_comes(
    decode: Any, context: Any, upstream: Any, stream: Any, api: str
) -> None:
    body = {**BODIES[api], "stream": True}
    ctx, live = context(api, body), stream(b"{}")
    up = upstream(live)
    assert await decode().run(ctx, up) == "ok"
    assert (up.legs[0].body, up.calls) == (body, [("stream", ())])
    assert (ctx.answer.source, ctx.answer.format, ctx.answer.wrap) == (live, Format(api), False)
    assert not live.closed


async def test_one_body_in_the_place_of_a_stream_is_no_answer(decode: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", {**CHAT, "stream": True})
    with pytest.raises(LegFailed, match="asked for a stream and answered with one JSON body"):
        await decode().run(ctx, upstream(Reply(200, b"{}", {})))
    assert ctx.answer is None


async def test_a_failure_is_the_request_s(decode: Any, context: Any, upstream: Any) -> None:
    refused = LegRejected("decode", 400, {"message": "too long"})
    for body in (CHAT, {**CHAT, "stream": True}):
        ctx = context("chat", body)
        with pytest.raises(LegRejected) as caught:
            await decode().run(ctx, upstream(refused))
        assert (caught.value, ctx.answer) == (refused, None)


# --- tokens-in -----------------------------------------------------------------------------------------------------

TEXT, DERENDER = {**TOKENS_IN, "output_mode": "text"}, {**TOKENS_IN, "output_mode": "derender"}
USAGE = {"stream_options": {"include_usage": True}}
STREAMED = {**CHAT, "stream": True}

# (api, body, hand-over, params, mode, streamed, leg)
GENERATE = {
    "text is the default": ("chat", CHAT, None, TOKENS_IN, "text", False, {**KEPT}),
    "a hand-over at both places": ("chat", CHAT, HANDOVER, TEXT, "text", False, {**KEPT, **AT_BOTH}),
    "text, streamed": ("chat", STREAMED, None, TEXT, "text", True, {**KEPT}),
    "the client's own stream options": ("chat", {**STREAMED, "stream_options": {"include_usage": False}}, None, TEXT,
                                        "text", True, {**KEPT, "stream_options": {"include_usage": False}}),
    "a rebuilt stream is counted": ("chat", STREAMED, None, {**TEXT, "wrap_chat_completion": True}, "text", True,
                                    {**KEPT, **USAGE}),
    "derender": ("chat", CHAT, HANDOVER, DERENDER, "derender", False, {**KEPT, **AT_BOTH}),
    "derender is never streamed": ("chat", {**STREAMED, **USAGE}, None, DERENDER, "derender", False, {**KEPT}),
    "completions are text": ("completions", {"prompt": "hi"}, None, DERENDER, "text", False, {**KEPT}),
    "completions, streamed": ("completions", {"prompt": "hi", "stream": True}, None, {**DERENDER, "wrap": "all"},
                              "text", True, {**KEPT, **USAGE}),
    "responses": ("responses", {"input": "hi", "stream": True}, None, {**TEXT, "wrap": ["responses"]}, "text", True,
                  {**KEPT, **USAGE}),
    "messages": ("messages", BODIES["messages"], None, DERENDER, "derender", False, {**KEPT}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("api", "body", "handover", "params", "mode", "streamed", "leg"), GENERATE.values(), ids=GENERATE
)
async def test_tokens_in_the_leg_is_the_rendered_request_in_the_file_s_mode(
    decode: Any,
    context: Any,
    upstream: Any,
    stream: Any,
    api: str,
    body: Any,
    handover: Any,
    params: Any,
    mode: str,
    streamed: bool,
    leg: Any,
) -> None:
    ctx = context(api, body, rendered=RENDERED, handover=handover)
    up = upstream(stream(dumps(echoing(mode))) if streamed else echoing(mode))
    decode(params).admit(ctx)
    assert await decode(params).run(ctx, up) == "ok"
    (sent,) = up.legs
    assert sent.body == {**leg, "output_mode": mode, "stream": streamed}
    assert (sent.path, up.calls) == (PATHS[Format.GENERATE], [("stream" if streamed else "post_json", ())])
    assert ctx.answer.format is Format.GENERATE


async def test_a_parse_context_that_render_did_not_give_is_made(decode: Any, context: Any, upstream: Any) -> None:
    bare = {key: value for key, value in RENDERED.items() if key != "parse_context"}
    up = upstream(echoing("derender"))
    await decode(DERENDER).run(context("chat", CHAT, rendered=bare), up)
    assert up.legs[0].body["parse_context"]["tool_choice"] == "none"


OWN = {"token_ids": [1], "sampling_params": {"n": 2}, "stream": True, "output_mode": "text", "x": 1, **USAGE}


@pytest.mark.parametrize("params", [TEXT, DERENDER, {"use_openai_format": True}])
async def test_a_generate_client_keeps_its_own_mode_whatever_the_file_says(
    decode: Any, context: Any, upstream: Any, stream: Any, params: Any
) -> None:
    ctx, up = context("generate", OWN, rendered=OWN), upstream(stream(dumps(echoing("text"))))
    await decode({**params, "wrap": [] if params.get("use_openai_format") else "all"}).run(ctx, up)
    assert (up.legs[0].body, up.legs[0].path) == (OWN, PATHS[Format.GENERATE])
    assert (ctx.answer.format, ctx.answer.wrap) == (Format.GENERATE, False)


async def test_a_generate_client_s_derender_stream_is_asked_for_whole(decode: Any, context: Any, upstream: Any) -> None:
    up = upstream(echoing("derender"))
    await decode().run(context("generate", {**OWN, "output_mode": "derender"}, handover=HANDOVER), up)
    assert up.legs[0].body == {
        "token_ids": [1], "output_mode": "derender", "stream": False, "x": 1, "kv_transfer_params": HANDOVER,
        "sampling_params": {"n": 2, "extra_args": {"kv_transfer_params": HANDOVER}},
    }  # fmt: skip


# (params, the APIs whose answers are rebuilt)
WRAPPED = [
    ({}, ()),
    ({"wrap_chat_completion": True}, ("chat",)),
    ({"wrap": "all"}, ("chat", "completions", "responses", "messages")),
    ({"wrap": ["messages"]}, ("messages",)),
    ({"wrap": "responses, messages"}, ("responses", "messages")),
    ({"wrap": ["completions"], "wrap_chat_completion": True}, ("chat", "completions")),
    ({"wrap": ""}, ()),
]


@pytest.mark.parametrize(("params", "apis"), WRAPPED)
async def test_only_the_envelopes_that_the_file_names_are_rebuilt(
    decode: Any, context: Any, upstream: Any, params: Any, apis: tuple[str, ...]
) -> None:
    step = decode({**TEXT, **params})
    for api in WRAPPABLE:
        ctx = context(api, BODIES[api], rendered=RENDERED)
        await step.run(ctx, upstream(echoing("text")))
        assert ctx.answer.wrap is (api in apis), api


# --- the echo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [answered(), echoing("tokens")])
async def test_an_answer_in_another_mode_never_becomes_the_client_s(
    decode: Any, context: Any, upstream: Any, answer: Any
) -> None:
    """Case V19: an old worker answers 200 with ids alone."""
    ctx = context("chat", CHAT, rendered=RENDERED)
    with pytest.raises(LegFailed, match=r"asked for output_mode 'text' and .*; that needs vLLM 0\.32"):
        await decode(TEXT).run(ctx, upstream(answer))
    assert ctx.answer is None


@pytest.mark.parametrize("first", [dumps(answered()), dumps(echoing("tokens")), b"hello", b"[]"])
async def test_a_stream_in_another_mode_is_left_where_it_will_be_closed(
    decode: Any, context: Any, upstream: Any, stream: Any, first: bytes
) -> None:
    ctx, live = context("chat", STREAMED, rendered=RENDERED), stream(first)
    with pytest.raises(LegFailed):
        await decode(TEXT).run(ctx, upstream(live))
    await ctx.aclose()
    assert live.closed


async def test_in_the_client_s_format_there_is_no_mode_to_echo(decode: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", CHAT)
    await decode({"output_mode": "derender"}).run(ctx, upstream(answered()))
    assert ctx.answer is not None


# --- what the file may say -----------------------------------------------------------------------------------------

REFUSED = [
    ({"output_mode": "tokens"}, "tokens would answer clients with ids and no text; write text or derender"),
    ({"output_mode": "html"}, "Input should be 'tokens', 'text' or 'derender'"),
    ({"wrap": "chats"}, "'chats' is not an API, write all, or some of chat, completions, responses, messages"),
    ({"wrap": ["chat", "generate"]}, "'generate' is not an API, write all, or some of chat"),
    ({"wrap": [7]}, "7 is not an API"),
    ({"wrap": 7}, "7 is not a list of APIs, write all, or some of chat, completions, responses, messages"),
    ({"kv_conector": "kv-nixl"}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("params", "sentence"), REFUSED)
def test_params_that_cannot_be_meant_are_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Params.model_validate(params)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("params", [TOKENS_IN, {}])
async def test_what_tokens_in_cannot_rebuild_is_refused_before_the_first_leg(
    decode: Any, context: Any, params: Any
) -> None:
    ctx = context("completions", {"prompt": "hi", "echo": True})
    if params:
        with pytest.raises(BadRequest, match="echo is not supported"):
            decode(params).admit(ctx)
    decode().admit(ctx)
    decode(TOKENS_IN).admit(context("chat", {"messages": HI, "echo": True}))


async def test_format_is_the_pipeline_s_unless_the_step_has_its_own(decode: Any, context: Any, upstream: Any) -> None:
    for step, path in (
        (decode(use_openai_format=False), PATHS[Format.GENERATE]),
        (decode({"use_openai_format": True}, use_openai_format=False), PATHS[Format.CHAT]),
    ):
        up = upstream(echoing("text"))
        await step.run(context("chat", CHAT, rendered=RENDERED), up)
        assert up.legs[0].path == path


async def test_the_step_s_time_limits_are_the_leg_s(decode: Any, context: Any, upstream: Any) -> None:
    up = upstream(answered())
    await decode({"idle_timeout": "7s"}).run(context("chat", CHAT), up)
    assert up.legs[0].limits == LegLimits(idle_s=7.0)


# --- hand-overs that nobody should read ----------------------------------------------------------------------------


@pytest.mark.parametrize(("age_s", "oldest_s"), [(0.0, 5.0), (5.0, 5.0), (1000.0, None)])
async def test_a_hand_over_that_is_young_enough_is_used(
    decode: Any, context: Any, upstream: Any, age_s: float, oldest_s: float | None
) -> None:
    ctx, up = context("chat", CHAT, handover=HANDOVER, handover_at=100.0 - age_s), upstream(answered())
    await decode(max_handover_age_s=oldest_s).run(ctx, up)
    assert up.legs[0].body["kv_transfer_params"] == HANDOVER


async def test_one_that_is_older_is_never_sent_and_prefill_begins_again(
    decode: Any, context: Any, upstream: Any, counted: Any
) -> None:
    """Prefill may have given its blocks to another request by then."""
    ctx, up = context("chat", CHAT, handover=HANDOVER, handover_at=94.0), upstream()
    with pytest.raises(LegFailed, match=r"the hand-over is older than 5 s \(pipeline.max_handover_age\)") as caught:
        await decode(max_handover_age_s=5.0).run(ctx, up)
    assert caught.value.retryable
    assert (up.legs, counted.all) == ([], [("handover_missing", "too_old", "begin_again")])


async def test_without_a_hand_over_there_is_no_age(decode: Any, context: Any, upstream: Any) -> None:
    assert await decode(max_handover_age_s=5.0).run(context("chat", CHAT), upstream(answered())) == "ok"


ONE = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}

# (api, body, rendered, params, path, the leg that fetches the blocks and throws its token away)
RELEASES = {
    "chat": ("chat", STREAMED, None, {}, "/v1/chat/completions",
             {"model": "m", "messages": HI, "brand_new": None, "max_tokens": 1, "stream": False, "ignore_eos": True,
              "kv_transfer_params": HANDOVER}),
    "chat with tokens": ("chat", STREAMED, RENDERED, {"send_prompt_token_ids": True}, "/v1/chat/completions",
                         {"model": "m", "messages": HI, "brand_new": None, "max_tokens": 1, "stream": False,
                          "ignore_eos": True, "kv_transfer_params": {**HANDOVER, "prompt_token_ids": [1, 2]}}),
    "tokens-in": ("chat", STREAMED, RENDERED, TOKENS_IN, "/inference/v1/generate",
                  {"token_ids": [1, 2], "priority": 3, "features": None, "output_mode": "tokens", "stream": False,
                   "kv_transfer_params": HANDOVER,
                   "sampling_params": {**ONE, "extra_args": {"kv_transfer_params": HANDOVER}}}),
    "a generate client": ("generate", OWN, None, {}, "/inference/v1/generate",
                          {"token_ids": [1], "x": 1, "output_mode": "tokens", "stream": False,
                           "kv_transfer_params": HANDOVER,
                           "sampling_params": {**ONE, "extra_args": {"kv_transfer_params": HANDOVER}}}),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "rendered", "params", "path", "leg"), RELEASES.values(), ids=RELEASES)
def test_blocks_that_nobody_wants_are_fetched_by_a_request_for_one_token(
    decode: Any, context: Any, api: str, body: Any, rendered: Any, params: Any, path: str, leg: Any
) -> None:
    """Only a decode worker that reads them makes prefill free them. No cache may answer in their place."""
    ctx = replace(context(api, body, rendered=rendered), leg_id="x" * 100 + "-1234")
    release = decode(params).release_leg(ctx, HANDOVER)
    assert (release.step, release.role, release.path) == ("release", "decode", path)
    assert release.body == {**leg, "cache_salt": "x" * 59 + "-1234"}


# --- check ---------------------------------------------------------------------------------------------------------

NOTES: list[tuple[dict[str, Any], Format, tuple[str, ...]]] = [
    ({}, Format.CHAT, ("the worker's answer passes through",)),
    ({}, Format.GENERATE, ("output_mode is the client's own",)),
    (TEXT, Format.CHAT, ("output_mode text", "the generate envelope passes through")),
    ({**DERENDER, "wrap": "all"}, Format.CHAT, ("output_mode derender", "rebuilt as chat")),
    ({**DERENDER, "wrap": "all"}, Format.COMPLETIONS, ("output_mode text", "rebuilt as completions")),
    ({**DERENDER, "wrap": "all"}, Format.GENERATE, ("output_mode is the client's own",)),
]


@pytest.mark.parametrize(("params", "api", "notes"), NOTES)
def test_what_it_does_for_an_api_is_told_without_a_request(
    decode: Any, params: Any, api: Format, notes: tuple[str, ...]
) -> None:
    row = decode(params).plan(api)
    fmt = Format.GENERATE if params else api
    assert (row.api, row.step, row.role, row.format, row.path) == (api, "decode", "decode", fmt, PATHS[fmt])
    assert row.notes == notes


PICTURES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
FEATURES = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    "kwargs_data": {"image": ["T"]},
    "mm_metadata": {"image": ["m"]},
}
ENTRIES = {"h": {"peer_host": "10.0.0.9", "peer_port": 5502}}


@pytest.mark.parametrize("prefilled", [True, False])
@pytest.mark.parametrize("tokens_in", [True, False])
async def test_media_goes_along_whole_and_its_embedding_only_to_whoever_computes_the_prompt(
    decode: Any, context: Any, upstream: Any, prefilled: bool, tokens_in: bool
) -> None:
    rendered = {"token_ids": [91], "sampling_params": {}, "features": FEATURES}
    body = {"messages": PICTURES, "mm_processor_kwargs": {"max_pixels": 10}}
    ctx = context("chat", body, rendered=rendered, ec_params=ENTRIES, prefilled=prefilled)
    params = {"use_openai_format": not tokens_in} | ({} if tokens_in else {"send_prompt_token_ids": True})
    up = upstream({"output_mode": "text", "choices": []})
    await decode(params).run(ctx, up)
    sent = up.legs[0].body
    assert sent.get("ec_transfer_params") == (None if prefilled else ENTRIES)
    if tokens_in:
        assert sent["features"] == FEATURES
    else:
        assert {**sent, "ec_transfer_params": None} == {**body, "ec_transfer_params": None}

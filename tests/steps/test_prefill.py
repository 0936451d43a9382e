"""prefill: one token and a whole hand-over; without one the request fails, or decode goes on alone, counted."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.step import LegLimits
from envelope.connectors import KV_CONNECTORS
from envelope.ec_transfer import EC_CONNECTORS
from envelope.errors import BadRequest, LegBusy, LegFailed, LegRejected, LegTimeout, NoWorker
from envelope.formats import PATHS, Format
from steps.prefill import Params, Prefill

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]

HANDOVER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e1", "remote_block_ids": [[1, 2]],
    "remote_request_id": "r1", "remote_host": "10.9.9.9", "remote_port": 5600, "big": 2**53 + 1, "z": None,
}  # fmt: skip
ANSWER = {"choices": [{"index": 0, "finish_reason": "length"}], "kv_transfer_params": HANDOVER}

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
ONE = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}

RENDERED = {"token_ids": [1, 2], "sampling_params": {"n": 1, "stop": ["x"]}, "output_mode": "tokens", "priority": 3,
            "parse_context": {"tool_choice": "none"}, "stream": True}  # fmt: skip

CHAT = {"model": "m", "messages": HI, "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
CHAT_LEG = {"model": "m", "messages": HI, "max_tokens": 1, "stream": False, "ignore_eos": True}
GENERATE_LEG = {"token_ids": [1, 2], "output_mode": "tokens", "priority": 3, "stream": False}
NIXL_EXTRA = {"kv_transfer_params": ASK, "sampling_params": {**ONE, "extra_args": {"kv_transfer_params": ASK}}}

OPENAI, TOKENS_IN = {"use_openai_format": True}, {"use_openai_format": False}
SHARED = {"kv_connector": "kv-shared-storage"}

# (api, body, rendered, params of the step, path, leg)
LEGS = {
    "chat, as it came": ("chat", CHAT, None, OPENAI, "/v1/chat/completions", {**CHAT_LEG, "kv_transfer_params": ASK}),
    "chat, shared storage": ("chat", CHAT, None, {**OPENAI, **SHARED}, "/v1/chat/completions", CHAT_LEG),
    "chat, render's tokens are not sent unasked": (
        "chat", CHAT, RENDERED, OPENAI, "/v1/chat/completions", {**CHAT_LEG, "kv_transfer_params": ASK}),
    "chat, render's tokens": (
        "chat", CHAT, RENDERED, {**OPENAI, "send_prompt_token_ids": True}, "/v1/chat/completions",
        {**CHAT_LEG, "kv_transfer_params": {**ASK, "prompt_token_ids": [1, 2]}}),
    "chat with media, whose tokens are not sent": (
        "chat", {"messages": IMAGE}, RENDERED, {**OPENAI, **SHARED, "send_prompt_token_ids": True},
        "/v1/chat/completions", {"messages": IMAGE, "max_tokens": 1, "stream": False, "ignore_eos": True}),
    "chat, tokens-in": (
        "chat", CHAT, RENDERED, TOKENS_IN, "/inference/v1/generate", {**GENERATE_LEG, **NIXL_EXTRA}),
    "chat, tokens-in, shared storage": (
        "chat", CHAT, RENDERED, {**TOKENS_IN, **SHARED}, "/inference/v1/generate",
        {**GENERATE_LEG, "sampling_params": ONE}),
    "completions": (
        "completions", {"prompt": "hi"}, None, {**OPENAI, **SHARED}, "/v1/completions",
        {"prompt": "hi", "max_tokens": 1, "stream": False, "ignore_eos": True}),
    "responses": (
        "responses", {"input": "hi", "store": False}, None, {**OPENAI, **SHARED}, "/v1/responses",
        {"input": "hi", "store": False, "max_output_tokens": 1, "stream": False, "ignore_eos": True}),
    "messages": (
        "messages", {"messages": HI, "max_tokens": 9}, None, {**OPENAI, **SHARED}, "/v1/messages",
        {"messages": HI, "max_tokens": 1, "stream": False}),
    "a generate client, in both settings": (
        "generate", {"token_ids": [1], "sampling_params": {"n": 1}, "output_mode": "derender", "chat_request": {}},
        None, {**OPENAI, **SHARED}, "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": ONE, "output_mode": "tokens", "stream": False}),
}  # fmt: skip


@pytest.fixture
def prefill(settings: Any) -> Any:
    def made(params: Any = None, **changes: Any) -> Prefill:
        return Prefill(Params.model_validate(params or {}), settings(**changes))

    return made


@pytest.mark.parametrize(("api", "body", "rendered", "params", "path", "leg"), LEGS.values(), ids=LEGS)
async def test_the_leg_asks_for_one_token_and_for_the_blocks_to_be_kept(
    prefill: Any, context: Any, upstream: Any, api: str, body: Any, rendered: Any, params: Any, path: str, leg: Any
) -> None:
    ctx, up = context(api, body, rendered=rendered), upstream(ANSWER)
    prefill().admit(ctx)
    assert await prefill(params).run(ctx, up) == "ok"
    (sent,) = up.legs
    assert (sent.step, sent.role, sent.path, sent.body) == ("prefill", "prefill", path, leg)
    assert (sent.limits, sent.single_use, up.calls) == (LegLimits(), False, [("post_json", ())])


async def test_the_hand_over_is_kept_as_it_came_with_its_hour(prefill: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", CHAT)
    await prefill(clock=lambda: 123.5).run(ctx, upstream(ANSWER))
    assert (repr(ctx.handover), ctx.handover_at) == (repr(HANDOVER), 123.5)


async def test_shared_storage_leaves_nothing_to_hand_over(prefill: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", CHAT)
    assert await prefill(SHARED).run(ctx, upstream({**ANSWER, "kv_transfer_params": None})) == "ok"
    assert ctx.handover is None


async def test_format_and_connector_are_the_pipeline_s_unless_the_step_has_its_own(
    prefill: Any, context: Any, upstream: Any
) -> None:
    up = upstream(ANSWER)
    await prefill(use_openai_format=False, kv=KV_CONNECTORS["kv-shared-storage"]).run(
        context("chat", CHAT, rendered=RENDERED), up
    )
    assert up.legs[0].body == {**GENERATE_LEG, "sampling_params": ONE}


# (what makes the leg pointless or wrong, the reason that is counted)
SKIPPED = {
    "prompt logprobs": ("chat", {"messages": HI, "prompt_logprobs": 1}, "prompt_logprobs"),
    "an echo": ("completions", {"prompt": "hi", "echo": True}, "prompt_logprobs"),
    "a generate client's": (
        "generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs"),
    "several answers": ("chat", {"messages": HI, "n": 2}, "n"),
    "beam search": ("chat", {"messages": HI, "use_beam_search": True}, "beam_search"),
    "a generate client's answers": ("generate", {"token_ids": [1], "sampling_params": {"n": 3}}, "n"),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "reason"), SKIPPED.values(), ids=SKIPPED)
async def test_what_only_decode_can_answer_has_no_prefill(
    prefill: Any, context: Any, upstream: Any, counted: Any, api: str, body: Any, reason: str
) -> None:
    ctx, up = context(api, body), upstream()
    assert await prefill().run(ctx, up) == "skipped"
    assert (up.legs, ctx.handover, counted.all) == ([], None, [("prefill_skipped", reason)])


async def test_several_answers_may_share_what_lies_in_shared_storage(prefill: Any, context: Any, upstream: Any) -> None:
    up = upstream(ANSWER)
    assert await prefill(SHARED).run(context("chat", {"messages": HI, "n": 2}), up) == "ok"
    assert "n" not in up.legs[0].body


async def test_where_the_router_named_no_worker_there_is_no_prefill(
    prefill: Any, context: Any, upstream: Any, counted: Any
) -> None:
    up = upstream(serves=False)
    assert await prefill().run(context("chat", CHAT), up) == "skipped"
    assert (up.asked, up.legs, counted.all) == (["prefill"], [], [("prefill_skipped", "no_worker_named")])


# (the API, a body that asks for so many output tokens)
OUTPUT = {
    "chat": lambda cap: {"messages": HI, "max_tokens": cap},
    "chat, by its newer name": lambda cap: {"messages": HI, "max_completion_tokens": cap},
    "completions": lambda cap: {"prompt": "hi", "max_tokens": cap},
    "responses": lambda cap: {"input": "hi", "max_output_tokens": cap},
    "messages": lambda cap: {"messages": HI, "max_tokens": cap},
    "generate": lambda cap: {"token_ids": [1], "sampling_params": {"max_tokens": cap}},
}


@pytest.mark.parametrize(("api", "body"), OUTPUT.items(), ids=OUTPUT)
@pytest.mark.parametrize(("cap", "outcome"), [(1, "skipped"), (2, "ok"), (None, "ok")])
async def test_for_one_output_token_decode_may_do_without_prefill(
    prefill: Any, context: Any, upstream: Any, counted: Any, api: str, body: Any, cap: int | None, outcome: str
) -> None:
    up = upstream(ANSWER)
    step = prefill(params=Params(min_output_tokens=2))
    assert await step.run(context(api.split(",")[0], body(cap)), up) == outcome
    assert counted.all == ([("prefill_skipped", "few_output_tokens")] if outcome == "skipped" else [])


async def test_for_one_output_token_prefill_is_asked_unless_the_file_says_otherwise(
    prefill: Any, context: Any, upstream: Any
) -> None:
    assert await prefill().run(context("chat", {"messages": HI, "max_tokens": 1}), upstream(ANSWER)) == "ok"


@pytest.mark.parametrize(
    ("uncached", "outcome"), [(0, "skipped"), (99, "skipped"), (100, "ok"), (5000, "ok"), (None, "ok")]
)
async def test_where_decode_has_most_of_a_prompt_there_is_no_prefill(
    prefill: Any, context: Any, upstream: Any, counted: Any, uncached: int | None, outcome: str
) -> None:
    up = upstream(ANSWER, uncached=uncached)
    assert await prefill(params=Params(min_uncached_tokens=100)).run(context("chat", CHAT), up) == outcome
    assert counted.all == ([("prefill_skipped", "few_uncached_tokens")] if outcome == "skipped" else [])
    assert len(up.legs) == (outcome == "ok")


# Case L11 and its kin: what prefill returned, and why it is no hand-over.
MISSING = {
    "absent": ({"choices": []}, "absent", "the answer carries no kv_transfer_params"),
    "null": ({**ANSWER, "kv_transfer_params": None}, "absent", "the answer carries no kv_transfer_params"),
    "empty": ({**ANSWER, "kv_transfer_params": {}}, "absent", "the answer carries no kv_transfer_params"),
    "a list": ({**ANSWER, "kv_transfer_params": []}, "absent", "the answer carries no kv_transfer_params"),
    "a text": ({**ANSWER, "kv_transfer_params": "x"}, "absent", "the answer carries no kv_transfer_params"),
    "half": ({**ANSWER, "kv_transfer_params": {**HANDOVER, "remote_block_ids": []}}, "incomplete",
             "kv_transfer_params lacks remote_block_ids"),
    "aborted": ({"choices": [{"finish_reason": "abort"}], "kv_transfer_params": None}, "bad_finish",
                "prefill ended with finish_reason 'abort'"),
    "a list of answers": ([ANSWER], "not_an_object", "the answer is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "reason", "sentence"), MISSING.values(), ids=MISSING)
async def test_without_a_hand_over_the_request_fails_and_it_is_counted(
    prefill: Any, context: Any, upstream: Any, counted: Any, answer: Any, reason: str, sentence: str
) -> None:
    ctx = context("chat", CHAT)
    with pytest.raises(LegFailed) as caught:
        await prefill().run(ctx, upstream(answer))
    assert caught.value.message == (
        f"prefill: the worker left nothing for decode to fetch: {sentence}. Does it run with the KV connector that "
        "kv-nixl stands for, as a producer?"
    )
    assert (ctx.handover, counted.all) == (None, [("handover_missing", reason, "fail")])


@pytest.mark.parametrize(("answer", "reason", "_sentence"), MISSING.values(), ids=MISSING)
async def test_or_decode_goes_on_alone_where_the_file_says_so(
    prefill: Any, context: Any, upstream: Any, counted: Any, answer: Any, reason: str, _sentence: str
) -> None:
    ctx = context("chat", CHAT)
    assert await prefill(on_missing_handover="decode_alone").run(ctx, upstream(answer)) == "handover_missing"
    assert (ctx.handover, counted.all) == (None, [("handover_missing", reason, "decode_alone")])


FAILURES = [LegFailed("prefill", "x"), LegBusy("prefill", "x"), LegTimeout("prefill", "x"), NoWorker("prefill", "x")]
REJECTED = LegRejected("prefill", 400, {"message": "too long"})


@pytest.mark.parametrize("error", [*FAILURES, REJECTED, BadRequest("x")], ids=lambda error: type(error).__name__)
async def test_a_failure_is_the_request_s(prefill: Any, context: Any, upstream: Any, counted: Any, error: Any) -> None:
    with pytest.raises(type(error)) as caught:
        await prefill().run(context("chat", CHAT), upstream(error))
    assert (caught.value, counted.all) == (error, [])


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_or_decode_takes_over_where_the_file_says_so(
    prefill: Any, context: Any, upstream: Any, counted: Any, error: Any
) -> None:
    ctx = context("chat", CHAT)
    assert await prefill(on_prefill_failure="decode_alone").run(ctx, upstream(error)) == "failed_over"
    assert (ctx.handover, counted.all) == (None, [("prefill_failed_over", type(error).__name__)])


@pytest.mark.parametrize("error", [REJECTED, BadRequest("x")], ids=lambda error: type(error).__name__)
async def test_decode_never_takes_over_the_client_s_own_mistake(
    prefill: Any, context: Any, upstream: Any, error: Any
) -> None:
    with pytest.raises(type(error)):
        await prefill(on_prefill_failure="decode_alone").run(context("chat", CHAT), upstream(error))


async def test_a_missing_hand_over_has_a_policy_of_its_own(
    prefill: Any, context: Any, upstream: Any, counted: Any
) -> None:
    """A worker that answers and leaves nothing is set up wrongly; one that fails is another matter."""
    answer = {**ANSWER, "kv_transfer_params": None}
    with pytest.raises(LegFailed):
        await prefill(on_prefill_failure="decode_alone").run(context("chat", CHAT), upstream(answer))
    assert counted.all == [("handover_missing", "absent", "fail")]


# Media: what an encode worker has, prefill is told where to fetch, and is not sent again.

PICTURES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
FEATURES = {
    "mm_hashes": {"image": ["h1", "h2", "h3"]},
    "mm_placeholders": {"image": [{"offset": i, "length": 1} for i in range(3)]},
    "kwargs_data": {"image": ["T1", "T2", "T3"]},
    "mm_metadata": {"image": ["m1", "m2", None]},
}
SEEN = {"token_ids": [91, 91, 91], "sampling_params": {}, "features": FEATURES}
ENTRIES = {
    each: {"peer_host": "10.0.0.9", "peer_port": 5502, "big": 2**53 + 1, "x": [1.5, None]}
    for each in ("h1", "h2", "h3")
}
EC_NIXL, EC_SHARED = {"ec": EC_CONNECTORS["ec-nixl"]}, {"ec": EC_CONNECTORS["ec-shared-storage"]}

# (mm_features, connector, entries, tensors that go along)
SENT: dict[str, tuple[str, Any, Any, Any]] = {
    "all encoded": ("auto", EC_NIXL, ENTRIES, [None, None, "T3"]),
    "some encoded": ("auto", EC_NIXL, {"h2": ENTRIES["h2"]}, ["T1", None, "T3"]),
    "none encoded": ("auto", EC_NIXL, None, ["T1", "T2", "T3"]),
    "under a LoRA's name": ("auto", EC_NIXL, {"lora:h1": ENTRIES["h1"]}, [None, "T2", "T3"]),
    "full": ("full", EC_NIXL, ENTRIES, ["T1", "T2", "T3"]),
    "metadata": ("metadata", EC_NIXL, ENTRIES, [None, None, "T3"]),
    "metadata, none encoded": ("metadata", EC_NIXL, None, ["T1", "T2", "T3"]),
    "a shared folder": ("auto", EC_SHARED, ENTRIES, ["T1", "T2", "T3"]),
    "a shared folder, metadata": ("metadata", EC_SHARED, ENTRIES, [None, None, "T3"]),
}


@pytest.mark.parametrize(("mode", "connector", "entries", "tensors"), SENT.values(), ids=SENT)
async def test_tensors_of_what_can_be_fetched_are_not_sent_again(
    prefill: Any, context: Any, upstream: Any, mode: str, connector: Any, entries: Any, tensors: Any
) -> None:
    ctx, up = context("chat", {"messages": PICTURES}, rendered=SEEN, ec_params=entries), upstream(ANSWER)
    assert await prefill({**TOKENS_IN, "mm_features": mode}, **connector).run(ctx, up) == "ok"
    body = up.legs[0].body
    assert body["features"] == {**FEATURES, "kwargs_data": {"image": tensors}}
    assert body.get("ec_transfer_params") == entries
    assert "ec_transfer_params" not in body["sampling_params"].get("extra_args", {})


async def test_metadata_alone_leaves_no_empty_lists(prefill: Any, context: Any, upstream: Any) -> None:
    whole = {**FEATURES, "mm_metadata": {"image": ["m1", "m2", "m3"]}}
    ctx = context("chat", {"messages": PICTURES}, rendered={**SEEN, "features": whole}, ec_params=ENTRIES)
    await prefill(TOKENS_IN, **EC_NIXL).run(ctx, up := upstream(ANSWER))
    assert up.legs[0].body["features"] == {**whole, "kwargs_data": None}


async def test_on_the_client_s_route_the_parts_stay_and_the_entries_stand_beside_them(
    prefill: Any, context: Any, upstream: Any
) -> None:
    body = {"messages": PICTURES, "mm_processor_kwargs": {"max_pixels": 10}}
    ctx, up = context("chat", body, rendered=SEEN, ec_params=ENTRIES), upstream(ANSWER)
    await prefill({**OPENAI, "send_prompt_token_ids": True}, **EC_NIXL).run(ctx, up)
    one = {"max_tokens": 1, "stream": False, "ignore_eos": True}
    assert up.legs[0].body == {**body, **one, "kv_transfer_params": ASK, "ec_transfer_params": ENTRIES}


async def test_a_generate_client_s_features_go_as_they_came(prefill: Any, context: Any, upstream: Any) -> None:
    ctx, up = context("generate", SEEN), upstream(ANSWER)
    await prefill({"mm_features": "metadata"}, **EC_NIXL).run(ctx, up)
    assert up.legs[0].body["features"] == FEATURES
    assert "ec_transfer_params" not in up.legs[0].body


GONE = LegFailed("prefill", "the worker answered 500")


async def test_what_could_not_be_fetched_is_sent_whole_where_the_file_says_so(
    prefill: Any, context: Any, upstream: Any, counted: Any
) -> None:
    ctx, up = context("chat", {"messages": PICTURES}, rendered=SEEN, ec_params=ENTRIES), upstream(GONE, ANSWER)
    assert await prefill(TOKENS_IN, on_encode_failure="prefill_encodes", **EC_NIXL).run(ctx, up) == "ok"
    assert [leg.body["features"]["kwargs_data"]["image"] for leg in up.legs] == [[None, None, "T3"], ["T1", "T2", "T3"]]
    assert "ec_transfer_params" not in up.legs[1].body
    assert ctx.ec_params is None
    assert counted.all == [("encoding_missing", "not_fetched", "prefill_encodes")]


# (policy, mm_features, the failure)
NOT_AGAIN = {
    "not by policy": ("fail", "auto", GONE),
    "nothing was left out": ("prefill_encodes", "full", GONE),
    "late": ("prefill_encodes", "auto", LegTimeout("prefill", "late")),
    "refused": ("prefill_encodes", "auto", LegRejected("prefill", 400, {"message": "x"})),
    "nobody there": ("prefill_encodes", "auto", NoWorker("prefill", "x")),
}


@pytest.mark.parametrize(("policy", "mode", "error"), NOT_AGAIN.values(), ids=NOT_AGAIN)
async def test_any_other_failure_is_not_tried_again(
    prefill: Any, context: Any, upstream: Any, policy: str, mode: str, error: Exception
) -> None:
    ctx, up = context("chat", {"messages": PICTURES}, rendered=SEEN, ec_params=ENTRIES), upstream(error)
    with pytest.raises(type(error)):
        await prefill({**TOKENS_IN, "mm_features": mode}, on_encode_failure=policy, **EC_NIXL).run(ctx, up)
    assert len(up.legs) == 1


async def test_decode_is_told_whether_the_prompt_was_computed(prefill: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", CHAT)
    await prefill(OPENAI).run(ctx, upstream(ANSWER))
    assert ctx.prefilled
    ctx.begin_again("again")
    assert not ctx.prefilled
    ctx = context("chat", CHAT)
    await prefill(OPENAI, on_prefill_failure="decode_alone").run(ctx, upstream(GONE))
    assert not ctx.prefilled
    ctx = context("chat", {**CHAT, "n": 2})
    await prefill(OPENAI).run(ctx, upstream())
    assert not ctx.prefilled


async def test_the_step_s_time_limits_are_the_leg_s(prefill: Any, context: Any, upstream: Any) -> None:
    up = upstream(ANSWER)
    await prefill({"first_byte_timeout": "7s", "max_attempts": 1}).run(context("chat", CHAT), up)
    assert up.legs[0].limits == LegLimits(first_byte_s=7.0, attempts=1)


@pytest.mark.parametrize("api", Format)
def test_what_it_does_for_an_api_is_told_without_a_request(prefill: Any, api: Format) -> None:
    row = prefill(SHARED).plan(api)
    assert (row.api, row.step, row.role, row.format, row.path) == (api, "prefill", "prefill", api, PATHS[api])
    assert row.notes == ("hand-over by kv-shared-storage",)
    row = prefill(TOKENS_IN).plan(api)
    assert (row.format, row.path, row.notes) == (Format.GENERATE, PATHS[Format.GENERATE], ("hand-over by kv-nixl",))

"""render: one call for a text prompt, none for tokens, and the limits hold for both."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.step import LegLimits, PlanRow
from envelope.errors import BadRequest, LegFailed, LegRejected
from envelope.formats import Format
from steps.render import Params, Render

HI = [{"role": "user", "content": "hi"}]
ANSWER = {"request_id": "chatcmpl-x", "token_ids": [1, 2, 3], "sampling_params": {"output_kind": 2, "max_tokens": 9},
          "parse_context": {"tool_choice": "none"}, "priority": 0}  # fmt: skip

BODIES = {
    "chat": {"model": "m", "messages": HI, "stream": True},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi", "store": False},
    "messages": {"model": "m", "messages": HI, "max_tokens": 9},
}


@pytest.fixture
def render(settings: Any) -> Any:
    def made(**params: Any) -> Render:
        return Render(Params.model_validate({"address": "http://r:8000", **params}), settings())

    return made


@pytest.mark.parametrize("api", BODIES)
async def test_the_client_s_body_goes_to_its_api_s_render_route(
    render: Any, context: Any, upstream: Any, api: str
) -> None:
    ctx, up = context(api, BODIES[api]), upstream([ANSWER] if api == "completions" else ANSWER)
    render().admit(ctx)
    assert await render().run(ctx, up) == "ok"
    (leg,) = up.legs
    assert (leg.step, leg.role, leg.body) == ("render", "render", BODIES[api])
    paths = {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render",
             "responses": "/v1/responses/render", "messages": "/v1/messages/render"}  # fmt: skip
    assert leg.path == paths[api]
    assert ctx.rendered == {**ANSWER, "model": "m"}
    assert up.calls == [("post_json", ())]


async def test_what_render_left_out_is_completed_by_the_client_s_body(render: Any, context: Any, upstream: Any) -> None:
    """The cap of 16 that vLLM's renderer drops is back before any leg is made of the answer."""
    ctx = context("chat", {"messages": HI, "max_tokens": 16, "cache_salt": "s"})
    await render().run(ctx, upstream({"token_ids": [1], "sampling_params": {"output_kind": 2}}))
    assert ctx.rendered == {
        "token_ids": [1],
        "sampling_params": {"output_kind": 2, "max_tokens": 16},
        "cache_salt": "s",
    }


async def test_transfer_params_in_a_renderer_s_answer_are_dropped(render: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", {"messages": HI})
    params = {"output_kind": 2, "max_tokens": 1, "extra_args": {"kv_transfer_params": {}, "k": "v"}}
    await render().run(ctx, upstream({"token_ids": [1], "kv_transfer_params": {"a": 1}, "sampling_params": params}))
    assert ctx.rendered == {
        "token_ids": [1],
        "sampling_params": {"output_kind": 2, "max_tokens": 1, "extra_args": {"k": "v"}},
    }


async def test_a_generate_client_needs_no_renderer(render: Any, context: Any, upstream: Any) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {}}
    ctx, up = context("generate", body), upstream()
    assert await render().run(ctx, up) == "skipped"
    assert (ctx.rendered, up.legs) == (body, [])


async def test_a_prompt_of_tokens_needs_no_renderer(render: Any, context: Any, upstream: Any) -> None:
    ctx, up = context("completions", {"model": "m", "prompt": [[1, 2]], "max_tokens": 5}), upstream()
    assert await render().run(ctx, up) == "skipped"
    assert (ctx.rendered, up.legs) == ({"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}, [])


BAD_ANSWERS = [[], [ANSWER, ANSWER], [[1]], {}, {"token_ids": []}, {"token_ids": None}, {"token_ids": "hi"},
               {"token_ids": [1, "a"]}, {"token_ids": [1.0]}, {"token_ids": [True]}, {"detail": "x"}]  # fmt: skip


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=repr)
async def test_an_answer_without_tokens_is_no_render(render: Any, context: Any, upstream: Any, answer: Any) -> None:
    ctx = context("chat", {"messages": HI})
    with pytest.raises(LegFailed, match="render: the render service's answer has no token_ids"):
        await render().run(ctx, upstream(answer))
    assert ctx.rendered is None


async def test_a_renderer_s_refusal_is_the_client_s_to_see(render: Any, context: Any, upstream: Any) -> None:
    refused = LegRejected("render", 400, {"message": "too long"})
    with pytest.raises(LegRejected) as caught:
        await render().run(context("chat", {"messages": HI}), upstream(refused))
    assert caught.value is refused


TOKENS = "the prompt has 3 tokens; at most 2 are accepted here"


async def test_a_prompt_above_the_limit_is_refused_whoever_tokenized_it(
    render: Any, context: Any, upstream: Any
) -> None:
    limited = render(max_total_tokens=2)
    for ctx, up, param in (
        (context("chat", {"messages": HI}), upstream(ANSWER), "messages"),
        (context("responses", {"input": "hi"}), upstream(ANSWER), "input"),
        (context("completions", {"prompt": [1, 2, 3]}), upstream(), "prompt"),
        (context("generate", {"token_ids": [1, 2, 3], "sampling_params": {}}), upstream(), "token_ids"),
    ):
        with pytest.raises(BadRequest) as caught:
            await limited.run(ctx, up)
        assert (caught.value.message, caught.value.param) == (TOKENS, param)
    await render(max_total_tokens=3).run(context("chat", {"messages": HI}), upstream(ANSWER))


PARTS = {
    "image": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
}


def of_media(*spans: tuple[str, int], **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request that holds media, and what a renderer makes of it.

    Args:
        spans: kind and placeholder length of each piece, in the order of the prompt.
        changes: fields of the features in place of the right ones.
    """
    lists: dict[str, Any] = {name: {} for name in ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata")}
    offset = 1
    for number, (kind, length) in enumerate(spans):
        for name, item in (
            ("mm_hashes", f"h{number}"),
            ("mm_placeholders", {"offset": offset, "length": length}),
            ("kwargs_data", f"T{number}"),
            ("mm_metadata", f"m{number}"),
        ):
            lists[name].setdefault(kind, []).append(item)
        offset += length
    body = {"messages": [{"role": "user", "content": [PARTS[kind] for kind, _ in spans]}]}
    return body, {**ANSWER, "token_ids": list(range(offset + 1)), "features": {**lists, **changes}}


# (media, the placeholder tokens of it)
PLACEHOLDERS: list[tuple[tuple[tuple[str, int], ...], int]] = [
    ((), 0),
    ((("image", 70),), 70),
    ((("image", 70), ("audio", 25), ("image", 5)), 100),
]


@pytest.mark.parametrize(("spans", "tokens"), PLACEHOLDERS)
async def test_the_tokens_of_media_have_a_limit_of_their_own(
    render: Any, context: Any, upstream: Any, spans: Any, tokens: int
) -> None:
    def asked() -> tuple[Any, Any]:
        body, answer = of_media(*spans)
        return context("chat", body), upstream(answer)

    await render(max_total_placeholder_tokens=tokens or 1).run(*asked())
    await render().run(*asked())
    if tokens > 1:
        with pytest.raises(BadRequest) as caught:
            await render(max_total_placeholder_tokens=tokens - 1).run(*asked())
        assert caught.value.message == (
            f"the media of this request take {tokens} tokens; at most {tokens - 1} are accepted here"
        )


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer than were sent": (
        of_media(("image", 3))[1]["features"], "features.mm_hashes.image has 1 items, and the request 2 of that kind"),
    "of another kind": (
        of_media(("image", 3), ("audio", 3))[1]["features"],
        "features.mm_hashes.image has 1 items, and the request 2 of that kind"),
    "behind the prompt": (
        {"mm_placeholders": {"image": [{"offset": 1, "length": 3}, {"offset": 4, "length": 9}]}},
        "features.mm_placeholders.image[1] ends at 13, and the prompt has 8 tokens"),
    "one place twice": (
        {"mm_placeholders": {"image": [{"offset": 1, "length": 3}] * 2}},
        "features.mm_placeholders.image[1] overlaps image[0]: each piece of media has tokens of its own"),
    "tensors of one": ({"kwargs_data": {"image": ["T"]}}, "features.kwargs_data.image has 1 items, and mm_hashes 2"),
    "no hash": ({"mm_hashes": {"image": ["", "h"]}}, "features.mm_hashes.image[0] must be a text that is not empty"),
    "no lists": ({"mm_hashes": 7}, "features.mm_hashes must be an object of lists, one for each modality"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), LIES.values(), ids=LIES)
async def test_a_renderer_that_contradicts_itself_or_the_request_is_at_fault(
    render: Any, context: Any, upstream: Any, changes: dict[str, Any], sentence: str
) -> None:
    body, answer = of_media(("image", 3), ("image", 3), **changes)
    with pytest.raises(LegFailed) as caught:
        await render().run(context("chat", body), upstream(answer))
    assert caught.value.message == f"render: the render service's answer does not fit the request: {sentence}"
    assert caught.value.status == 502


@pytest.mark.parametrize("features", [None, "x", []])
async def test_media_that_the_renderer_lost_is_missed(render: Any, context: Any, upstream: Any, features: Any) -> None:
    body, answer = of_media(("image", 3))
    with pytest.raises(LegFailed, match="does not fit the request"):
        await render().run(context("chat", body), upstream({**answer, "features": features}))


async def test_media_that_nobody_sent_is_seen(render: Any, context: Any, upstream: Any) -> None:
    with pytest.raises(LegFailed, match="has 1 items, and the request 0 of that kind"):
        await render().run(context("chat", {"messages": HI}), upstream(of_media(("image", 3))[1]))


async def test_metadata_gets_the_modalities_that_vllm_leaves_out_of_it(
    render: Any, context: Any, upstream: Any
) -> None:
    body, answer = of_media(("image", 3), ("audio", 2), mm_metadata={"image": ["m"]})
    ctx = context("chat", body)
    await render().run(ctx, upstream(answer))
    assert ctx.rendered["features"]["mm_metadata"] == {"image": ["m"], "audio": [None]}


@pytest.mark.parametrize("asked", [{}, {"mm_payload": "tensors"}, {"mm_payload": "none"}, {"return_mm_kwargs": False}])
@pytest.mark.parametrize("tokens_in", [True, False])
async def test_tensors_are_rendered_where_a_leg_is_sent_them_whatever_the_client_asks(
    settings: Any, context: Any, upstream: Any, tokens_in: bool, asked: dict[str, Any]
) -> None:
    body, answer = of_media(("image", 3))
    up = upstream(answer, ANSWER)
    render = Render(Params.model_validate({"address": "http://r:8000"}), settings(tokens_in=tokens_in))
    await render.run(context("chat", {**body, **asked, "mm_processor_kwargs": {"max_pixels": 10}}), up)
    payload = {} if tokens_in else {"mm_payload": "none"}
    assert up.legs[0].body == {**body, "mm_processor_kwargs": {"max_pixels": 10}, **payload}
    await render.run(context("chat", {"messages": HI, **asked}), up)
    assert up.legs[1].body == {"messages": HI}


def test_documents_are_refused_before_anything_is_sent(render: Any, context: Any) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    body = {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}], "max_tokens": 9}
    with pytest.raises(BadRequest, match="the model is shown no documents"):
        render().admit(context("messages", body))


MALFORMED: list[Any] = [
    "x", ["x"], {"mm_placeholders": "x"}, {"mm_placeholders": {"image": 7}}, {"mm_placeholders": {"image": [7, None]}},
    {"mm_placeholders": {"image": [{}, {"length": "x"}, {"length": None}]}},
]  # fmt: skip


@pytest.mark.parametrize("given", MALFORMED, ids=repr)
async def test_features_of_a_wrong_shape_are_the_worker_s_to_refuse(
    render: Any, context: Any, upstream: Any, given: Any
) -> None:
    """A client of the generate route may send anything in their place."""
    ctx = context("generate", {"token_ids": [1], "sampling_params": {}, "features": given})
    assert await render(max_total_placeholder_tokens=1).run(ctx, upstream()) == "skipped"


async def test_the_time_limit_is_the_whole_call_s(render: Any, context: Any, upstream: Any) -> None:
    for params, request_s in (({}, 30.0), ({"timeout": "2s"}, 2.0), ({"timeout": 0}, None)):
        up = upstream(ANSWER)
        await render(**params).run(context("chat", {"messages": HI}), up)
        assert up.legs[0].limits == LegLimits(request_s=request_s)


PLANS = {
    Format.CHAT: PlanRow(Format.CHAT, "render", "render", Format.CHAT, "/v1/chat/completions/render"),
    Format.COMPLETIONS: PlanRow(
        Format.COMPLETIONS, "render", "render", Format.COMPLETIONS, "/v1/completions/render",
        ("no call for a token-array prompt",)),
    Format.RESPONSES: PlanRow(Format.RESPONSES, "render", "render", Format.RESPONSES, "/v1/responses/render"),
    Format.MESSAGES: PlanRow(Format.MESSAGES, "render", "render", Format.MESSAGES, "/v1/messages/render"),
    Format.GENERATE: PlanRow(
        Format.GENERATE, "render", "render", None, None, ("the client sends token ids",)),
}  # fmt: skip


@pytest.mark.parametrize("api", Format)
def test_what_it_does_for_an_api_is_told_without_a_request(render: Any, api: Format) -> None:
    assert render().plan(api) == PLANS[api]

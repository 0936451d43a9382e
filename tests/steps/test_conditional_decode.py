"""conditional-decode: a probe with the client's own body; a miss or a failed probe goes on with the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.step import LegLimits, Reply
from envelope.errors import BadRequest, LegBusy, LegFailed, LegRejected, LegTimeout, NoWorker
from envelope.formats import PATHS, Format
from envelope.json_codec import dumps
from steps.conditional_decode import ConditionalDecode, Params

HI = [{"role": "user", "content": "hi"}]
MISS = Reply(412, b"", None)
ANSWER = {"choices": [{"index": 0, "message": {"content": "hello"}}]}

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI, "n": 2},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi", "store": False},
    "messages": {"model": "m", "messages": HI, "max_tokens": 9},
    "generate": {"token_ids": [1], "sampling_params": {}},
}


@pytest.fixture
def probe(settings: Any) -> Any:
    def made(params: Any = None, **changes: Any) -> ConditionalDecode:
        return ConditionalDecode(Params.model_validate(params or {}), settings(**changes))

    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", BODIES)
async def test_the_probe_is_the_client_s_own_request_with_a_preference(
    probe: Any, context: Any, upstream: Any, api: str, stream: bool
) -> None:
    body = {**BODIES[api], "stream": stream}
    ctx, up = context(api, body), upstream(MISS)
    probe().admit(ctx)
    assert await probe().run(ctx, up) == "miss"
    (leg,) = up.legs
    assert (leg.step, leg.role, leg.path, leg.body) == ("conditional-decode", "decode", PATHS[Format(api)], body)
    assert (leg.headers, leg.single_use) == ((("Prefer", "if-available"),), False)
    assert up.calls == [("stream" if stream else "post_json", (412,))]
    assert ctx.answer is None


async def test_a_hit_is_the_answer(probe: Any, context: Any, upstream: Any) -> None:
    ctx = context("chat", BODIES["chat"])
    assert await probe(expose_transfer_params=True).run(ctx, upstream(ANSWER)) == "hit"
    assert (ctx.answer.source, ctx.answer.body) == (dumps(ANSWER), ANSWER)
    assert (ctx.answer.format, ctx.answer.wrap, ctx.answer.headers) == (Format.CHAT, False, (("x-worker", "1"),))
    assert ctx.answer.expose_transfer_params


async def test_a_streamed_hit_is_the_answer_while_it_comes(
    probe: Any, context: Any, upstream: Any, stream: Any
) -> None:
    ctx, live = context("chat", {**BODIES["chat"], "stream": True}), stream(b'{"choices":[]}')
    assert await probe().run(ctx, upstream(live)) == "hit"
    assert ctx.answer.source is live
    assert not (live.closed or ctx.answer.expose_transfer_params)


MODES = [({}, {"output_mode": "tokens"}), ({}, {}), ({"output_mode": "text"}, {"output_mode": "text"})]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("asked", "answered"), MODES)
async def test_a_generate_client_s_mode_must_come_back(
    probe: Any, context: Any, upstream: Any, stream: Any, asked: Any, answered: Any, streamed: bool
) -> None:
    ctx = context("generate", {**BODIES["generate"], **asked, "stream": streamed})
    reply = stream(dumps(answered)) if streamed else {**ANSWER, **answered}
    assert await probe().run(ctx, upstream(reply)) == "hit"
    assert ctx.answer.format is Format.GENERATE


async def test_a_whole_answer_in_another_mode_is_a_failed_probe(probe: Any, context: Any, upstream: Any) -> None:
    ctx = context("generate", {**BODIES["generate"], "output_mode": "text"})
    assert await probe().run(ctx, upstream({**ANSWER, "output_mode": "tokens"})) == "probe_failed"
    assert ctx.answer is None


async def test_a_stream_in_another_mode_is_closed_and_the_pipeline_goes_on(
    probe: Any, context: Any, upstream: Any, stream: Any
) -> None:
    ctx, live = context("generate", {**BODIES["generate"], "output_mode": "text", "stream": True}), stream(b"{}")
    assert await probe().run(ctx, upstream(live)) == "probe_failed"
    assert (ctx.answer, live.closed) == (None, True)


async def test_a_derender_stream_is_probed_unstreamed(probe: Any, context: Any, upstream: Any) -> None:
    body = {**BODIES["generate"], "output_mode": "derender", "stream": True, "stream_options": {"include_usage": True}}
    ctx, up = context("generate", body), upstream({**ANSWER, "output_mode": "derender"})
    assert await probe().run(ctx, up) == "hit"
    assert up.legs[0].body == {**BODIES["generate"], "output_mode": "derender", "stream": False}
    assert up.calls[0][0] == "post_json"


FAILURES = [LegFailed("decode", "x"), LegBusy("decode", "x"), LegTimeout("decode", "x"), NoWorker("decode", "x")]
MISTAKES = [LegRejected("decode", 400, {"message": "x"}), BadRequest("x")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_probe_that_fails_goes_on_with_the_pipeline(
    probe: Any, context: Any, upstream: Any, error: Exception, streamed: bool
) -> None:
    ctx = context("chat", {**BODIES["chat"], "stream": streamed})
    assert await probe().run(ctx, upstream(error)) == "probe_failed"
    assert ctx.answer is None


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
async def test_the_client_s_own_mistake_is_answered_at_once(
    probe: Any, context: Any, upstream: Any, error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        await probe().run(context("chat", BODIES["chat"]), upstream(error))
    assert caught.value is error


async def test_a_request_with_media_is_not_probed(probe: Any, context: Any, upstream: Any) -> None:
    media = [{"role": "user", "content": [{"type": "image_url"}]}]
    up = upstream()
    assert await probe().run(context("chat", {"messages": media}), up) == "skipped"
    assert up.legs == []


async def test_a_generate_client_s_media_are_hashes_by_then(probe: Any, context: Any, upstream: Any) -> None:
    up = upstream(MISS)
    assert await probe().run(context("generate", {**BODIES["generate"], "features": {"mm_hashes": {}}}), up) == "miss"


def test_it_has_no_wire_format_to_choose() -> None:
    with pytest.raises(ValidationError, match="use_openai_format cannot be set on conditional-decode"):
        Params.model_validate({"use_openai_format": True})
    with pytest.raises(ValidationError):
        Params.model_validate("x")


async def test_the_step_s_time_limits_are_the_probe_s(probe: Any, context: Any, upstream: Any) -> None:
    up = upstream(MISS)
    await probe({"request_timeout": "3s"}).run(context("chat", BODIES["chat"]), up)
    assert up.legs[0].limits == LegLimits(request_s=3.0)


@pytest.mark.parametrize("api", Format)
def test_what_it_does_for_an_api_is_told_without_a_request(probe: Any, api: Format) -> None:
    row = probe(use_openai_format=False).plan(api)
    assert (row.api, row.step, row.role, row.format, row.path) == (api, "conditional-decode", "decode", api, PATHS[api])
    assert row.notes == ("an endpoint picker's 412 goes on with the pipeline; vLLM itself never answers one",)

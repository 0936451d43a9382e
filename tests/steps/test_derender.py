"""derender: one call for a whole answer, one for each chunk of a stream, and the state that goes round between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.context import Answer
from coordinator.step import Reply
from envelope.errors import LegFailed
from envelope.formats import Format
from envelope.json_codec import dumps
from steps.decode import Decode
from steps.decode import Params as DecodeParams
from steps.derender import Derender, Params

if TYPE_CHECKING:
    from collections.abc import Callable

RENDERED = {"token_ids": [1, 2], "sampling_params": {"n": 1, "max_tokens": 9}, "parse_context": {"tool_choice": "none"}}
BODIES = {
    "chat": {"model": "m", "messages": []},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi", "store": False},
    "messages": {"model": "m", "messages": [], "max_tokens": 9},
}
DONE = b"data: [DONE]\n\n"


class Live:
    """A worker's stream, in the pieces that it is given. Implements ``coordinator.context.LiveStream``."""

    headers = (("x-worker", "1"),)

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.first_event = pieces[0].split(b"\n\n")[0].removeprefix(b"data: ")
        self.closed = False
        self.endings: list[Any] = []

    def ended(self, error: Any) -> None:
        self.endings.append(error)

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while self.pieces:
            if not take(self.pieces.pop(0)):
                return False
        return True

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def derender(settings: Any) -> Derender:
    return Derender(Params.model_validate({"address": "http://r"}), settings())


def tokens(*ids: int, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "token_ids": list(ids), "finish_reason": finish, "stop_reason": None, "logprobs": None}
    return {"request_id": "g", "output_mode": "tokens", "choices": [choice]}


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def spoken(delta: dict[str, Any], state: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": None, "content": None, "reasoning": None, **delta}, "logprobs": None,
              "finish_reason": finish, "stop_reason": None}  # fmt: skip
    return {"chunk": {"choices": [choice]}, "stream_state": {"n": state}}


def whole(finish: str = "stop") -> Answer:
    reply = tokens(5, finish=finish)
    return Answer(dumps(reply), Format.GENERATE, wrap=True, headers=(("x-worker", "1"),), body=reply)


MESSAGE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi", "reasoning": "hm"},
                        "finish_reason": "stop", "stop_reason": None, "logprobs": None}]}  # fmt: skip


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_whole_answer_takes_one_call(derender: Derender, context: Any, upstream: Any, api: str) -> None:
    ctx, to = context(api, BODIES[api], rendered=RENDERED), upstream(MESSAGE)
    ctx.generated = whole()
    assert await derender.run(ctx, to) == "ok"
    (leg,) = to.legs
    assert (leg.step, leg.role, leg.idempotent) == ("derender", "derender", True)
    assert leg.path == "/v1/chat/completions/derender"
    assert leg.body["prompt_token_ids"] == [1, 2]
    assert ctx.answer.wrap and ctx.answer.headers == (("x-worker", "1"),)
    assert ctx.answer.body["choices"][0]["message"]["reasoning"] == "hm"
    assert json.loads(ctx.answer.source) == ctx.answer.body


async def test_a_completion_is_not_parsed(derender: Derender, context: Any, upstream: Any) -> None:
    text = {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop", "stop_reason": None, "logprobs": None}]}
    ctx, to = context("completions", BODIES["completions"], rendered=RENDERED), upstream(text)
    ctx.generated = whole()
    await derender.run(ctx, to)
    assert to.legs[0].path == "/v1/completions/derender"
    assert ctx.answer.body["choices"][0]["text"] == "hi"


async def test_an_answer_without_a_token_needs_no_call(derender: Derender, context: Any, upstream: Any) -> None:
    """S28: an aborted request may have generated nothing, which the service would refuse."""
    ctx, to = context("chat", BODIES["chat"], rendered=RENDERED), upstream()
    ctx.generated = Answer(b"{}", Format.GENERATE, wrap=True, body=tokens(finish="abort"))
    await derender.run(ctx, to)
    assert to.legs == []
    assert ctx.answer.body["choices"][0]["message"]["content"] == ""


async def test_each_chunk_of_a_stream_takes_one_call_and_sends_the_state_of_the_last(
    derender: Derender, context: Any, upstream: Any
) -> None:
    """Wherever the worker's bytes are cut: inside an event, or two events in one read."""
    first, second, last = event(tokens(5)), event(tokens(6)), event(tokens(finish="stop"))
    usage = event({"request_id": "g", "usage": {"prompt_tokens": 2}, "choices": []})
    live = Live(b": hello\n\n", first[:9], first[9:] + second, last + usage, DONE)
    to = upstream(spoken({"reasoning": "hm"}, 1), spoken({}, 2), spoken({"content": "x"}, 3, "stop"))
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True, headers=live.headers)
    await derender.run(ctx, to)
    assert ctx.answer.parsed and ctx.answer.wrap
    took: list[bytes] = []
    while not await ctx.answer.source.push(lambda data: bool(took.append(data))):  # a client that is always behind
        pass
    assert [leg.body["stream_state"] for leg in to.legs] == [None, {"n": 1}, {"n": 2}]
    assert [leg.body["generate_chunk"]["choices"][0]["token_ids"] for leg in to.legs] == [[5], [6], []]
    assert took[0] == b": hello\n\n" and took[-2:] == [usage, DONE]
    shown = [json.loads(one[6:])["choices"][0] for one in took[1:-2]]
    assert [one["delta"] for one in shown] == [{"reasoning": "hm"}, None, {"content": "x"}]
    assert [one["finish_reason"] for one in shown] == [None, None, "stop"]
    await ctx.aclose()
    assert live.closed


async def test_how_a_stream_ended_is_told_of_the_worker_but_not_that_the_service_failed(
    derender: Derender, context: Any, upstream: Any
) -> None:
    live, cut = Live(event(tokens(5))), LegFailed("decode", "the worker's stream ended early")
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True, headers=live.headers)
    await derender.run(ctx, upstream(spoken({"content": "x"}, 1)))
    for error in (cut, LegFailed("derender", "the worker answered 500"), None):
        ctx.answer.source.ended(error)
    assert live.endings == [cut, None]
    await ctx.aclose()


async def test_a_worker_that_breaks_off_before_its_first_token_is_told_of(
    derender: Derender, context: Any, upstream: Any
) -> None:
    cut = LegFailed("decode", "the connection to the worker broke before its answer was whole")

    class Broken(Live):
        async def push(self, take: Callable[[bytes], bool]) -> bool:
            raise cut

    live = Broken(b": hello\n\n")
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True, headers=live.headers)
    with pytest.raises(LegFailed) as told:
        await derender.run(ctx, upstream())
    assert told.value is cut and live.endings == [cut]


async def test_each_choice_has_a_state_of_its_own(derender: Derender, context: Any, upstream: Any) -> None:
    live = Live(*[event(tokens(5, index=index)) for index in (0, 1, 0)], DONE)
    to = upstream(*[spoken({"content": "x"}, n) for n in (1, 2, 3)])
    ctx = context("chat", {**BODIES["chat"], "stream": True, "n": 2}, rendered=RENDERED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True)
    await derender.run(ctx, to)
    assert await ctx.answer.source.push(lambda data: True)
    assert [leg.body["stream_state"] for leg in to.legs] == [None, None, {"n": 1}]


async def test_a_service_that_fails_on_the_first_chunk_fails_the_request_with_a_status(
    derender: Derender, context: Any, upstream: Any
) -> None:
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(Live(event(tokens(5)), DONE), Format.GENERATE, wrap=True)
    with pytest.raises(LegFailed, match="derender: down"):
        await derender.run(ctx, upstream(LegFailed("derender", "down")))
    assert ctx.answer is None
    await ctx.aclose()
    assert ctx.generated.source.closed


@pytest.mark.parametrize("answer", [[], {"chunk": {}}, {"stream_state": {}, "chunk": {"choices": []}}])
async def test_a_service_that_answers_something_else_is_a_failed_leg(
    derender: Derender, context: Any, upstream: Any, answer: Any
) -> None:
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(Live(event(tokens(5)), DONE), Format.GENERATE, wrap=True)
    with pytest.raises(LegFailed) as caught:
        await derender.run(ctx, upstream(Reply(200, (), dumps(answer), answer)))
    assert caught.value.leg == "derender"


WRONG = [b"data: {oops\n\n", b'data: {"choices":[{}]}\n\n', b'data: {"choices":[{},{}]}\n\n']


@pytest.mark.parametrize("event_", WRONG)
async def test_a_worker_s_chunk_that_cannot_be_read_is_a_failed_leg(
    derender: Derender, context: Any, upstream: Any, event_: bytes
) -> None:
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    ctx.generated = Answer(Live(event_, DONE), Format.GENERATE, wrap=True)
    with pytest.raises(LegFailed):
        await derender.run(ctx, upstream(spoken({}, 1)))


# --- what decode asks for and leaves -------------------------------------------------------------------------------


@pytest.fixture
def decode(settings: Any) -> Decode:
    return Decode(DecodeParams.model_validate({"derender": "service", "use_openai_format": False}), settings())


@pytest.mark.parametrize("api", list(BODIES))
async def test_decode_asks_for_tokens_and_leaves_them_to_the_step(
    decode: Decode, context: Any, upstream: Any, api: str
) -> None:
    ctx, to = context(api, BODIES[api], rendered=RENDERED), upstream(tokens(5, finish="stop"))
    await decode.run(ctx, to)
    assert to.legs[0].body["output_mode"] == "tokens"
    assert ctx.answer is None and ctx.generated.wrap
    assert ctx.generated.body["choices"][0]["token_ids"] == [5]


async def test_a_generate_client_gets_its_answer_from_decode(decode: Decode, context: Any, upstream: Any) -> None:
    ctx = context("generate", {"token_ids": [1], "sampling_params": {}})
    await decode.run(ctx, upstream(tokens(5, finish="stop")))
    assert ctx.generated is None and ctx.answer is not None


@pytest.mark.parametrize(("stop", "streamed"), [([], True), (["###"], False)])
async def test_a_stream_with_stop_strings_comes_whole_since_the_service_cuts_them_off_whole_answers_alone(
    decode: Decode, context: Any, upstream: Any, stream: Any, stop: list[str], streamed: bool
) -> None:
    rendered = {**RENDERED, "sampling_params": {"stop": stop}}
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=rendered)
    live = stream(dumps(tokens(5)))
    to = upstream(live if streamed else tokens(5, finish="stop"))
    await decode.run(ctx, to)
    assert to.legs[0].body["stream"] is streamed
    assert isinstance(ctx.generated.source, bytes) is not streamed

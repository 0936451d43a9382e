"""derender: one call for a whole answer, one for each chunk of a stream, and the state that goes round between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.context import Answer
from coordinator.step import Reply
from envelope.errors import LegFailed, LegUnreadable
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
        await derender.run(ctx, upstream(Reply(200, dumps(answer), answer)))
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


# --- stop strings, which the worker is not told ---------------------------------------------------------------------

STOPPED = {
    **RENDERED,
    "sampling_params": {"n": 1, "stop": ["ef"], "include_stop_str_in_output": True, "max_tokens": 99},
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_stay_here_and_decode_is_listened_to(
    decode: Decode, context: Any, upstream: Any, stream: Any, streamed: bool
) -> None:
    """S41: a worker without a tokenizer refuses them; and it would go on behind them."""
    ctx = context("chat", {**BODIES["chat"], "stream": streamed}, rendered=STOPPED)
    to = upstream(stream(dumps(tokens(5))))
    await decode.run(ctx, to)
    (leg,) = to.legs
    assert leg.body["sampling_params"] == {"n": 1, "max_tokens": 99}
    assert (leg.body["stream"], leg.body["stream_options"]) == (True, {"include_usage": True})
    assert not isinstance(ctx.generated.source, bytes)


async def test_an_answer_with_its_prompt_s_logprobs_comes_whole_as_no_stream_has_them(
    decode: Decode, context: Any, upstream: Any
) -> None:
    ctx = context("chat", {**BODIES["chat"], "prompt_logprobs": 1}, rendered=STOPPED)
    to = upstream(tokens(5, finish="stop"))
    await decode.run(ctx, to)
    assert not to.legs[0].body["stream"] and "stop" not in to.legs[0].body["sampling_params"]


class Speller:
    """A service to which token 97 says "a", and 2 is the end. Stands in for ``coordinator.step.Upstream``.

    Attributes:
        texts: the tokens of each call for text.
        wholes: the bodies of the others.
    """

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.wholes: list[Any] = []

    async def post_json(self, ctx: Any, leg: Any) -> Reply:
        if leg.body.get("stream"):
            assert leg.path == "/v1/completions/derender"
            (choice,) = leg.body["generate_chunk"]["choices"]
            self.texts.append(choice["token_ids"])
            text = "".join(chr(token) for token in choice["token_ids"] if token != 2)
            state = (leg.body["stream_state"] or "") + text
            assert (leg.body["prompt_token_ids"] is None) is bool(leg.body["stream_state"])
            answer: Any = {"chunk": {"choices": [{"index": 0, "text": text}]}, "stream_state": state}
        else:
            self.wholes.append(leg.body)
            choices = leg.body["generate_response"]["choices"]
            said = [{**one, "message": {"role": "assistant", "content": "said"}} for one in choices]
            answer = {"choices": said}
        return Reply(200, dumps(answer), answer)


def sampled(**sampling: Any) -> dict[str, Any]:
    return {**STOPPED, "sampling_params": {**STOPPED["sampling_params"], **sampling}}


def spelled(text: str, size: int, finish: str | None = "length", index: int = 0) -> list[bytes]:
    ids = list(text.encode())
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [event(tokens(*piece, finish=finish if piece is pieces[-1] else None, index=index)) for piece in pieces]


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_stop_string_ends_the_answer_and_closes_the_leg(
    derender: Derender, context: Any, api: str, size: int, streamed: bool
) -> None:
    """S29: at the token that completes it, in whatever pieces tokens come; of those behind it nothing is told."""
    live, to = Live(*spelled("abcdefghijklmnop", size), DONE), Speller()
    ctx = context(api, {**BODIES[api], "stream": streamed}, rendered=STOPPED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True, headers=live.headers)
    await derender.run(ctx, to)
    (body,) = to.wholes
    (given,) = body["generate_response"]["choices"]
    assert given == {"index": 0, "token_ids": list(b"abcdef"), "finish_reason": "stop", "stop_reason": "ef"}
    (choice,) = ctx.answer.body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", "ef", list(b"abcdef"))
    assert ctx.answer.body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert isinstance(ctx.answer.source, bytes)
    assert (live.closed, live.endings) == (True, [None])
    assert len(live.pieces) >= 1, "what comes after a stop string is not read"


@pytest.mark.parametrize(
    ("sampling", "kept", "why"),
    [
        ({"stop": ["zz"]}, "abcdefgh", None),
        ({"min_tokens": 5}, "abcdef", "ef"),  # it ends behind them, wherever it began
        ({"min_tokens": 6}, "abcdefgh", None),
        ({"min_tokens": 6, "stop": ["ef", "h"]}, "abcdefgh", "h"),
        ({"stop": ["h", "fg", "cdefgh"]}, "abcdefg", "fg"),
        ({"stop": ["a"]}, "a", "a"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 99])
async def test_where_an_answer_ends(
    derender: Derender, context: Any, sampling: Any, kept: str, why: str | None, size: int
) -> None:
    live, to = Live(*spelled("abcdefgh", size), DONE), Speller()
    ctx = context("chat", BODIES["chat"], rendered=sampled(**sampling))
    ctx.generated = Answer(live, Format.GENERATE, wrap=True)
    await derender.run(ctx, to)
    (choice,) = ctx.answer.body["choices"]
    assert bytes(choice["token_ids"]).decode() == kept
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length" if why is None else "stop", why)


async def test_an_end_of_the_worker_s_own_stays_what_it_is(derender: Derender, context: Any) -> None:
    live, to = Live(event(tokens(97)), event(tokens(98, 2, finish="stop")), DONE), Speller()
    ctx = context("chat", BODIES["chat"], rendered=STOPPED)
    ctx.generated = Answer(live, Format.GENERATE, wrap=True)
    await derender.run(ctx, to)
    assert to.wholes[0]["generate_response"]["choices"][0]["token_ids"] == [97, 98, 2]
    assert ctx.answer.body["choices"][0]["stop_reason"] is None
    assert ctx.answer.body.get("usage") is None, "the worker's own, where nothing was cut"


async def test_each_choice_ends_by_itself_and_the_leg_with_the_last(derender: Derender, context: Any) -> None:
    early, late = spelled("abefabab", 2), spelled("xyzefxyz", 1, index=1)
    live, to = Live(*early[:2], *late[:3], *early[2:], *late[3:], DONE), Speller()
    ctx = context("chat", {**BODIES["chat"], "n": 2}, rendered=sampled(n=2))
    ctx.generated = Answer(live, Format.GENERATE, wrap=True)
    await derender.run(ctx, to)
    said = [(bytes(one["token_ids"]).decode(), one["stop_reason"]) for one in ctx.answer.body["choices"]]
    assert said == [("abef", "ef"), ("xyzef", "ef")]
    assert ctx.answer.body["usage"]["completion_tokens"] == 9
    assert live.closed and live.pieces
    assert to.texts.count(list(b"ab")) == 1, "a choice that has ended is not asked about"


@pytest.mark.parametrize("finish", ["length", "stop"])
async def test_a_whole_answer_is_cut_too(derender: Derender, context: Any, finish: str) -> None:
    """One with its prompt's logprobs, whose worker went on to its own end: the token is found by halves."""
    reply = {**tokens(*b"abcdefghijklmnopqrstuvwxyz", finish=finish), "prompt_logprobs": [None]}
    reply["choices"][0]["logprobs"] = {"content": [{"token": f"token_id:{n}"} for n in range(26)]}
    ctx, to = context("chat", BODIES["chat"], rendered=STOPPED), Speller()
    ctx.generated = Answer(dumps(reply), Format.GENERATE, wrap=True, body=reply)
    await derender.run(ctx, to)
    (given,) = to.wholes[0]["generate_response"]["choices"]
    assert (given["token_ids"], given["finish_reason"], given["stop_reason"]) == (list(b"abcdef"), "stop", "ef")
    assert len(given["logprobs"]["content"]) == 6
    assert len(to.texts) <= 1 + 5
    assert ctx.answer.body["prompt_logprobs"] == [None]


ODD_CHOICES = [{"index": [[1]]}, {"index": "0"}, {"index": {}}, {"logprobs": [{}]}, {"logprobs": {"content": 1}}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("odd", [*ODD_CHOICES, {"usage": [1]}, {"choices": "none"}], ids=str)
async def test_an_answer_of_another_shape_is_the_worker_s_fault(
    derender: Derender, context: Any, odd: dict[str, Any], streamed: bool
) -> None:
    reply = tokens(*b"abcdef", finish="length")
    where = reply["choices"][0] if odd in ODD_CHOICES else reply
    where |= odd
    ctx = context("chat", BODIES["chat"], rendered=STOPPED)
    source: Any = Live(event(reply), DONE) if streamed else dumps(reply)
    ctx.generated = Answer(source, Format.GENERATE, wrap=True, body=None if streamed else reply)
    with pytest.raises(LegUnreadable):
        await derender.run(ctx, Speller())


async def test_whose_fault_it_is_when_a_search_fails(derender: Derender, context: Any, upstream: Any) -> None:
    """The worker is told of its own alone, and the leg is closed with the request."""
    cut = b'data: {"error":{"message":"engine died"}}\n\n'
    for live, to, endings in (
        (Live(event(tokens(5)), DONE), upstream(LegFailed("derender", "down")), 0),
        (Live(event(tokens(97)), cut), Speller(), 1),
        (Live(event(tokens(97)), DONE), Speller(), 1),  # no finish
    ):
        ctx = context("chat", BODIES["chat"], rendered=STOPPED)
        ctx.generated = Answer(live, Format.GENERATE, wrap=True)
        with pytest.raises(LegFailed):
            await derender.run(ctx, to)
        assert len(live.endings) == endings and None not in live.endings
        await ctx.aclose()
        assert live.closed

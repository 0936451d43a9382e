"""decode with ``derender: coordinator``: what the worker is asked, and what the parsers."""

from __future__ import annotations

from typing import Any

import pytest

from envelope.errors import BadRequest, LegFailed, LegUnechoed, NoWorker
from envelope.json_codec import dumps
from steps.decode import Decode, Params

SAMPLING = {"n": 2, "max_tokens": 9, "stop": ["###"], "include_stop_str_in_output": True, "min_tokens": 1,
            "skip_special_tokens": False}  # fmt: skip
CONTEXT = {"tool_choice": "auto", "history_tool_call_cnt": 0}
RENDERED = {"token_ids": [1, 2], "sampling_params": SAMPLING, "parse_context": CONTEXT}
BODIES = {
    "chat": {"model": "m", "messages": []},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi", "store": False},
    "messages": {"model": "m", "messages": [], "max_tokens": 9},
}
DECODING = {"stop": ["###"], "include_stop_str_in_output": True, "min_tokens": 1, "skip_special_tokens": False}


class Parsing:
    """Implements ``coordinator.step.Parsing``."""

    def __init__(self) -> None:
        self.closed = False

    def attach(self, live: Any) -> Any:
        self.live = live
        return live

    def close(self) -> None:
        self.closed = True


class Parsers:
    """Implements ``coordinator.step.Parsers``."""

    eos_token_id = 7

    def __init__(self, error: Exception | None = None) -> None:
        self.jobs: list[Any] = []
        self.parsing = Parsing()
        self._error = error

    def open(self, job: Any) -> Parsing:
        self.jobs.append(job)
        if self._error:
            raise self._error
        return self.parsing

    async def whole(self, job: Any, reply: Any) -> Any:
        self.jobs.append(job)
        if self._error:
            raise self._error
        return {**reply, "output_mode": "derender"}


@pytest.fixture
def decode(settings: Any) -> Any:
    def made(mode: str = "text") -> Decode:
        params = {"derender": "coordinator", "tokenizer": "/m", "tool_parser": "x", "output_mode": mode}
        return Decode(Params.model_validate({**params, "use_openai_format": False}), settings())

    return made


def answer(mode: str) -> dict[str, Any]:
    return {"output_mode": mode, "choices": [{"index": 0, "finish_reason": "stop", "text": "hi", "token_ids": [5]}]}


def going(upstream: Any, parsers: Parsers, *answers: Any) -> Any:
    to = upstream(*answers)
    to.parsers = parsers
    return to


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_whole_answer_comes_as_text_and_is_parsed(decode: Any, context: Any, upstream: Any, api: str) -> None:
    parsers = Parsers()
    ctx, to = context(api, BODIES[api], rendered=RENDERED), going(upstream, parsers, answer("text"))
    await decode().run(ctx, to)
    assert (to.legs[0].body["output_mode"], to.legs[0].body["stream"]) == ("text", False)
    assert to.legs[0].body["sampling_params"] == SAMPLING
    (job,) = parsers.jobs
    assert job == {"id": "req-1234", "prompt": [1, 2], "n": 2, "context": CONTEXT, "decoding": None}
    assert ctx.answer.wrap and ctx.answer.body["output_mode"] == "derender"


async def test_a_stream_is_parsed_by_parsers_that_stand_before_the_worker_is_asked(
    decode: Any, context: Any, upstream: Any, stream: Any
) -> None:
    parsers, live = Parsers(), stream(dumps(answer("text")))
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    await decode().run(ctx, going(upstream, parsers, live))
    assert ctx.answer.parsed and ctx.answer.wrap
    assert parsers.parsing.live is live


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_completion_is_parsed(decode: Any, context: Any, upstream: Any, stream: Any, streamed: bool) -> None:
    parsers, reply = Parsers(), answer("text")
    ctx = context("completions", {**BODIES["completions"], "stream": streamed}, rendered=RENDERED)
    await decode().run(ctx, going(upstream, parsers, stream(dumps(reply)) if streamed else reply))
    assert parsers.jobs == []
    assert ctx.answer.wrap and not ctx.answer.parsed


@pytest.mark.parametrize("api", list(BODIES))
async def test_of_a_worker_without_a_tokenizer_tokens_are_wanted_and_no_stop_strings(
    decode: Any, context: Any, upstream: Any, stream: Any, api: str
) -> None:
    """It would refuse them; they end the text here."""
    parsers = Parsers()
    ctx = context(api, {**BODIES[api], "stream": True}, rendered=RENDERED)
    to = going(upstream, parsers, stream(dumps(answer("tokens"))))
    await decode("tokens").run(ctx, to)
    assert to.legs[0].body["output_mode"] == "tokens"
    assert to.legs[0].body["sampling_params"] == {
        key: value for key, value in SAMPLING.items() if key not in ("stop", "include_stop_str_in_output")
    } | {"stop_token_ids": [7]}
    assert parsers.jobs[0]["decoding"] == DECODING
    assert ctx.answer.parsed is (api != "completions")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, [7]),
        ({"stop_token_ids": [3]}, [3, 7]),
        ({"stop_token_ids": [7, 3]}, [7, 3]),
        ({"stop_token_ids": [3], "ignore_eos": True}, [3]),
        ({"ignore_eos": True}, None),
    ],
)
async def test_a_worker_without_a_tokenizer_is_told_which_token_ends_an_answer(
    decode: Any, context: Any, upstream: Any, own: Any, told: Any
) -> None:
    """Of itself it knows those of the model's generation_config.json alone."""
    ctx = context("chat", BODIES["chat"], rendered={**RENDERED, "sampling_params": {"max_tokens": 9, **own}})
    to = going(upstream, parsers := Parsers(), answer("tokens"))
    await decode("tokens").run(ctx, to)
    assert to.legs[0].body["sampling_params"].get("stop_token_ids") == told
    assert parsers.jobs[0]["decoding"].get("ignore_eos") == own.get("ignore_eos")


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_bad_words_that_such_a_worker_would_leave_out_unsaid_are_refused(
    decode: Any, context: Any, api: str
) -> None:
    ctx = context(api, {**BODIES[api], "bad_words": ["no"]}, rendered=RENDERED)
    decode("text").admit(ctx)
    with pytest.raises(BadRequest, match="bad_words need output_mode: text"):
        decode("tokens").admit(ctx)


async def test_a_prompt_s_logprobs_come_whole_although_a_stop_string_may_end_the_answer(
    decode: Any, context: Any, upstream: Any
) -> None:
    """No stream has them: the worker goes on to its cap, and what comes behind the stop string is cut off here."""
    ctx = context("chat", {**BODIES["chat"], "prompt_logprobs": 1}, rendered=RENDERED)
    to = going(upstream, parsers := Parsers(), answer("tokens"))
    await decode("tokens").run(ctx, to)
    assert to.legs[0].body["stream"] is False
    assert parsers.jobs[0]["decoding"]["stop"] == SAMPLING["stop"]


async def test_a_leg_that_fails_lets_the_parsers_go(decode: Any, context: Any, upstream: Any) -> None:
    parsers = Parsers()
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    with pytest.raises(LegFailed):
        await decode().run(ctx, going(upstream, parsers, LegFailed("decode", "down")))
    assert parsers.parsing.closed


async def test_a_stream_in_another_mode_is_closed_with_the_context(
    decode: Any, context: Any, upstream: Any, stream: Any
) -> None:
    live = stream(dumps(answer("tokens")))
    ctx = context("chat", {**BODIES["chat"], "stream": True}, rendered=RENDERED)
    with pytest.raises(LegUnechoed):
        await decode().run(ctx, going(upstream, Parsers(), live))
    await ctx.aclose()
    assert live.closed


@pytest.mark.parametrize("streamed", [False, True])
async def test_without_a_parser_process_there_is_no_answer(
    decode: Any, context: Any, upstream: Any, streamed: bool
) -> None:
    ctx = context("chat", {**BODIES["chat"], "stream": streamed}, rendered=RENDERED)
    to = going(upstream, Parsers(NoWorker("derender", "no parser process is ready")), answer("text"))
    with pytest.raises(NoWorker):
        await decode().run(ctx, to)
    assert len(to.legs) == (0 if streamed else 1), "a stream's parsers are made before the worker is asked"


async def test_a_generate_client_gets_what_it_asked_the_worker_for(decode: Any, context: Any, upstream: Any) -> None:
    parsers = Parsers()
    ctx = context("generate", {"token_ids": [1], "sampling_params": {"stop": ["###"]}})
    to = going(upstream, parsers, answer("tokens"))
    await decode("tokens").run(ctx, to)
    assert parsers.jobs == [] and to.legs[0].body["sampling_params"] == {"stop": ["###"]}


class Spoken:
    """A stream of text that ends. Implements ``coordinator.context.LiveStream``."""

    headers = (("x-worker", "1"),)
    first_event = dumps(answer("tokens"))

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.closed = False
        self.told: list[Any] = []

    def ended(self, error: Any) -> None:
        self.told.append(error)

    async def push(self, take: Any) -> bool:
        for i, text in enumerate(self.texts):
            finish = "stop" if i == len(self.texts) - 1 else None
            choice = {"index": 0, "text": text, "token_ids": [5], "finish_reason": finish, "stop_reason": None}
            take(b"data: " + dumps({"request_id": "g", "choices": [choice]}) + b"\n\n")
        take(b"data: [DONE]\n\n")
        return True

    async def aclose(self) -> None:
        self.closed = True


class Going:
    """An upstream whose one answer is that stream."""

    def __init__(self, parsers: Parsers, live: Spoken) -> None:
        self.parsers, self.live, self.legs = parsers, live, list[Any]()

    async def stream(self, ctx: Any, leg: Any, *, accept: Any = ()) -> Spoken:
        self.legs.append(leg)
        return self.live


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_whole_answer_that_a_stop_string_may_end_is_listened_to_and_hung_up_on(
    decode: Any, context: Any, api: str
) -> None:
    """S29: a worker without a tokenizer would go on to the end of its context."""
    parsers, live = Parsers(), Spoken("he", "llo")
    ctx, to = context(api, BODIES[api], rendered=RENDERED), Going(parsers, live)
    await decode("tokens").run(ctx, to)
    (leg,) = to.legs
    assert (leg.body["stream"], leg.body["stream_options"]) == (True, {"include_usage": True})
    assert live.closed and live.told == [None]
    listening, *parsing = parsers.jobs
    assert (listening["context"], listening["decoding"]) == (None, DECODING)
    assert [(job["context"], job["decoding"]) for job in parsing] == ([(CONTEXT, None)] if api == "chat" else [])
    assert ctx.answer.body["choices"][0]["text"] == "hello"
    assert ctx.answer.headers == live.headers and ctx.answer.wrap and not ctx.answer.parsed


async def test_a_worker_that_breaks_off_while_it_is_listened_to_is_told_of(decode: Any, context: Any) -> None:
    """Else it would never be left out, however often it fails."""
    cut = LegFailed("decode", "the connection to the worker broke before its answer was whole")

    class Cut(Spoken):
        async def push(self, take: Any) -> bool:
            raise cut

    live = Cut("he")
    with pytest.raises(LegFailed) as told:
        await decode("tokens").run(context("chat", BODIES["chat"], rendered=RENDERED), Going(Parsers(), live))
    assert told.value is cut and live.told == [cut]

"""How a stream ends: whole, as an error with its true status, or broken off so that nobody takes it for whole."""

import json

import pytest

from coordinator.sim import Fault, Settings

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
BROKEN_ENDS = "an error event, and a connection without its last chunk"


def event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(content, shape="alone"):
    if shape == "text":
        choice = {"index": 0, "text": content, "token_ids": [1], "finish_reason": None}
        return event({"output_mode": "text", "choices": [choice]})
    return event({"choices": [{"index": 0, "delta": {"content": content}}]})


REFUSED = {"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}
FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


def broke_off(got, before):
    """Say that what came was ``before``, then one error event and no proper end."""
    assert (got.status, got.whole) == (200, False)
    assert got.raw.startswith(before)
    [error] = got.raw[len(before) :].split(b"\n\n")[:-1]
    return json.loads(error.removeprefix(b"data: "))["error"]


@pytest.mark.parametrize("shape", ["alone", "text"])
@pytest.mark.parametrize("tail", [b"", DONE], ids=["alone", "and the end mark"])
async def test_an_error_as_the_first_event_gets_its_true_status(says, scripted, shape, tail):
    """S07: the engine refuses when the stream is open already; the head is held back until the first event."""
    at, _ = await says(scripted.sse(event(REFUSED) + tail), shape=shape)
    got = await at.chat(stream=True)
    assert (got.status, got.headers["Content-Type"], got.body) == (400, "application/json", REFUSED)
    assert await at.count("coordinator_requests_total", outcome="rejected") == 1


async def test_a_refusal_by_the_engine_itself_is_a_400_for_a_stream_too(coordinator, fleet_of):
    """S07: the simulated worker checks log probabilities as late as vLLM does."""
    fleet = await fleet_of(settings=Settings(max_logprobs=2))
    at = await coordinator(fleet, "text")
    got = await at.chat(stream=True, logprobs=True, top_logprobs=5)
    assert (got.status, got.headers["Content-Type"]) == (400, "application/json")
    assert "logprobs" in got.error["message"]


@pytest.mark.parametrize(("code", "status", "word"), [(500, 502, "leg_failed"), (503, 503, "unavailable")])
async def test_a_failure_as_the_first_event_is_told_without_the_workers_words(says, scripted, code, status, word):
    """S07: a 5xx is the worker's, whichever way it comes."""
    body = {"error": {"message": "secret", "type": "InternalServerError", "code": code}}
    at, _ = await says(scripted.sse(event(body), DONE))
    got = await at.chat(stream=True)
    assert (got.status, b"secret" in got.raw) == (status, False)
    assert await at.count("coordinator_requests_total", outcome=word) == 1


@pytest.mark.parametrize("shape", ["alone", "text", "unwrapped"])
@pytest.mark.parametrize("body", [[DONE], [b""], [b": comment\n\n", DONE]], ids=["end mark", "nothing", "comment"])
async def test_a_stream_without_any_answer_is_a_502(says, scripted, shape, body):
    """S08: no choice was ever seen: a hidden failure, and no empty answer."""
    at, _ = await says(scripted.sse(*filter(None, body)), shape=shape)
    got = await at.chat(stream=True)
    assert (got.status, got.headers["Content-Type"], got.error["code"]) == (502, "application/json", 502)


@pytest.mark.parametrize("shape", ["openai", "text", "unwrapped"])
async def test_a_stream_of_nothing_but_the_end_mark_is_a_502(coordinator, fleet, excuse, shape):
    """S08: the same from the simulated worker."""
    excuse("unread", "whether a decode that failed has read what prefill left, nobody can tell, so nobody else may")
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(only_done=True))
    assert (await at.chat(stream=True)).status == 502


@pytest.mark.parametrize("shape", ["openai", "text", "unwrapped", "alone"])
async def test_an_error_after_tokens_is_relayed_and_counted_as_a_failure(coordinator, fleet, legs, shape):
    """S09: tokens, the worker's own error event and its end mark all reach the client; nothing is tried again."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(error_after=4))
    got = await at.chat("Count to 20.", stream=True)
    errors = [chunk["error"] for chunk in got.chunks if "error" in chunk]
    assert (got.status, len(errors), errors[0]["code"]) == (200, 1, 500)
    assert got.events[-1] == "[DONE]"
    assert len(legs(fleet.decode)) == 1
    assert await at.count("coordinator_requests_total", outcome="stream_broken") == 1
    assert await at.count("coordinator_requests_total", outcome="ok") == 0


EARLY_ENDS = {
    "a clean end": Fault(end_after=4),
    "a reset": Fault(die_after=4),
    "half an event and a reset": Fault(half_event_after=4),
}


@pytest.mark.parametrize("shape", ["openai", "text", "unwrapped", "alone"])
@pytest.mark.parametrize("fault", EARLY_ENDS.values(), ids=EARLY_ENDS)
async def test_a_stream_that_ends_early_is_broken_off(coordinator, fleet, shape, fault):
    """S11, S12: whole events, then an error event, then no last chunk: SDKs read a plain end as "finished"."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(fault)
    got = await at.chat("Count to 20.", stream=True)
    assert (got.status, got.whole, "[DONE]" in got.events) == (200, False, False)
    assert [("error" in chunk) for chunk in got.chunks] == [False] * (len(got.chunks) - 1) + [True]
    assert (got.chunks[-1]["error"]["code"], got.headers["X-Request-Id"] in got.chunks[-1]["error"]["message"]) == (
        502,
        True,
    )
    assert await at.count("coordinator_requests_total", outcome="stream_broken") == 1


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_half_an_event_is_never_relayed(says, scripted, shape):
    """S12: an error that is glued to half an event is garbage to every parser."""
    half = delta("never", shape)[:-9]
    at, _ = await says(scripted.sse(delta("a", shape), delta("b", shape), half, scripted.CUT), shape=shape)
    got = await at.chat(stream=True)
    assert (got.whole, got.text, b"nev" in got.raw) == (False, "ab", False)
    assert got.chunks[-1]["error"]["code"] == 502


async def test_half_an_event_before_a_clean_end_is_never_relayed_either(says, scripted):
    """S12: the same with a proper last chunk from the worker."""
    at, _ = await says(scripted.sse(delta("a"), b'data: {"choices":[{"index"'))
    got = await at.chat(stream=True)
    assert broke_off(got, delta("a"))["code"] == 502


async def test_a_finish_reason_without_an_end_mark_is_no_end(says, scripted):
    """S11: vLLM always sends the end mark, so a stream without it has been cut."""
    finish = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    at, _ = await says(scripted.sse(delta("a"), finish))
    got = await at.chat(stream=True)
    assert broke_off(got, delta("a") + finish)["type"] == "BadGatewayError"


async def test_an_end_mark_inside_the_models_text_ends_nothing(says, scripted):
    """S11: only a whole data line that equals the mark is the end."""
    at, _ = await says(scripted.sse(delta("data: [DONE]"), delta("[DONE]")))
    got = await at.chat(stream=True)
    assert (got.whole, got.text) == (False, "data: [DONE][DONE]")


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_an_event_over_the_cap_breaks_the_stream_off_without_a_traceback(says, scripted, caplog, shape):
    """S24: what came before stays, the event itself is not relayed, and memory has a limit."""
    large = b"data: " + b"x" * (16 * 2**20)
    at, _ = await says(scripted.sse(delta("a", shape), large, b"\n\n", DONE), shape=shape)
    got = await at.chat(stream=True)
    assert (got.whole, got.text, got.chunks[-1]["error"]["code"], len(got.raw) < 2**12) == (False, "a", 502, True)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_first_event_over_the_cap_is_a_502(says, scripted):
    """S24: nothing has been written yet."""
    at, _ = await says(scripted.sse(b"data: " + b"x" * (16 * 2**20), b"\n\n", DONE))
    assert (await at.chat(stream=True)).status == 502


@pytest.mark.parametrize("shape", ["openai", "alone"])
async def test_a_messages_stream_breaks_off_in_its_own_grammar(coordinator, fleet, shape):
    """S11: an Anthropic SDK understands ``event: error`` alone."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(end_after=4))
    body = {"model": "tiny", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    got = await at.post("/v1/messages", body)
    assert (got.status, got.whole) == (200, False)
    assert got.blocks[-1].startswith(b"event: error\ndata: ")
    assert (got.chunks[-1]["type"], got.chunks[-1]["error"]["type"]) == ("error", "api_error")


async def test_a_responses_stream_that_is_cut_ends_as_failed(coordinator, fleet):
    """S11: vLLM cuts this stream without a word when its engine fails."""
    at = await coordinator(fleet)
    fleet.decode.behave.next(Fault(die_after=4))
    got = await at.post("/v1/responses", {"model": "tiny", "stream": True, "input": "Count to 20."})
    assert (got.status, got.whole) == (200, False)
    assert "error" in got.chunks[-1]["type"] or got.chunks[-1]["type"] == "response.failed"


async def test_a_json_answer_to_a_client_that_asked_for_a_stream_is_a_502(says, scripted):
    """S31: one JSON body has no events, and an SDK would wait for them."""
    at, _ = await says(scripted.json({"choices": [{"index": 0, "message": {"content": "a"}}]}))
    got = await at.chat(stream=True)
    assert (got.status, got.error["code"]) == (502, 502)

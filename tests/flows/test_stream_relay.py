"""A stream in the client's own format: what the worker wrote is what the client reads, byte for byte and at once."""

import asyncio
import json

import pytest

from coordinator.sim import Fault

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


def delta(content, **more):
    choice = {"index": 0, "delta": {"content": content}, **more}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


async def test_a_character_that_is_cut_by_a_write_arrives_whole(says, scripted):
    """S01: the bytes are identical, and no replacement character was made of half a euro sign."""
    writes = [b'data: {"choices":[{"index":0,"delta":{"content":"\xe2\x82', b'\xac"}}]}\n\n', DONE]
    at, _ = await says(scripted.sse(*writes))
    got = await at.chat(stream=True)
    assert (got.raw, got.whole, got.text) == (b"".join(writes), True, "€")


async def test_a_stream_is_the_same_wherever_its_writes_end(says, scripted):
    """S02: one good stream, cut at every byte in turn."""
    stream = b": hello\n\n" + delta("Zo\u00eb ") + delta("b\u2028") + b'data: {"choices":[],"usage":null}\n\n' + DONE
    cuts = range(1, len(stream))
    at, _ = await says(*(scripted.sse(stream[:cut], stream[cut:]) for cut in cuts))
    for cut in cuts:
        got = await at.chat(stream=True)
        assert (got.status, got.raw, got.whole) == (200, stream, True), cut


@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"], ids=["CRLF", "CR", "LF"])
async def test_every_legal_line_end_is_understood_and_kept(says, scripted, end):
    """S03: the end mark is found, so the stream counts as whole, and its content as content."""
    stream = (delta("a") + delta("b") + DONE).replace(b"\n", end)
    at, _ = await says(scripted.sse(stream[:40], stream[40:]))
    got = await at.chat(stream=True)
    assert (got.raw, got.whole) == (stream, True)
    assert await at.count("coordinator_requests_total", outcome="ok") == 1
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 1


async def test_the_space_after_data_may_be_missing(says, scripted):
    """S05: relayed as it came, and understood: content counts as content, the end mark as the end."""
    stream = (delta("a") + DONE).replace(b"data: ", b"data:")
    at, _ = await says(scripted.sse(stream))
    got = await at.chat(stream=True)
    assert (got.raw, got.whole) == (stream, True)
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("shape", ["openai", "text", "derender", "alone"])
async def test_a_usage_chunk_that_was_asked_for_comes_once_and_before_the_end(coordinator, fleet, shape):
    """S15: its ``choices`` are empty, which is legal."""
    at = await coordinator(fleet, shape)
    got = await at.chat(stream=True, stream_options={"include_usage": True})
    assert [bool(chunk["choices"]) for chunk in got.chunks[-2:]] == [True, False]
    assert got.chunks[-1]["usage"]["completion_tokens"] == 10
    assert got.events[-1] == "[DONE]"
    assert await at.count("coordinator_tokens_total", kind="completion") == 10


@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_a_usage_chunk_that_only_we_asked_for_is_taken_out(coordinator, fleet, legs, shape):
    """S16: clients index ``choices[0]``; the numbers are for the metrics."""
    at = await coordinator(fleet, shape)
    got = await at.chat(stream=True)
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in got.chunks)
    assert await at.count("coordinator_tokens_total", kind="completion") == 10
    if shape == "text":
        assert legs(fleet.decode)[0].body["stream_options"] == {"include_usage": True}


async def test_a_client_that_asked_for_no_usage_is_sent_none_by_a_relayed_stream(coordinator, fleet, legs):
    """S16: a leg in the client's own format carries the client's own options, so there is nothing to take out."""
    at = await coordinator(fleet)
    got = await at.chat(stream=True)
    assert all(chunk["choices"] for chunk in got.chunks)
    assert "stream_options" not in legs(fleet.decode)[0].body


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_usage_in_every_chunk_reaches_the_client_and_the_last_one_counts(coordinator, fleet, legs, shape):
    """S17: ``continuous_usage_stats`` arrives at decode, its numbers at the client, and the metric has the total."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    at = await coordinator(fleet, shape)
    got = await at.chat("Count to 20.", stream=True, max_tokens=5, stream_options=options)
    assert legs(fleet.decode)[0].body["stream_options"] == options
    assert [chunk["usage"]["completion_tokens"] for chunk in got.chunks][-6:] == [1, 2, 3, 4, 5, 5]
    assert await at.count("coordinator_tokens_total", kind="completion") == 5


async def test_an_opening_chunk_is_an_event_and_no_token(says, scripted):
    """S19: it is relayed, and time to first token waits for text."""
    opening = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    finish = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    at, _ = await says(scripted.sse(opening, finish, DONE), scripted.sse(opening, delta("a"), finish, DONE))
    assert (await at.chat(stream=True)).raw == opening + finish + DONE
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 0
    await at.chat(stream=True)
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 1


async def test_tool_call_deltas_are_relayed_byte_for_byte(says, scripted):
    """S21: null content, and arguments in five pieces that agents join by index."""
    first = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "add", "arguments": ""}}
    deltas = [{"role": "assistant", "content": None, "tool_calls": [first]}]
    deltas += [
        {"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"', 'a":', " 1,", '"b":2', "}")
    ]
    events = [b"data: " + json.dumps({"choices": [{"index": 0, "delta": one}]}).encode() + b"\n\n" for one in deltas]
    at, _ = await says(scripted.sse(*events, DONE))
    assert (await at.chat(stream=True)).raw == b"".join(events) + DONE


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c"], ids=lambda odd: f"U+{ord(odd):04X}")
async def test_only_cr_and_lf_end_a_line(says, scripted, odd):
    """S23: what Python's ``splitlines`` also splits at is text of one event, raw in a JSON string."""
    event = f'data: {{"choices":[{{"index":0,"delta":{{"content":"a{odd}b"}}}}]}}\n\n'.encode()
    at, _ = await says(scripted.sse(event, delta("c"), DONE))
    got = await at.chat(stream=True)
    assert (got.raw, got.whole) == (event + delta("c") + DONE, True)


async def test_an_event_of_two_megabytes_is_relayed(says, scripted):
    """S24: twenty log probabilities a token, or a tool call with a file in it."""
    large = delta("x" * 2_000_000)
    at, _ = await says(scripted.sse(delta("a"), large, DONE))
    got = await at.chat(stream=True)
    assert (got.whole, got.raw == delta("a") + large + DONE) == (True, True)


@pytest.mark.parametrize("shape", ["openai", "text", "alone"])
@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/plain"])
async def test_a_stream_is_called_an_event_stream_whatever_the_worker_called_it(
    coordinator, fleet, shape, content_type
):
    """S31: SDKs look at the type."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(content_type=content_type))
    got = await at.chat(stream=True)
    assert (got.status, got.headers.getall("Content-Type"), got.events[-1]) == (200, [EVENT_STREAM], "[DONE]")


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_compresses_unasked_is_inflated(coordinator, fleet, legs, shape, stream):
    """S36: legs ask for ``identity``; if gzip comes all the same, the header that would say so is not passed on."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(gzip=True))
    got = await at.chat(stream=stream)
    assert (got.status, got.text) == (200, "Hello! How can I help you today?")
    assert "Content-Encoding" not in got.headers
    assert [leg.header("accept-encoding") for leg in legs(fleet.decode)] == ["identity"]


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_each_event_reaches_the_client_before_the_next_one_is_made(says, scripted, ask, shape):
    """S38: nothing is collected on the way; the worker writes each event only after the client has read the last."""

    def chunk(text):
        choice = {"index": 0, "text": text, "token_ids": [1], "finish_reason": "stop" if text == "3" else None}
        generated = b"data: " + json.dumps({"output_mode": "text", "choices": [choice]}).encode() + b"\n\n"
        return generated if shape == "text" else delta(text)

    gates = [asyncio.Event() for _ in "123"]
    at, _ = await says(
        scripted.sse(chunk("1"), gates[0], chunk("2"), gates[1], chunk("3"), gates[2], DONE), shape=shape
    )
    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        for gate, text in zip(gates, "123", strict=True):
            while text.encode() not in (event := await live.event()).partition(b'"content":')[2]:
                assert event  # the opening chunk of a rebuilt stream comes first
            gate.set()
        got = await live.rest()
    assert got.events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_may_send_its_head_long_before_its_first_event(says, scripted, ask, eventually, stream):
    """S39: the connection to it stays open while nothing comes."""
    gate = asyncio.Event()
    if stream:
        answer = scripted.sse(gate, delta("a"), DONE)
    else:
        head, body = scripted.json({"choices": []})[0].split(b"{", 1)
        answer = [head, gate, b"{" + body]
    at, decode = await says(answer)
    async with at.open(CHAT, ask(stream=stream)) as live:
        await eventually(lambda: decode.received)
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert decode.open
        gate.set()
        await live.head()
        got = await live.rest()
    assert (got.status, got.whole) == (200, True)


@pytest.mark.parametrize("shape", ["openai", "alone"])
async def test_a_messages_stream_keeps_its_event_lines_and_its_own_end(coordinator, fleet, shape):
    """S40: another grammar and another end mark: no ``[DONE]`` is added, one ``message_start`` stands first."""
    at = await coordinator(fleet, shape)
    body = {"model": "tiny", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    got = await at.post("/v1/messages", body)
    names = [block.split(b"\n")[0].decode() for block in got.blocks]
    assert (got.status, got.whole) == (200, True)
    assert (names[0], names.count("event: message_start"), names[-1]) == (
        "event: message_start",
        1,
        "event: message_stop",
    )
    assert all(name.startswith("event: ") for name in names)
    assert b"[DONE]" not in got.raw


async def test_a_responses_stream_keeps_its_event_lines(coordinator, fleet):
    """S40: every event has its name, and the numbers have no gap."""
    at = await coordinator(fleet)
    got = await at.post("/v1/responses", {"model": "tiny", "stream": True, "input": "Say hello."})
    assert [block.split(b"\n")[0].decode() for block in got.blocks] == [f"event: {one['type']}" for one in got.chunks]
    assert [one["sequence_number"] for one in got.chunks] == list(range(len(got.chunks)))
    assert got.chunks[-1]["type"] == "response.completed"

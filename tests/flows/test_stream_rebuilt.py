"""A stream that is rebuilt from the generate route's answers: the client reads its own API."""

import json
import re

import pytest

DONE = b"data: [DONE]\n\n"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
GENERATE_ONLY = {"request_id", "output_mode", "routed_experts", "sampling_mask", "mm_placeholders"}


def generated(text, **more):
    choice = {"index": 0, "text": text, "token_ids": [1], "finish_reason": None, "stop_reason": None, **more}
    chunk = {"request_id": "generate-tokens-r1", "usage": None, "output_mode": "text", "choices": [choice]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def keys(value):
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys(item)}
    return {key for item in value for key in keys(item)} if isinstance(value, list) else set()


async def test_a_rebuilt_stream_is_the_same_wherever_the_workers_writes_end(says, scripted):
    """S02: one good generate stream, cut at every fifth byte in turn; ids and times aside."""
    stream = generated("Zo\u00eb ") + generated("b", finish_reason="stop") + DONE
    cuts = range(0, len(stream), 5)
    at, _ = await says(*(scripted.sse(*filter(None, (stream[:cut], stream[cut:]))) for cut in cuts), shape="text")
    seen = set()
    for _cut in cuts:
        got = await at.chat(stream=True)
        seen.add(re.sub(rb'"id":"[^"]*"|"created":\d+', b"", got.raw))
        assert (got.status, got.whole) == (200, True)
    assert len(seen) == 1
    assert got.text == "Zoë b"


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\u0085"], ids=lambda odd: f"U+{ord(odd):04X}")
async def test_odd_line_separators_stay_in_the_text(says, scripted, odd):
    """S23: also where the text is taken apart and written anew."""
    at, _ = await says(scripted.sse(generated(f"a{odd}"), generated("b", finish_reason="stop"), DONE), shape="text")
    got = await at.chat(stream=True)
    assert (got.text, got.whole) == (f"a{odd}b", True)


async def test_a_stream_without_a_space_after_data_is_rebuilt_all_the_same(says, scripted):
    """S03, S05: CRLF and no space."""
    stream = (generated("a") + generated("b", finish_reason="stop") + DONE).replace(b"data: ", b"data:")
    at, _ = await says(scripted.sse(stream.replace(b"\n", b"\r\n")), shape="text")
    got = await at.chat(stream=True)
    assert (got.text, got.whole, got.events[-1]) == ("ab", True, "[DONE]")


async def test_text_that_was_held_back_comes_with_the_finish_and_without_ids(says, scripted):
    """S29: a stop string may delay text until after its tokens."""
    last = generated("END", token_ids=[], finish_reason="stop", stop_reason="###")
    at, _ = await says(scripted.sse(generated(""), generated("the "), last, DONE), shape="text")
    got = await at.chat(stream=True, stop=["###"])
    assert got.text == "the END"
    [finish] = [choice for chunk in got.chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", "###")


async def test_a_stop_string_cuts_the_text_and_is_named(coordinator, fleet):
    """S29: the same from the simulated worker, whose text lags its tokens as vLLM's does."""
    at = await coordinator(fleet, "text")
    got = await at.chat("Say stop in the middle.", stream=True, stop=["STOP and"])
    assert got.text == "This is before "
    assert [choice.get("stop_reason") for chunk in got.chunks for choice in chunk["choices"]][-1] == "STOP and"


@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_rebuilt_chunks_share_one_id_one_time_and_the_clients_model(coordinator, fleet, shape):
    """S33: generate's stream has none of them; the first delta of a choice has its role."""
    at = await coordinator(fleet, shape)
    got = await at.chat("Count to 20.", stream=True, max_tokens=20)
    heads = {(one["id"], one["object"], one["created"], one["model"]) for one in got.chunks}
    [(answer_id, kind, created, model)] = heads
    assert (answer_id.startswith("chatcmpl-"), kind, created > 1.7e9, model) == (
        True,
        "chat.completion.chunk",
        True,
        "tiny",
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in got.chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in got.chunks if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert not keys(got.chunks) & GENERATE_ONLY


async def test_a_derender_leg_is_unstreamed_and_its_answer_a_stream_all_the_same(coordinator, fleet, legs):
    """S32: vLLM refuses ``derender`` with ``stream``; the client gets role, content, finish, usage and the end mark."""
    at = await coordinator(fleet, "derender")
    got = await at.chat(stream=True, stream_options={"include_usage": True})
    [leg] = legs(fleet.decode)
    assert (leg.body["output_mode"], leg.body.get("stream", False), "stream_options" in leg.body) == (
        "derender",
        False,
        False,
    )
    assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert (got.text, got.whole, got.events[-1]) == ("Hello! How can I help you today?", True, "[DONE]")
    assert [chunk["choices"][0]["finish_reason"] for chunk in got.chunks[:-1]][-1] == "stop"
    assert (got.chunks[-1]["choices"], got.chunks[-1]["usage"]["completion_tokens"]) == ([], 10)
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_rebuilt_tool_calls_have_indexes_and_no_content(coordinator, fleet, stream):
    """S21, S32: ``content`` stays null, every call has its ``index``, and the finish says ``tool_calls``."""
    at = await coordinator(fleet, "derender")
    got = await at.chat("Compare the weather in Oslo and Rome.", tools=[WEATHER], stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in got.chunks]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert sorted({call["index"] for call in calls}) == [0, 1]
        arguments = ["".join(c["function"].get("arguments") or "" for c in calls if c["index"] == i) for i in (0, 1)]
        finish, content = choices[-1]["finish_reason"], got.text
    else:
        [choice] = got.body["choices"]
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        finish, content = choice["finish_reason"], choice["message"]["content"] or ""
    assert [json.loads(one) for one in arguments] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert (finish, content) == ("tool_calls", "")


async def test_an_unwrapped_derender_stream_is_one_frame_and_the_end_mark(coordinator, fleet):
    """S32: without ``wrap`` the generate answer is passed on, as the stream that was asked for."""
    at = await coordinator(fleet, "derender", steps={"decode": {"wrap": None}})
    got = await at.chat(stream=True)
    assert (len(got.blocks), got.events[-1], got.whole) == (2, "[DONE]", True)
    assert got.chunks[0]["choices"][0]["message"]["content"] == "Hello! How can I help you today?"
    assert got.chunks[0]["kv_transfer_params"] is None


async def test_an_unwrapped_text_stream_is_the_generate_stream(coordinator, fleet):
    """Without ``wrap`` the client sees what the worker sends, chunk by chunk."""
    at = await coordinator(fleet, "unwrapped")
    got = await at.chat(stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in got.chunks) == "Hello! How can I help you today?"
    assert {chunk["output_mode"] for chunk in got.chunks} == {"text"}


async def test_several_choices_are_rebuilt_side_by_side(coordinator, fleet):
    """S33: each choice has its own role, text and finish."""
    at = await coordinator(fleet, "text")
    got = await at.chat("Just say OK.", n=2, temperature=1.0, stream=True)
    choices = [choice for chunk in got.chunks for choice in chunk["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == "stop"
        assert "OK" in "".join(choice["delta"].get("content") or "" for choice in own)

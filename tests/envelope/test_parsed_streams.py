"""Parsed streams in each API, held against vLLM's own: what its parsers said, fed to our shapes, is what it sent.

A recorded stream of a server with parsers is taken apart into generate chunks that carry a ``delta``; rebuilt, they
have to be the recording again, byte for byte but for ids and times.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from envelope import chat, messages, responses
from envelope.errors import LegFailed, LegTimeout
from envelope.shape import Asked, Shape

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"
# Those of a server with parsers; an aborted stream and one that is refused are no chat streams of one kind.
CHATS = sorted(path.stem for path in (RECORDINGS / "chat").glob("chat_*.sse"))
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": [7], "delta": delta, **more}
    return event({"request_id": "g", "usage": None, "output_mode": "derender", "choices": [choice]})


def counted(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return event({"request_id": "g", "usage": usage, "output_mode": "derender", "choices": []})


def called(index: int, name: str | None = None, arguments: str | None = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    head = {} if name is None else {"id": f"call-{index}", "type": "function"}
    return {"content": None, "tool_calls": [{**head, "index": index, "function": function}]}


def frames(raw: bytes) -> list[str]:
    return raw.decode().removesuffix("\n\n").split("\n\n")


def asked_as(name: str, **rendered: Any) -> Asked:
    body = json.loads((RECORDINGS / f"{name}.json").read_text())["request"]["body"]
    return Asked(body, {"model": "tiny", "token_ids": [1] * 16, **rendered}, "a1", 1790000000)


def sent(shape: Shape, stream: bytes, size: int | None = None) -> bytes:
    size = size or len(stream)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    out = b"".join(shape.feed(piece) for piece in pieces)
    shape.close()
    return out


# --- chat ----------------------------------------------------------------------------------------------------------


def taken_apart(raw: bytes) -> bytes:
    """The generate stream behind a recorded chat stream, as a parser left it."""
    found = []
    for frame in frames(raw)[:-1]:
        native = json.loads(frame.removeprefix("data: "))
        if any("role" in choice["delta"] for choice in native["choices"]):
            continue
        choices = [{"stop_reason": None, **choice} for choice in native["choices"]]
        found.append(event({"request_id": "g", "usage": native.get("usage"), "choices": choices}))
    return b"".join(found) + DONE


def blanked(raw: bytes, body: dict[str, Any]) -> list[Any]:
    """The frames as lists of pairs, so that the order of keys counts, without what is random or not told."""
    text = re.sub(r'"(id|request_id)":"[^"]*"', r'"\1":"-"', raw.decode())
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r'(,"system_fingerprint":"[^"]*"|,"completion_tokens_details":(\{[^}]*\}|null))', "", text)
    text = re.sub(r'"prompt_(token_ids|text)":(\[[^]]*\]|"[^"]*"|null)', r'"prompt_\1":0', text)
    return [json.loads(frame[6:], object_pairs_hook=list) for frame in text.split("\n\n") if frame[6:7] == "{"]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_stream_is_rebuilt_as_vllm_sent_it(name: str) -> None:
    raw = (RECORDINGS / "chat" / f"{name}.sse").read_bytes()
    asked = asked_as(f"chat/{name}")
    prompt = next((u["prompt_tokens"] for f in frames(raw)[:-1] if (u := json.loads(f[6:]).get("usage"))), 16)
    asked = Asked(asked.body, {"model": "tiny", "token_ids": [1] * prompt}, "a1", 1790000000)
    ours = sent(chat.ParsedChunks(asked), taken_apart(raw))
    assert blanked(ours, asked.body) == blanked(raw, asked.body)
    assert ours.endswith(DONE)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_pieces_in_which_a_parsed_stream_comes_do_not_matter(size: int) -> None:
    raw = taken_apart((RECORDINGS / "chat" / "chat_tool_call_stream.sse").read_bytes())
    asked = asked_as("chat/chat_tool_call_stream")
    assert sent(chat.ParsedChunks(asked), raw, size) == sent(chat.ParsedChunks(asked), raw)


CHAT = Asked({"model": "tiny", "stream": True}, {"token_ids": [1] * 3}, "a1", 1790000000)


def test_a_chunk_of_which_the_parser_had_nothing_to_say_is_no_frame() -> None:
    shape = chat.ParsedChunks(CHAT)
    assert b'"role":"assistant"' in shape.feed(chunk(None))
    assert not shape.content_seen
    assert shape.feed(chunk(None)) == b""
    assert b'"delta":{"reasoning":"hm"}' in shape.feed(chunk({"reasoning": "hm"}))
    assert shape.content_seen


def test_a_chunk_of_which_the_parser_had_nothing_to_say_still_shows_token_ids_that_were_asked_for() -> None:
    shape = chat.ParsedChunks(Asked({"return_token_ids": True}, None, "a1", 0))
    shape.feed(chunk({"content": "x"}))
    assert b'"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[7]' in shape.feed(chunk(None))


def test_token_ids_that_would_tell_of_hidden_reasoning_are_not_shown() -> None:
    """S28: the parsing stage blanks them, and a chunk that then says nothing is none."""
    shape = chat.ParsedChunks(Asked({"return_token_ids": True, "include_reasoning": False}, None, "a1", 0))
    opening = chunk({"reasoning": ""}, token_ids=None)
    assert frames(shape.feed(opening)) and shape.feed(chunk(None, token_ids=None)) == b""
    shown = shape.feed(chunk({"content": "x"}, token_ids=None))
    assert b'"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":null' in shown


def test_a_finish_without_anything_said_has_an_empty_delta_and_its_reason() -> None:
    """S29: held-back text that parses to nothing, and the finish behind it, are one last chunk."""
    ours = sent(chat.ParsedChunks(CHAT), chunk({"content": "a"}) + chunk(None, "stop", stop_reason="###") + DONE)
    last = json.loads(frames(ours)[-2].removeprefix("data: "))["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", "###")


def test_choices_that_interleave_keep_apart() -> None:
    asked = Asked({"n": 2}, {"sampling_params": {"n": 2}}, "a1", 0)
    stream = [chunk({"reasoning": "a"}, index=0), chunk({"content": "b"}, index=1), chunk({"content": "c"}, index=0),
              chunk({}, "stop", index=1), chunk({}, "length", index=0)]  # fmt: skip
    raw = sent(chat.ParsedChunks(asked), b"".join([*stream, DONE]))
    ours = [json.loads(frame[6:])["choices"][0] for frame in frames(raw)[:-1]]
    said = [(one["index"], one["delta"]) for one in ours if "role" not in one["delta"]]
    assert said == [(0, {"reasoning": "a"}), (1, {"content": "b"}), (0, {"content": "c"}), (1, {}), (0, {})]
    assert [one["finish_reason"] for one in ours[-2:]] == ["stop", "length"]


@pytest.mark.parametrize("wrong", [b'data: {"choices":[{"index":0}]}\n\n', b'data: {"choices":[{"delta":{}}]}\n\n'])
@pytest.mark.parametrize("shape", [chat.ParsedChunks, responses.ParsedChunks, messages.ParsedChunks])
def test_a_chunk_without_a_delta_is_a_failed_leg(shape: Any, wrong: bytes) -> None:
    if b"delta" in wrong and shape is not chat.ParsedChunks:
        return  # the other APIs have one choice, whatever its index
    with pytest.raises(LegFailed):
        shape(CHAT).feed(wrong)


# --- responses -----------------------------------------------------------------------------------------------------


def taken_apart_responses(raw: bytes) -> bytes:
    """The generate stream behind a recorded responses stream, as a parser left it."""
    found, calls = [], -1
    for frame in frames(raw):
        native = json.loads(frame.split("\ndata: ", 1)[1])
        match native["type"]:
            case "response.output_text.delta":
                found.append(chunk({"content": native["delta"]}))
            case "response.reasoning_text.delta":
                found.append(chunk({"reasoning": native["delta"]}))
            case "response.output_item.added" if native["item"]["type"] == "function_call":
                calls += 1
                found.append(chunk(called(calls, native["item"]["name"])))
            case "response.function_call_arguments.delta":
                found.append(chunk(called(calls, None, native["delta"])))
            case "response.completed" | "response.incomplete":
                finish = "length" if native["type"].endswith("incomplete") else "stop"
                usage = native["response"]["usage"]
                found += [chunk(None, finish), counted(usage["input_tokens"], usage["output_tokens"])]
    return b"".join([*found, DONE])


def blanked_responses(raw: bytes) -> str:
    text = re.sub(r'"((?:item_|call_)?id)":"[^"]*"', r'"\1":"-"', raw.decode())
    return re.sub(r'"(created_at|cached_tokens|reasoning_tokens)":\d+', r'"\1":0', text)


@pytest.mark.parametrize("name", sorted(path.stem for path in (RECORDINGS / "responses").glob("*.sse")))
def test_a_responses_stream_is_rebuilt_as_vllm_sent_it(name: str) -> None:
    raw = (RECORDINGS / "responses" / f"{name}.sse").read_bytes()
    native = json.loads(frames(raw)[0].split("\ndata: ", 1)[1])["response"]
    told = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    sampling = {"max_tokens": native["max_output_tokens"]} | {name: native[name] for name in told}
    asked = asked_as(f"responses/{name}", sampling_params=sampling)
    ours = sent(responses.ParsedChunks(asked), taken_apart_responses(raw))
    assert blanked_responses(ours) == blanked_responses(raw)


def told(raw: bytes) -> list[dict[str, Any]]:
    found = [json.loads(frame.split("\ndata: ", 1)[1]) for frame in frames(raw)]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


TURN = [chunk({"reasoning": "hm"}), chunk({"content": "Let me see"}), chunk(called(0, "f", '{"a"')),
        chunk(called(0, None, ":1}")), chunk(called(1, "f", "{}")), chunk({"content": "and"}), chunk(None, "stop"),
        counted(3, 7), DONE]  # fmt: skip


def test_items_close_when_another_begins_and_each_has_an_id_of_its_own() -> None:
    events = told(sent(responses.ParsedChunks(CHAT), b"".join(TURN)))
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item.get("arguments") for item in done[2:4]] == ['{"a":1}', "{}"]
    assert len({item["id"] for item in done}) == 5
    assert events[-1]["response"]["output"] == done
    added = [one["item"]["id"] for one in events if one["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]


def test_a_custom_tool_s_input_comes_whole() -> None:
    asked = Asked({"tools": [{"type": "custom", "name": "sh"}]}, {"token_ids": [1]}, "a1", 0)
    stream = [chunk(called(0, "sh", '{"input": "l')), chunk(called(0, None, 's"}')), chunk(None, "stop"), DONE]
    events = told(sent(responses.ParsedChunks(asked), b"".join(stream)))
    deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["ls"]
    assert events[-1]["response"]["output"][0]["input"] == "ls"


def test_a_responses_stream_that_fails_tells_what_had_been_said() -> None:
    shape = responses.ParsedChunks(CHAT)
    began = shape.feed(b"".join(TURN[:3]))
    events = told(began + shape.fail(LegTimeout("decode", "late"), "r1"))
    assert [one["type"] for one in events[-2:]] == ["error", "response.failed"]
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "incomplete")]  # fmt: skip


# --- messages ------------------------------------------------------------------------------------------------------


def taken_apart_messages(raw: bytes) -> bytes:
    """The generate stream behind a recorded messages stream, as a parser left it."""
    found, calls, stop = [], -1, None
    for frame in frames(raw):
        native = json.loads(frame.split("\ndata: ", 1)[1])
        delta = native.get("delta") or {}
        if native["type"] == "content_block_start" and native["content_block"]["type"] == "tool_use":
            calls += 1
            found.append(chunk(called(calls, native["content_block"]["name"])))
        elif native["type"] == "message_delta":
            stop = delta["stop_sequence"]
            finish = {"max_tokens": "length", "tool_use": "tool_calls"}.get(delta["stop_reason"], "stop")
            usage = native["usage"]
            found += [chunk(None, finish, stop_reason=stop), counted(usage["input_tokens"], usage["output_tokens"])]
        elif "text" in delta:
            found.append(chunk({"content": delta["text"]}))
        elif "thinking" in delta:
            found.append(chunk({"reasoning": delta["thinking"]}))
        elif "partial_json" in delta:
            found.append(chunk(called(calls, None, delta["partial_json"])))
    return b"".join([*found, DONE])


@pytest.mark.parametrize("name", sorted(path.stem for path in (RECORDINGS / "messages").glob("*.sse")))
def test_a_messages_stream_is_rebuilt_as_vllm_sent_it(name: str) -> None:
    raw = (RECORDINGS / "messages" / f"{name}.sse").read_bytes()
    prompt = json.loads(frames(raw)[0].split("\ndata: ", 1)[1])["message"]["usage"]["input_tokens"]
    ours = sent(messages.ParsedChunks(asked_as(f"messages/{name}", token_ids=[1] * prompt)), taken_apart_messages(raw))
    blank = re.compile(rb'"(id|signature)":"[^"]*"')
    assert blank.sub(b"", ours) == blank.sub(b"", raw)


def blocks(raw: bytes) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for frame in frames(raw):
        native = json.loads(frame.split("\ndata: ", 1)[1])
        if native["type"] == "content_block_start":
            assert native["index"] == len(found)
            found.append((native["content_block"]["type"], ""))
        elif native["type"] == "content_block_delta" and native["delta"]["type"] != "signature_delta":
            assert native["index"] == len(found) - 1
            kind, text = found[-1]
            *_, piece = native["delta"].values()
            found[-1] = (kind, text + piece)
    return found


def test_text_inside_a_call_waits_for_the_call_s_end() -> None:
    """As vLLM's converter has it: the input of a tool_use block is never cut in two by text."""
    stream = [*TURN[:3], chunk({"content": "oh"}), *TURN[3:]]
    assert blocks(sent(messages.ParsedChunks(CHAT), b"".join(stream))) == [
        ("thinking", "hm"), ("text", "Let me see"), ("tool_use", '{"a":1}'), ("text", "oh"), ("tool_use", "{}"),
        ("text", "and")]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "finish", "reason"),
    [
        ("{}", "stop", "tool_use"),
        ('{"a', "length", "max_tokens"),
        ('{"a', "stop", "stop_sequence"),
    ],
)
def test_a_call_that_a_stop_string_cut_short_is_not_to_be_run(last: str, finish: str, reason: str) -> None:
    stop = "###" if reason == "stop_sequence" else None
    stream = [chunk(called(0, "f", last)), chunk(None, finish, stop_reason=stop), DONE]
    ours = sent(messages.ParsedChunks(CHAT), b"".join(stream))
    assert f'"stop_reason":"{reason}"' in ours.decode()


def test_a_messages_stream_that_fails_closes_its_block_first() -> None:
    shape = messages.ParsedChunks(CHAT)
    ours = shape.feed(TURN[0]) + shape.fail(LegTimeout("decode", "late"), "r1")
    kinds = [frame.split("\n")[0] for frame in frames(ours)]
    assert kinds[-3:] == ["event: content_block_delta", "event: content_block_stop", "event: error"]

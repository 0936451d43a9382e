"""Rebuilt chat answers equal vLLM's own, field for field and in the order of its keys."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from envelope import chat
from envelope.errors import LegFailed
from envelope.shape import Asked

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"
NEW, OLD = "vllm-0.33.0", "vllm-0.32.0"

# What vLLM's own answer has and generate's does not tell, or what is random.
UNAVAILABLE = {
    "id": "made of each leg's own request id",
    "created": "the time of each recording",
    "system_fingerprint": "a hash of the server's configuration; generate does not send it",
    "prompt_text": "return_prompt_text is not a field of generate",
    "completion_tokens_details": "reasoning tokens are counted on the chat route alone",
    "tool_calls.id": "random",
}

# (vLLM's own answer, the tokens-in answer)
DERENDERED = [
    ("chat/chat_plain", "generate/generate_derender"),
    ("chat/chat_logprobs", "generate/generate_derender_logprobs"),
    ("chat/chat_logprobs_sampled", "generate/generate_derender_logprobs_sampled"),
    ("chat/chat_n2_logprobs_top0", "generate/generate_derender_n2_logprobs_top0"),
    ("chat/chat_reasoning", "generate/generate_derender_reasoning"),
    ("chat/chat_tool_call", "generate/generate_derender_tool_call"),
    ("chat/chat_two_tool_calls", "generate/generate_derender_two_tool_calls"),
    ("chat/chat_tool_choice_required", "generate/generate_derender_tool_choice_required"),
    ("chat/chat_tool_choice_named", "generate/generate_derender_tool_choice_named"),
    ("chat/chat_tool_call_truncated", "generate/generate_derender_tool_call_truncated"),
    ("no_parser/chat_plain", "no_parser/generate_derender_no_parse_context"),
]
TEXT = [
    ("no_parser/chat_plain", "generate/generate_text"),
    ("chat/chat_logprobs_sampled", "generate/generate_text_logprobs_sampled"),
    ("chat/chat_n2", "generate/generate_text_n2"),
]
# That server has a reasoning parser, which put into `reasoning` what text mode leaves in the content.
TEXT_OF_A_REASONING_SERVER = [
    (NEW, "chat/chat_plain", "generate/generate_text"),
    (NEW, "chat/chat_logprobs", "generate/generate_text_logprobs"),
    (OLD, "chat_plain", "generate_text"),
]


def recorded(name: str, version: str = NEW) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDINGS / version / f"{name}.json").read_text())
    return found


def reply_of(name: str, version: str = NEW) -> dict[str, Any]:
    body: dict[str, Any] = recorded(name, version)["response"]["body"]
    return body


def stream_of(name: str, version: str = NEW) -> bytes:
    return (RECORDINGS / version / f"{name}.sse").read_bytes()


def asked(body: dict[str, Any] | None = None, rendered: dict[str, Any] | None = None) -> Asked:
    return Asked(body={"model": "tiny", **(body or {})}, rendered=rendered, leg_id="leg-1", created=1790000000)


def asked_as(native: str, version: str = NEW) -> Asked:
    return asked(recorded(native, version)["request"]["body"])


def events(raw: bytes) -> list[Any]:
    """The chunks of a stream, whose end mark is checked and left out."""
    frames = raw.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(one.removeprefix("data: ")) for one in frames[:-2]]


def comparable(answer: dict[str, Any]) -> str:
    """An answer or chunk as text, so that the order of keys counts, with the unavailable blanked."""
    answer = copy.deepcopy(answer)
    for key in ("id", "created", "prompt_text"):
        if key in answer:
            answer[key] = "-"
    if answer["object"] == "chat.completion":
        answer["system_fingerprint"] = None
    else:
        answer.pop("system_fingerprint", None)
    (answer.get("usage") or {}).pop("completion_tokens_details", None)
    for choice in answer["choices"]:
        for call in (choice.get("message") or choice["delta"]).get("tool_calls") or ():
            call["id"] = "-"
    return json.dumps(answer, indent=1)


def rebuilt(shape: chat.Chunks, *parts: bytes) -> bytes:
    out = b"".join([shape.feed(part) for part in parts])
    shape.close()
    return out


def ev(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str = "", token_ids: tuple[int, ...] = (), finish: str | None = None, **more: Any) -> Any:
    """A generate chunk in text mode, as vLLM sends it."""
    choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": list(token_ids)}
    choice |= {"routed_experts": None, "sampling_mask": None, "weight_versions": None, "text": text, "logprobs": None}
    top = {key: more.pop(key) for key in ("usage", "metrics") if key in more}
    return {"request_id": "generate-tokens-r1", "usage": None, "output_mode": "text", "choices": [choice | more]} | top


DONE = b"data: [DONE]\n\n"


class TestWhole:
    @pytest.mark.parametrize(("native", "generated"), DERENDERED + TEXT)
    def test_equals_vllms_own_answer(self, native: str, generated: str) -> None:
        answer = chat.whole(reply_of(generated), asked_as(native))
        assert comparable(answer) == comparable(reply_of(native))
        ChatCompletion.model_validate(answer)

    @pytest.mark.parametrize(("version", "native", "generated"), TEXT_OF_A_REASONING_SERVER)
    def test_text_leaves_reasoning_in_the_content(self, version: str, native: str, generated: str) -> None:
        answer = chat.whole(reply_of(generated, version), asked_as(native, version))
        want = reply_of(native, version)
        message = want["choices"][0]["message"]
        message["content"], message["reasoning"] = message["reasoning"] + (message["content"] or ""), None
        if version == OLD:
            want["choices"][0]["weight_versions"] = None  # new in 0.33, whose envelope this is
        assert comparable(answer) == comparable(want)

    def test_the_reply_is_not_changed(self) -> None:
        for name in ("generate/generate_text_logprobs_sampled", "generate/generate_derender_tool_call"):
            reply = reply_of(name)
            before = copy.deepcopy(reply)
            chat.whole(reply, asked({"logprobs": True, "echo": True, "messages": [{"role": "user", "content": "x"}]}))
            assert reply == before

    def test_nothing_of_the_tokens_in_route_leaks(self) -> None:
        reply = {**reply_of("generate/generate_derender_tool_call"), "kv_transfer_params": {"remote_host": "10.0.0.1"}}
        reply |= {"ec_transfer_params": {"h": {}}, "mm_placeholders": {"image": []}}
        reply["choices"][0]["sampling_mask"] = [1]
        answer = chat.whole(reply, asked())
        assert list(answer) == list(reply_of("chat/chat_plain"))
        assert list(answer["choices"][0]) == list(reply_of("chat/chat_plain")["choices"][0])
        assert answer["kv_transfer_params"] is answer["ec_transfer_params"] is None
        assert answer["choices"][0]["token_ids"] is answer["choices"][0]["weight_versions"] is None

    def test_token_ids_and_weight_versions_come_when_asked_for(self) -> None:
        reply = reply_of("generate/generate_derender")
        answer = chat.whole(
            reply, asked({"return_token_ids": True, "return_weight_versions": True}, {"token_ids": [1, 2]})
        )
        assert answer["choices"][0]["token_ids"] == reply["choices"][0]["token_ids"]
        assert answer["choices"][0]["weight_versions"] == reply["choices"][0]["weight_versions"]
        assert answer["prompt_token_ids"] == [1, 2]
        told = {**reply, "prompt_token_ids": [3]}
        assert chat.whole(told, asked({"return_token_ids": True}, {"token_ids": [1, 2]}))["prompt_token_ids"] == [3]

    @pytest.mark.parametrize(
        ("request_id", "id"),
        [
            ("generate-tokens-chatcmpl-a1", "chatcmpl-a1"),
            ("generate-tokens-a1", "chatcmpl-a1"),
            ("chatcmpl-a1", "chatcmpl-a1"),
            ("a1", "chatcmpl-a1"),
            ("", "chatcmpl-leg-1"),
            (None, "chatcmpl-leg-1"),
        ],
    )
    def test_id(self, request_id: str | None, id: str) -> None:
        assert chat.whole({**reply_of("generate/generate_text"), "request_id": request_id}, asked())["id"] == id

    def test_a_reply_of_an_older_worker_lacks_keys(self) -> None:
        reply = {"choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "stop"}]}
        answer = chat.whole(reply, asked(rendered={"token_ids": [7, 8, 9]}))
        assert (answer["id"], answer["model"], answer["created"]) == ("chatcmpl-leg-1", "tiny", 1790000000)
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["usage"]["total_tokens"] == 5
        assert list(answer["choices"][0]) == list(reply_of("chat/chat_plain")["choices"][0])

    @pytest.mark.parametrize("choice", [{}, {"token_ids": [1]}, {"text": None}, {"message": "a"}])
    def test_a_choice_without_text_or_message_is_a_failed_leg(self, choice: dict[str, Any]) -> None:
        with pytest.raises(LegFailed, match="neither text nor message"):
            chat.whole({"choices": [choice]}, asked())

    @pytest.mark.parametrize("choices", [None, [], "x", [3]])
    def test_no_choices_are_a_failed_leg(self, choices: Any) -> None:
        with pytest.raises(LegFailed, match="no choices"):
            chat.whole({"choices": choices}, asked())

    @pytest.mark.parametrize(
        ("reason", "tool_choice", "shown"),
        [
            ("stop", "auto", "tool_calls"),
            ("tool_calls", "auto", "tool_calls"),
            ("length", "auto", "length"),
            ("abort", "required", "abort"),
            ("stop", {"type": "function", "function": {"name": "f"}}, "stop"),
        ],
    )
    def test_finish_reason_with_tool_calls(self, reason: str, tool_choice: Any, shown: str) -> None:
        reply = reply_of("generate/generate_derender_tool_call")
        reply["choices"][0]["finish_reason"] = reason
        answer = chat.whole(reply, asked({"tool_choice": tool_choice}))
        assert answer["choices"][0]["finish_reason"] == shown

    def test_an_empty_list_of_tool_calls_is_absent(self) -> None:
        reply = reply_of("generate/generate_derender")
        reply["choices"][0]["message"]["tool_calls"] = []
        choice = chat.whole(reply, asked())["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "length"

    @pytest.mark.parametrize(("k", "kept"), [(2, 2), (1, 1), (0, 0), (None, 0), (-1, 3)])
    def test_top_logprobs_are_cut_as_chat_cuts_them(self, k: int | None, kept: int) -> None:
        """Text mode sends all: here 3, as the sampled token is outside the top 2."""
        reply = reply_of("generate/generate_text_logprobs_sampled")
        answer = chat.whole(reply, asked({"logprobs": True, "top_logprobs": k}))
        assert {len(one["top_logprobs"]) for one in answer["choices"][0]["logprobs"]["content"]} == {kept}

    def test_logprobs_that_the_client_did_not_ask_for_are_null(self) -> None:
        reply = reply_of("generate/generate_text_logprobs")
        assert chat.whole(reply, asked({"top_logprobs": 2}))["choices"][0]["logprobs"] is None
        named = chat.whole(reply, asked({"logprobs": True, "logprob_token_ids": [5]}))["choices"][0]
        assert len(named["logprobs"]["content"][0]["top_logprobs"]) == 2

    @pytest.mark.parametrize(
        ("last", "options", "role", "content"),
        [
            (("user", "Q"), {"echo": True}, "assistant", "A"),
            (("user", "Q"), {"echo": True, "add_generation_prompt": False}, "user", "QA"),
            (("assistant", "Q"), {"echo": True}, "assistant", "QA"),
            (("assistant", [{"text": "Q"}, {"text": "R"}]), {"echo": True}, "assistant", "Q\nRA"),
            (("assistant", None), {"echo": True}, "assistant", "A"),
            (("tool", "Q"), {"add_generation_prompt": False}, "tool", "A"),
        ],
    )
    def test_role_and_echo(self, last: tuple[str, Any], options: dict[str, Any], role: str, content: str) -> None:
        body = {"messages": [{"role": last[0], "content": last[1]}], **options}
        derendered = {"message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}
        for choice in ({"text": "A", "finish_reason": "stop"}, derendered):
            message = chat.whole({"choices": [choice]}, asked(body))["choices"][0]["message"]
            assert (message["role"], message["content"]) == (role, content)
        out = rebuilt(chat.Chunks(asked(body)), ev(chunk("A", (1,), "stop")), DONE)
        deltas = [one["choices"][0]["delta"] for one in events(out)]
        assert deltas[0]["role"] == role
        assert "".join(delta["content"] for delta in deltas) == content


class TestChunks:
    def test_equals_the_stream_of_a_server_without_parsers(self) -> None:
        native = events(stream_of("no_parser/chat_plain_stream"))
        shape = chat.Chunks(asked_as("no_parser/chat_plain_stream"))
        out = rebuilt(shape, stream_of("generate/generate_text_stream_usage"))
        assert [comparable(one) for one in events(out)] == [comparable(one) for one in native]

    @pytest.mark.parametrize(
        ("native", "generated"),
        [
            ("chat/chat_plain_stream", "generate/generate_text_stream"),
            ("chat/chat_plain_stream_usage", "generate/generate_text_stream_usage"),
            ("chat/chat_plain_stream_continuous_usage", "generate/generate_text_stream_continuous_usage"),
            ("chat/chat_logprobs_stream", "generate/generate_text_stream_logprobs"),
            ("chat/chat_return_token_ids_stream", "generate/generate_text_stream_return_token_ids"),
            ("chat/chat_stop_string_stream", "generate/generate_text_stream_stop_string"),
        ],
    )
    def test_equals_a_parser_servers_stream_but_for_what_its_parser_renames(self, native: str, generated: str) -> None:
        out = rebuilt(chat.Chunks(asked_as(native)), stream_of(generated))
        want = events(stream_of(native))
        for one in want:
            for choice in one["choices"]:
                delta = choice["delta"]
                if "reasoning" in delta:
                    choice["delta"] = {"content": delta["reasoning"]}
                elif not delta:
                    choice["delta"] = {"content": ""}  # without a parser a finish chunk always has its content
        assert [comparable(one) for one in events(out)] == [comparable(one) for one in want]

    def test_choices_interleave_and_each_equals_vllms(self) -> None:
        """How the choices interleave is the engine's timing; per choice, chunks and their order are the same."""
        shape = chat.Chunks(asked_as("chat/chat_n2_stream"))
        out = events(rebuilt(shape, stream_of("generate/generate_text_stream_n2")))
        native = events(stream_of("chat/chat_n2_stream"))
        for index in (0, 1):
            ours, theirs = (
                [comparable(one) for one in chunks if one["choices"][0]["index"] == index] for chunks in (out, native)
            )
            assert ours == theirs
        assert [one["choices"][0]["index"] for one in out[:2]] == [0, 1]

    @pytest.mark.parametrize("name", ["tool_call", "reasoning"])
    def test_markup_that_no_parser_takes_out_stays_in_the_content(self, name: str) -> None:
        raw = stream_of(f"generate/generate_text_stream_{name}")
        text = "".join(one["choices"][0]["text"] for one in events(raw))
        out = events(rebuilt(chat.Chunks(asked()), raw))
        assert "".join(one["choices"][0]["delta"]["content"] for one in out) == text
        assert out[-1]["choices"][0]["finish_reason"] == "stop"

    def test_a_stream_of_the_release_before(self) -> None:
        shape = chat.Chunks(asked({"stream_options": {"include_usage": True}}))
        out = events(rebuilt(shape, stream_of("generate_text_stream", OLD)))
        native = events(stream_of("chat_plain_stream", OLD))
        assert len(out) == len(native)
        assert out[-1]["usage"] == {"prompt_tokens": 28, "total_tokens": 36, "completion_tokens": 8}
        assert [one["choices"][0]["delta"] for one in out[:-1]] == [
            {"content": delta["reasoning"]} if "reasoning" in (delta := one["choices"][0]["delta"]) else delta
            for one in native[:-1]
        ]

    def test_an_aborted_stream_ends_with_abort(self) -> None:
        shape = chat.Chunks(asked())
        out = events(rebuilt(shape, stream_of("abort/abort_generate_text_stream")))
        assert out[-1]["choices"][0]["finish_reason"] == "abort"

    @pytest.mark.parametrize("name", ["n2", "logprobs", "usage"])
    def test_the_pieces_do_not_matter(self, name: str) -> None:
        raw = stream_of(f"generate/generate_text_stream_{name}")
        request = asked({"n": 2 if "n2" in name else 1, "logprobs": True, "stream_options": {"include_usage": True}})
        want = rebuilt(chat.Chunks(request), raw)
        assert rebuilt(chat.Chunks(request), *(raw[i : i + 1] for i in range(len(raw)))) == want
        for cut in range(0, len(raw), 7):
            assert rebuilt(chat.Chunks(request), raw[:cut], raw[cut:]) == want
        assert rebuilt(chat.Chunks(request), raw.replace(b"\n", b"\r\n")) == want
        assert rebuilt(chat.Chunks(request), raw.replace(b"\n", b"\r")) == want
        assert rebuilt(chat.Chunks(request), b"\xef\xbb\xbf" + raw.replace(b"data: ", b"data:")) == want

    @given(st.lists(st.text(max_size=6), min_size=1, max_size=8), st.lists(st.integers(0, 2000), max_size=8))
    def test_any_text_in_any_pieces_comes_out_as_it_was(self, texts: list[str], cuts: list[int]) -> None:
        raw = b"".join(ev(chunk(text, (1,))) for text in texts) + ev(chunk("", (2,), "stop")) + DONE
        edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
        shape = chat.Chunks(asked())
        out = events(rebuilt(shape, *(raw[a:b] for a, b in pairwise(edges))))
        assert "".join(one["choices"][0]["delta"]["content"] for one in out) == "".join(texts)
        assert shape.content_seen is any(texts)
        assert len({(one["id"], one["created"], one["model"]) for one in out}) == 1

    def test_held_back_text_gives_no_chunk_but_the_role_is_sent(self) -> None:
        shape = chat.Chunks(asked())
        assert [one["choices"][0]["delta"] for one in events(shape.feed(ev(chunk("", (1,)))) + DONE)] == [
            {"role": "assistant", "content": ""}
        ]
        assert shape.feed(ev(chunk("", (2,)))) == b""
        assert not shape.content_seen
        assert b'"content":"ab"' in shape.feed(ev(chunk("ab", ())))
        assert shape.content_seen
        assert shape.feed(ev(chunk("", (3,)))) == b""
        assert b'"content":"c"' in shape.feed(ev(chunk("c", (4,))))

    def test_held_back_text_shows_the_tokens_that_were_asked_for(self) -> None:
        shape = chat.Chunks(asked({"return_token_ids": True}))
        out = events(rebuilt(shape, ev(chunk("", (1,))), ev(chunk("ab", (2, 3))), ev(chunk("", (), "stop")), DONE))
        assert [one["choices"][0]["token_ids"] for one in out[1:]] == [[1], [2, 3], []]
        assert [one["choices"][0]["delta"] for one in out[1:]] == [{"content": ""}, {"content": "ab"}, {"content": ""}]

    def test_the_last_text_and_the_finish_come_in_one_chunk(self) -> None:
        out = events(rebuilt(chat.Chunks(asked()), ev(chunk("END", (), "stop", stop_reason="###")), DONE))
        assert out[-1]["choices"] == [
            {
                "index": 0,
                "delta": {"content": "END"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "###",
                "token_ids": None,
                "weight_versions": None,
            }
        ]

    def test_a_finish_without_any_output_has_an_empty_delta(self) -> None:
        out = events(rebuilt(chat.Chunks(asked()), ev(chunk()), ev(chunk(finish="abort")), DONE))
        assert [one["choices"][0]["delta"] for one in out] == [{"role": "assistant", "content": ""}, {}]

    def test_weight_versions_and_stop_token_come_on_the_finish_chunk_when_asked_for(self) -> None:
        versions = [{"version": "default", "start": 0, "end": 1}]
        last = ev(chunk("a", (1,), "stop", stop_reason=7, weight_versions=versions))
        choice = events(rebuilt(chat.Chunks(asked({"return_weight_versions": True})), last, DONE))[-1]["choices"][0]
        assert (choice["weight_versions"], choice["stop_reason"]) == (versions, 7)
        assert events(rebuilt(chat.Chunks(asked()), last, DONE))[-1]["choices"][0]["weight_versions"] is None

    def test_usage_that_the_client_did_not_ask_for_is_counted_and_dropped(self) -> None:
        shape = chat.Chunks(asked())
        out = rebuilt(shape, stream_of("generate/generate_text_stream_usage"))
        assert b"usage" not in out
        assert shape.usage == {"prompt_tokens": 28, "total_tokens": 36, "completion_tokens": 8}

    def test_continuous_usage_counts_on_the_role_chunk_too(self) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        usage = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": None}
        shape = chat.Chunks(asked({"stream_options": options}))
        out = events(rebuilt(shape, ev(chunk("a", (1,), "stop", usage=usage)), DONE))
        assert [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in out] == [(3, 0), (3, 1)]
        assert list(out[1]["usage"])[-1] == "completion_tokens_details"
        alone = chat.Chunks(asked({"stream_options": {"continuous_usage_stats": True}}))
        without = events(rebuilt(alone, ev(chunk("a", (1,), "stop", usage=usage)), DONE))
        assert all("usage" not in one for one in without)

    def test_speculative_decoding_figures_ride_on_the_usage_chunk(self) -> None:
        shape = chat.Chunks(asked({"stream_options": {"include_usage": True}}))
        counted = {"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": None}, "metrics": {"x": 1}}
        out = events(rebuilt(shape, ev(chunk("a", (1,), "stop")), ev(counted), DONE))
        assert out[-1]["metrics"] == {"x": 1}
        assert out[-1]["usage"] == {"prompt_tokens": 1}

    def test_an_error_event_is_relayed_and_marks_the_stream(self) -> None:
        error = stream_of("kv_load_failure/generate_text_stream")
        shape = chat.Chunks(asked())
        assert rebuilt(shape, ev(chunk("a", (1,))), error).endswith(error)
        assert shape.error == "Internal server error"
        unended = chat.Chunks(asked())
        assert rebuilt(unended, error.removesuffix(DONE)) == error.removesuffix(DONE)

    @pytest.mark.parametrize(
        ("n", "raw"),
        [
            (1, b""),
            (1, DONE),
            (1, ev(chunk("a", (1,))) + DONE),
            (1, ev(chunk("a", (1,), "stop"))),
            (1, ev(chunk("a", (1,), "stop")) + b"data: [DO"),
            (1, ev(chunk("a", (1,), "stop")) + DONE + b"data: x"),
            (2, ev(chunk("a", (1,), "stop")) + DONE),
        ],
    )
    def test_a_stream_that_lacks_its_end_or_a_finish_is_cut(self, n: int, raw: bytes) -> None:
        shape = chat.Chunks(asked({"n": n}))
        out = shape.feed(raw)
        assert out.endswith(b"[DONE]\n\n") is (DONE + b"data" in raw)
        with pytest.raises(LegFailed, match="ended early"):
            shape.close()

    def test_a_text_that_is_none_is_a_failed_leg_wherever_it_stands(self) -> None:
        shape = chat.Chunks(asked())
        shape.feed(ev(chunk("a", (1,))) + ev(chunk("b", (2,))))
        for odd in (5, ["a"], {"a": 1}):
            with pytest.raises(LegFailed, match="the text is of type"):
                shape.feed(ev(chunk(odd, (3,))))

    @pytest.mark.parametrize(
        "data",
        ["{", "x", "[1]", '{"choices": [{"index": 0}]}', '{"choices": 3}', '{"choices": [3]}', '{"choices": "ab"}'],
    )
    def test_a_chunk_that_makes_no_sense_is_a_failed_leg(self, data: str) -> None:
        with pytest.raises(LegFailed, match=r"^decode: "):
            chat.Chunks(asked()).feed(f"data: {data}\n\n".encode())

    def test_an_event_above_the_cap_is_a_failed_leg(self) -> None:
        with pytest.raises(LegFailed, match="larger than 32 bytes"):
            chat.Chunks(asked(), max_event_bytes=32).feed(ev(chunk("a" * 32)))

    def test_comments_are_relayed_and_empty_events_are_not(self) -> None:
        shape = chat.Chunks(asked())
        assert shape.feed(b": keep-alive\n\ndata:\n\n" + ev({"choices": []})) == b": keep-alive\n\n"

    def test_what_is_no_json_in_a_workers_answer_comes_out_as_strict_json(self) -> None:
        scores = {"content": [{"token": "a", "logprob": float("nan"), "bytes": [97], "top_logprobs": []}]}
        shape = chat.Chunks(asked({"logprobs": True}))
        out = rebuilt(shape, ev(chunk("a", (1,), "stop", logprobs=scores)), DONE)
        assert b"NaN" not in out
        assert events(out)[-1]["choices"][0]["logprobs"]["content"][0]["logprob"] is None

    def test_a_lone_surrogate_in_the_text_survives_as_an_escape(self) -> None:
        raw = b"data: " + json.dumps(chunk("\ud800", (1,))).encode() + b"\n\n"
        shape = chat.Chunks(asked())
        for out in (shape.feed(raw), shape.feed(raw)):
            assert b'"content":"\\ud800"' in out

    def test_chunks_after_a_choices_finish_are_left_out(self) -> None:
        shape = chat.Chunks(asked())
        shape.feed(ev(chunk("a", (1,), "stop")))
        assert shape.feed(ev(chunk("b", (2,)))) == b""

    def test_the_count_of_choices_is_the_rendered_one(self) -> None:
        shape = chat.Chunks(asked(rendered={"sampling_params": {"n": 2}, "token_ids": [1]}))
        assert len(events(shape.feed(ev(chunk("a", (1,)))) + DONE)) == 3

    @pytest.mark.parametrize("name", ["n2", "logprobs", "usage"])
    def test_the_sdk_reads_every_chunk_and_puts_the_answer_together(self, name: str) -> None:
        n = 2 if "n2" in name else 1
        request = asked({"n": n, "logprobs": "logprobs" in name, "stream_options": {"include_usage": True}})
        raw = stream_of(f"generate/generate_text_stream_{name}")
        completion = accumulated(rebuilt(chat.Chunks(request), raw))
        for index in range(n):
            text = "".join(c["text"] for one in events(raw) for c in one["choices"] if c["index"] == index)
            assert completion.choices[index].message.content == text
            assert completion.choices[index].finish_reason == "length"


def accumulated(raw: bytes) -> Any:
    state: Any = ChatCompletionStreamState()
    for one in events(raw):
        state.handle_chunk(ChatCompletionChunk.model_validate(one))
    return state.current_completion_snapshot  # get_final_completion() refuses answers that end by length


class TestReplay:
    @pytest.mark.parametrize(("native", "generated"), DERENDERED + TEXT)
    def test_the_sdk_puts_the_same_message_together(self, native: str, generated: str) -> None:
        request = asked_as(native)
        want = ChatCompletion.model_validate(chat.whole(reply_of(generated), request))
        got = accumulated(chat.replay(reply_of(generated), request))
        for ours, whole in zip(got.choices, want.choices, strict=True):
            assert ours.message.content == (whole.message.content or "")  # the role chunk makes null an empty text
            assert (ours.message.model_extra or {}).get("reasoning") == (whole.message.model_extra or {})["reasoning"]
            calls = [(c.id, c.type, c.function.name, c.function.arguments) for c in ours.message.tool_calls or ()]
            assert calls == [
                (c.id, c.type, c.function.name, c.function.arguments)  # type: ignore[union-attr]
                for c in whole.message.tool_calls or ()
            ]
            assert ours.logprobs == whole.logprobs or ours.logprobs.content == whole.logprobs.content  # type: ignore[union-attr]
        assert (got.id, got.created, got.model) == (want.id, want.created, want.model)

    def test_finish_reasons_are_those_of_the_whole_answer(self) -> None:
        for native, generated in DERENDERED:
            answer = chat.whole(reply_of(generated), asked_as(native))
            replayed = events(chat.replay(reply_of(generated), asked_as(native)))
            shown = [one["choices"][0]["finish_reason"] for one in replayed]
            assert [reason for reason in shown if reason] == [choice["finish_reason"] for choice in answer["choices"]]

    def test_chunks_have_the_key_sets_of_vllms_stream(self) -> None:
        """Joined deltas differ; every kind of chunk is shaped as its own counterpart."""
        native = events(stream_of("chat/chat_tool_call_stream"))
        reply = reply_of("generate/generate_derender_tool_call")
        ours = events(chat.replay(reply, asked_as("chat/chat_tool_call_stream")))
        kinds = [shape_of(one) for one in ours]
        assert kinds == list(dict.fromkeys(shape_of(one) for one in native))

    def test_two_tool_calls_count_their_index(self) -> None:
        out = events(chat.replay(reply_of("generate/generate_derender_two_tool_calls"), asked()))
        calls = [call for one in out for call in one["choices"][0]["delta"].get("tool_calls") or ()]
        assert [call["index"] for call in calls] == [0, 0, 1, 1]
        assert [sorted(call) for call in calls[:2]] == [["function", "id", "index", "type"], ["function", "index"]]

    def test_usage_comes_last_and_only_if_asked_for(self) -> None:
        reply = reply_of("generate/generate_derender")
        assert b"usage" not in chat.replay(reply, asked())
        out = events(chat.replay(reply, asked({"stream_options": {"include_usage": True}})))
        assert comparable(out[-1]) == comparable(events(stream_of("chat/chat_plain_stream_usage"))[-1])
        assert all("usage" not in one for one in out[:-1])

    def test_continuous_usage(self) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        out = events(chat.replay(reply_of("generate/generate_derender"), asked({"stream_options": options})))
        assert [one["usage"]["completion_tokens"] for one in out] == [0, 8, 8, 8]

    def test_logprobs_and_token_ids_come_once_on_the_first_delta(self) -> None:
        reply = reply_of("generate/generate_derender_logprobs")
        out = events(chat.replay(reply, asked({"return_token_ids": True}, {"token_ids": [5]})))
        assert out[0]["prompt_token_ids"] == [5]
        assert [one["choices"][0].get("token_ids") for one in out] == [None, reply["choices"][0]["token_ids"], []]
        assert [bool(one["choices"][0]["logprobs"]) for one in out] == [False, True, False]

    def test_an_answer_without_anything_is_a_role_and_a_finish(self) -> None:
        reply = {"choices": [{"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}]}
        out = events(chat.replay(reply, asked()))
        assert [one["choices"][0]["delta"] for one in out] == [{"role": "assistant", "content": ""}, {}]

    def test_every_choice_has_its_role_first(self) -> None:
        out = events(chat.replay(reply_of("generate/generate_text_n2"), asked({"n": 2})))
        shown = [one["choices"][0] for one in out[:2]]
        assert [(choice["index"], "role" in choice["delta"]) for choice in shown] == [(0, True), (1, True)]

    def test_a_refusal_is_told(self) -> None:
        reply = reply_of("generate/generate_derender")
        reply["choices"][0]["message"] |= {"refusal": "no", "reasoning": None}
        assert accumulated(chat.replay(reply, asked())).choices[0].message.refusal == "no"

    def test_a_reply_that_cannot_be_read_is_a_failed_leg(self) -> None:
        with pytest.raises(LegFailed):
            chat.replay({"choices": [{}]}, asked())


def shape_of(one: dict[str, Any]) -> str:
    """The keys of a chunk, of its choice, its delta and its tool call."""
    choice = one["choices"][0]
    calls = [list(call) for call in choice["delta"].get("tool_calls") or ()]
    return str([sorted({*one} - {"system_fingerprint"}), list(choice), list(choice["delta"]), calls])

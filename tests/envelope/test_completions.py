"""Rebuilt completions equal vLLM's own, field for field and in the order of its keys."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from envelope import completions
from envelope.errors import BadRequest, LegFailed
from envelope.shape import Asked

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"
NEW, OLD = "vllm-0.33.0", "vllm-0.32.0"

# What vLLM's own answer has and generate's does not tell.
UNAVAILABLE = {
    "id": "made of each leg's own request id",
    "created": "the time of each recording",
    "system_fingerprint": "a hash of the server's configuration; generate does not send it",
}

# (vLLM's own answer, the tokens-in answer)
PAIRS = [
    ("completions/completion_plain", "generate/generate_text_completion_plain"),
    ("completions/completion_logprobs", "generate/generate_text_completion_logprobs"),
    ("completions/completion_logprobs_sampled", "generate/generate_text_completion_logprobs_sampled"),
]

DONE = b"data: [DONE]\n\n"


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


def asked_as(native: str) -> Asked:
    return asked(recorded(native)["request"]["body"])


def events(raw: bytes) -> list[Any]:
    """The chunks of a stream, whose end mark is checked and left out."""
    frames = raw.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(one.removeprefix("data: ")) for one in frames[:-2]]


def comparable(answer: dict[str, Any]) -> str:
    """An answer or chunk as text, so that the order of keys counts, with the unavailable left out."""
    return json.dumps({key: value for key, value in answer.items() if key not in UNAVAILABLE}, indent=1)


def rebuilt(shape: completions.Chunks, *parts: bytes) -> bytes:
    out = b"".join([shape.feed(part) for part in parts])
    shape.close()
    return out


def ev(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str = "", token_ids: tuple[int, ...] = (), finish: str | None = None, **more: Any) -> Any:
    """A generate chunk in text mode, as vLLM sends it."""
    choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": list(token_ids)}
    choice |= {"weight_versions": None, "text": text, "logprobs": None}
    usage = more.pop("usage", None)
    return {"request_id": "generate-tokens-r1", "usage": usage, "output_mode": "text", "choices": [choice | more]}


def streamed(reply: dict[str, Any]) -> bytes:
    """The stream behind a whole generate answer: the engine's same tokens, one chunk for each."""
    (choice,) = reply["choices"]
    positions = choice["logprobs"]["content"]
    out = []
    for token, position in zip(choice["token_ids"], positions, strict=True):
        finish = choice["finish_reason"] if position is positions[-1] else None
        out.append(ev(chunk(position["token"], (token,), finish, logprobs={"content": [position]})))
    return b"".join([*out, DONE])


class TestWhole:
    @pytest.mark.parametrize(("native", "generated"), PAIRS)
    def test_equals_vllms_own_answer(self, native: str, generated: str) -> None:
        reply = reply_of(generated)
        before = copy.deepcopy(reply)
        answer = completions.whole(reply, asked_as(native))
        assert comparable(answer) == comparable(reply_of(native))
        assert list(answer) == list(reply_of(native))
        assert reply == before
        Completion.model_validate(answer)

    def test_choices_keep_their_indexes(self) -> None:
        reply = reply_of("generate/generate_text_n2")
        reply["choices"].reverse()
        answer = completions.whole(reply, asked({"n": 2}))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]

    @pytest.mark.parametrize(
        ("request_id", "id"),
        [("generate-tokens-cmpl-a1", "cmpl-a1"), ("generate-tokens-a1", "cmpl-a1"), (None, "cmpl-leg-1")],
    )
    def test_id(self, request_id: str | None, id: str) -> None:
        reply = {**reply_of("generate/generate_text_completion_plain"), "request_id": request_id}
        assert completions.whole(reply, asked())["id"] == id

    def test_of_a_derender_answer_only_the_content_is_taken(self) -> None:
        answer = completions.whole(reply_of("generate/generate_derender_tool_call"), asked())
        assert answer["choices"][0]["text"] == "Sure.\n"
        assert answer["choices"][0]["finish_reason"] == "stop"
        silent = completions.whole(reply_of("generate/generate_derender_two_tool_calls"), asked())
        assert silent["choices"][0]["text"] == ""

    def test_token_ids_and_weight_versions_come_when_asked_for(self) -> None:
        reply = reply_of("generate/generate_text_completion_plain")
        body = {"return_token_ids": True, "return_weight_versions": True}
        (choice,) = completions.whole(reply, asked(body, {"token_ids": [1, 2]}))["choices"]
        assert choice["prompt_token_ids"] == [1, 2]
        assert choice["token_ids"] == reply["choices"][0]["token_ids"]
        assert choice["weight_versions"] == reply["choices"][0]["weight_versions"]
        (plain,) = completions.whole(reply, asked())["choices"]
        assert plain["prompt_token_ids"] is plain["token_ids"] is plain["weight_versions"] is None

    @pytest.mark.parametrize(("k", "kept"), [(0, 1), (1, 2), (2, 3), (-1, 3)])
    def test_top_logprobs_keep_one_more_than_asked_for(self, k: int, kept: int) -> None:
        reply = reply_of("generate/generate_text_logprobs_sampled")
        (choice,) = completions.whole(reply, asked({"logprobs": k}))["choices"]
        assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {kept}

    def test_named_tokens_logprobs_are_all_kept(self) -> None:
        reply = reply_of("generate/generate_text_logprobs_sampled")
        (choice,) = completions.whole(reply, asked({"logprobs": 0, "logprob_token_ids": [5]}))["choices"]
        assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {3}

    def test_a_choice_without_text_or_message_is_a_failed_leg(self) -> None:
        with pytest.raises(LegFailed, match="neither text nor message"):
            completions.whole({"choices": [{"token_ids": [1]}]}, asked())


class TestChunks:
    @pytest.mark.parametrize(
        ("native", "version"), [("completions/completion_plain_stream", NEW), ("completion_plain_stream", OLD)]
    )
    def test_equals_vllms_own_stream(self, native: str, version: str) -> None:
        body = recorded(native, version)["request"]["body"]
        out = rebuilt(completions.Chunks(asked(body)), stream_of("generate/generate_text_completion_plain_stream"))
        want = events(stream_of(native, version))
        for one in want:  # both keys are new in 0.33, whose envelope this is
            one["choices"][0].setdefault("weight_versions", None)
            one.setdefault("kv_transfer_params", None)
        assert [comparable(one) for one in events(out)] == [comparable(one) for one in want]
        assert {one["id"] for one in events(out)} == {"cmpl-ae449bd1960b62f6"}

    def test_logprobs_equal_vllms_own_and_their_offsets_run_on(self) -> None:
        raw = streamed(reply_of("generate/generate_text_completion_logprobs"))
        out = events(rebuilt(completions.Chunks(asked_as("completions/completion_logprobs_stream")), raw))
        native = events(stream_of("completions/completion_logprobs_stream"))
        assert [comparable(one) for one in out] == [comparable(one) for one in native]

    def test_usage_equals_vllms_own(self) -> None:
        native = events(stream_of("completions/completion_plain_stream_continuous_usage"))
        body = recorded("completions/completion_plain_stream_continuous_usage")["request"]["body"]
        raw = b"".join(
            ev(chunk(" there", (847,), one["choices"][0]["finish_reason"], usage={**one["usage"], "x": None}))
            for one in native[:-1]
        )
        raw += ev({"request_id": "r1", "usage": native[-1]["usage"], "choices": []}) + DONE
        out = events(rebuilt(completions.Chunks(asked(body)), raw))
        assert [comparable(one) for one in out] == [comparable(one) for one in native]

    def test_prompt_token_ids_come_once_for_each_choice(self) -> None:
        shape = completions.Chunks(asked({"n": 2, "return_token_ids": True}, {"token_ids": [7, 8]}))
        parts = [
            chunk("a", (1,)),
            chunk("b", (2,), index=1),
            chunk("c", (3,), "stop"),
            chunk("d", (4,), "stop", index=1),
        ]
        out = events(rebuilt(shape, *map(ev, parts), DONE))
        shown = [one["choices"][0] for one in out]
        assert [choice["prompt_token_ids"] for choice in shown] == [[7, 8], [7, 8], None, None]
        assert [choice["token_ids"] for choice in shown] == [[1], [2], [3], [4]]

    def test_choices_interleave_and_each_keeps_its_own_text_and_offsets(self) -> None:
        def scores(token: str) -> dict[str, Any]:
            return {"content": [{"token": token, "logprob": -1.0, "bytes": [], "top_logprobs": []}]}

        shape = completions.Chunks(asked({"n": 2, "logprobs": 0}))
        parts = [
            chunk("ab", (1,), logprobs=scores("ab")),
            chunk("xyz", (2,), index=1, logprobs=scores("xyz")),
            chunk("c", (3,), "stop", logprobs=scores("c")),
            chunk("w", (4,), index=1, logprobs=scores("w")),
            chunk("", (), "length", index=1, logprobs={"content": []}),
        ]
        out = [one["choices"][0] for one in events(rebuilt(shape, *map(ev, parts), DONE))]
        assert [(one["index"], one["text"], one["logprobs"]["text_offset"]) for one in out] == [
            (0, "ab", [0]),
            (1, "xyz", [0]),
            (0, "c", [2]),
            (1, "w", [3]),
            (1, "", []),
        ]

    def test_offsets_follow_the_tokens_and_not_the_text_that_lags_them(self) -> None:
        def scores(*tokens: str) -> dict[str, Any]:
            return {"content": [{"token": t, "logprob": -1.0, "bytes": [], "top_logprobs": []} for t in tokens]}

        shape = completions.Chunks(asked({"logprobs": 1}))
        parts = [chunk("", (1, 2), logprobs=scores("ST", "O")), chunk("STOR", (3,), "stop", logprobs=scores("R"))]
        out = [one["choices"][0] for one in events(rebuilt(shape, *map(ev, parts), DONE))]
        assert [one["logprobs"]["text_offset"] for one in out] == [[0, 2], [3]]

    def test_held_back_text_gives_an_empty_chunk_as_vllm_sends_it(self) -> None:
        shape = completions.Chunks(asked())
        parts = [chunk(), chunk("", (1,)), chunk("a", (2,)), chunk("", (3,)), chunk("b", (4,)), chunk("", (5,), "stop")]
        out = events(rebuilt(shape, *map(ev, parts), DONE))
        assert [one["choices"][0]["text"] for one in out] == ["", "a", "", "b", ""]
        assert {comparable(one).replace('"b"', '""').replace('"a"', '""') for one in out[:-1]} == {comparable(out[0])}

    def test_content_is_seen_with_the_first_text(self) -> None:
        shape = completions.Chunks(asked())
        shape.feed(ev(chunk("", (1,))))
        assert not shape.content_seen
        shape.feed(ev(chunk("a", (2,))))
        assert shape.content_seen

    def test_a_stop_string_and_weight_versions_are_told_on_the_finish(self) -> None:
        last = chunk("END", (), "stop", stop_reason="###", weight_versions=[{"version": "v"}])
        out = events(rebuilt(completions.Chunks(asked({"return_weight_versions": True})), ev(last), DONE))
        assert out[-1]["choices"][0] == {
            "index": 0,
            "text": "END",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "###",
            "prompt_token_ids": None,
            "token_ids": None,
            "weight_versions": [{"version": "v"}],
        }

    def test_a_finish_that_never_comes_is_a_failure(self) -> None:
        shape = completions.Chunks(asked({"n": 2}))
        assert b"[DONE]" not in shape.feed(ev(chunk("a", (1,), "stop")) + DONE)
        with pytest.raises(LegFailed, match="ended early"):
            shape.close()

    def test_an_error_event_is_relayed(self) -> None:
        error = stream_of("kv_load_failure/completion_stream")
        shape = completions.Chunks(asked())
        assert rebuilt(shape, error) == error
        assert shape.error == "Internal server error"

    @given(st.lists(st.text(max_size=6), min_size=1, max_size=8), st.lists(st.integers(0, 2000), max_size=8))
    def test_any_text_in_any_pieces_comes_out_as_it_was(self, texts: list[str], cuts: list[int]) -> None:
        raw = b"".join(ev(chunk(text, (1,))) for text in texts) + ev(chunk("", (2,), "stop")) + DONE
        edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
        out = events(rebuilt(completions.Chunks(asked()), *(raw[a:b] for a, b in pairwise(edges))))
        assert [one["choices"][0]["text"] for one in out] == [*texts, ""]
        Completion.model_validate(out[-1])  # the SDK's model knows no chunk before the finish; it does not validate


class TestReplay:
    @pytest.mark.parametrize(("native", "generated"), PAIRS)
    def test_is_one_chunk_for_each_choice_with_vllms_keys(self, native: str, generated: str) -> None:
        (whole,) = completions.whole(reply_of(generated), asked_as(native))["choices"]
        (only,) = events(completions.replay(reply_of(generated), asked_as(native)))
        (vllm, *_) = events(stream_of("completions/completion_plain_stream"))
        (choice,) = only["choices"]
        assert list(only) == list(vllm)
        assert list(choice) == list(vllm["choices"][0])
        assert choice == {key: whole[key] for key in choice}
        Completion.model_validate(only)

    def test_usage_comes_last_and_only_if_asked_for(self) -> None:
        reply = reply_of("generate/generate_text_n2")
        assert b"usage" not in completions.replay(reply, asked())
        out = events(completions.replay(reply, asked({"n": 2, "stream_options": {"include_usage": True}})))
        counted = {key: value for key, value in reply["usage"].items() if value is not None}
        assert [one.get("usage") for one in out] == [None, None, counted]
        both = {"include_usage": True, "continuous_usage_stats": True}
        out = events(completions.replay(reply, asked({"n": 2, "stream_options": both})))
        assert [one["usage"]["completion_tokens"] for one in out] == [4, 4, 8]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 2], "suffix": "z"}, "suffix"),
        ({"prompt": [[1, 2]], "suffix": "z"}, "suffix"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        completions.refuse(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "echo": False, "best_of": 2, "n": 2, "suffix": None},
        {"prompt": ["a"], "best_of": None, "n": None},
        {"prompt": [1, 2, 3], "suffix": ""},
        {"prompt": [[1, 2, 3]]},
        {"prompt": "a", "suffix": "the renderer knows whether the model can"},
        {},
    ],
)
def test_the_rest_is_let_through(body: dict[str, Any]) -> None:
    completions.refuse(body)

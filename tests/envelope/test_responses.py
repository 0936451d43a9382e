"""Whole ``/v1/responses`` answers equal vLLM's own, field for field; see ``UNAVAILABLE`` for what cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response import Reasoning
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_text_config import ResponseTextConfig

from envelope import responses
from envelope.errors import BadRequest, LegFailed
from envelope.shape import Asked

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"

# Fields of vLLM's answer that generate's does not tell, and why.
UNAVAILABLE = {
    "id, call_id": "random in vLLM; here made of the leg's id, or the worker's own for a call",
    "created_at": "the time of another request",
    "usage.output_tokens_details.reasoning_tokens": "generate does not count them",
    "usage.input_tokens_details.cached_tokens": "generate tells it with --enable-prompt-tokens-details alone",
}


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


def asked(body: dict[str, Any], sampling: dict[str, Any] | None = None) -> Asked:
    rendered = None if sampling is None else {"model": "tiny", "token_ids": [1] * 16, "sampling_params": sampling}
    return Asked(body=body, rendered=rendered, leg_id="a1", created=1790000000)


def sampled(response: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters behind a recorded answer, as render gives them: those of engine default are absent."""
    return {
        "temperature": response["temperature"],
        "max_tokens": response["max_output_tokens"],
        "frequency_penalty": response["frequency_penalty"],
    }


def comparable(response: dict[str, Any]) -> str:
    """The answer as text, so that the order of keys counts, with what is unavailable blanked."""
    response = json.loads(json.dumps(response))
    response["created_at"] = 0
    for item in [response, *response["output"]]:
        item.update({key: "-" for key in ("id", "call_id") if key in item})
    if response["usage"]:
        response["usage"]["output_tokens_details"]["reasoning_tokens"] = 0
        response["usage"]["input_tokens_details"]["cached_tokens"] = 0
    return json.dumps(response)


def reply_for(response: dict[str, Any]) -> dict[str, Any]:
    """The derender answer behind a recorded response: the engine's side of the same tokens."""
    said: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": None}
    for item in response["output"]:
        if item["type"] == "reasoning":
            said["reasoning"] = item["content"][0]["text"]
        elif item["type"] == "message":
            said["content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            said.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if "tool_calls" in said else "stop"
    counts = response["usage"]
    return reply(said, finish_reason=finish, prompt=counts["input_tokens"], completion=counts["output_tokens"])


def reply(
    said: dict[str, Any] | str, *, finish_reason: str = "stop", prompt: int = 9, completion: int = 3, **more: Any
) -> dict[str, Any]:
    """A generate answer: in derender mode for a message, in text mode for a string."""
    choice = {"index": 0, "finish_reason": finish_reason, "stop_reason": None, "token_ids": [5] * completion}
    choice["text" if isinstance(said, str) else "message"] = said
    return {
        "request_id": "generate-tokens-a1",
        "model": "tiny",
        "created": 1790000001,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        | more.pop("usage", {}),
        "output_mode": "text" if isinstance(said, str) else "derender",
        "choices": [choice | more],
    }


def calling(*names: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": f"t{i}", "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(names)]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


@pytest.mark.parametrize(
    ("name", "generate"),
    [
        ("responses_plain", "generate_derender"),
        ("responses_reasoning", "generate_derender_reasoning"),
    ],
)
def test_the_recorded_answer_is_rebuilt_from_the_recorded_derender_answer_of_the_same_prompt(name: str, generate: str):
    """The pairs of recordings with equal tokens."""
    native, worker = recorded(f"responses/{name}"), recorded(f"generate/{generate}")
    given = Asked(native["request"]["body"], worker["request"]["body"], "a1", 0)
    rebuilt = responses.whole(worker["response"]["body"], given)
    assert comparable(rebuilt) == comparable(native["response"]["body"])
    Response.model_validate(rebuilt, strict=True)


@pytest.mark.parametrize("name", ["responses_plain", "responses_reasoning", "responses_text", "responses_tool_call"])
def test_every_recorded_answer_is_rebuilt_from_what_its_engine_said(name: str):
    native = recorded(f"responses/{name}")
    answer = native["response"]["body"]
    rebuilt = responses.whole(reply_for(answer), asked(native["request"]["body"], sampled(answer)))
    assert comparable(rebuilt) == comparable(answer)
    Response.model_validate(rebuilt, strict=True)


def test_every_recorded_derender_answer_is_a_response_to_the_sdk():
    for path in sorted((RECORDINGS / "generate").glob("generate_derender*.json")):
        exchange = json.loads(path.read_text())
        given = Asked({"model": "tiny"}, exchange["request"]["body"], "a1", 0)
        Response.model_validate(responses.whole(exchange["response"]["body"], given), strict=True)


def test_text_mode_is_one_message_markup_included():
    (item,) = responses.whole(reply("so</think>\nHi"), asked({}))["output"]
    assert item["content"] == [{"annotations": [], "text": "so</think>\nHi", "type": "output_text", "logprobs": None}]


def test_empty_text_is_a_message_without_parts_and_an_empty_parsed_answer_no_item():
    """vLLM without a parser, and with one."""
    (item,) = responses.whole(reply(""), asked({}))["output"]
    assert (item["type"], item["content"]) == ("message", [])
    assert responses.whole(reply({"content": None}), asked({}))["output"] == []


def test_reasoning_message_and_calls_come_in_this_order_and_the_last_item_alone_can_be_incomplete():
    said = calling("f", "g", content="Sure.", reasoning="Hm.")
    answer = responses.whole(reply(said, finish_reason="length"), asked({}))
    assert [(item["type"], item["status"]) for item in answer["output"]] == [
        ("reasoning", None),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "abort", "repetition"])
def test_all_finishes_but_length_are_completed_as_vllm_has_it(finish: str):
    answer = responses.whole(reply("Hi", finish_reason=finish), asked({}))
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["output"][0]["status"] == "completed"


def test_only_the_first_call_is_kept_when_the_client_allows_one():
    output = responses.whole(reply(calling("f", "g")), asked({"parallel_tool_calls": False}))["output"]
    assert [item["name"] for item in output] == ["f"]


def test_a_call_keeps_the_workers_id_or_gets_one_made_of_the_leg():
    said = calling("f", "g")
    del said["tool_calls"][1]["id"]
    output = responses.whole(reply(said), asked({}))["output"]
    assert [item["call_id"] for item in output] == ["t0", "chatcmpl-tool-a1-1"]
    assert [item["id"] for item in output] == ["fc_a1_0", "fc_a1_1"]


def test_the_answers_id_is_the_clients_request_id_or_made_of_the_leg():
    assert responses.whole(reply("Hi"), asked({"request_id": "mine"}))["id"] == "mine"
    assert responses.whole(reply("Hi"), asked({}))["id"] == "resp_a1"


POSITIONS = [
    {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "Y", "logprob": -1.5, "bytes": None},
        ],
    }
]


@pytest.mark.parametrize(("k", "kept"), [(None, 0), (0, 0), (1, 1), (2, 2), (5, 2)])
def test_logprobs_are_cut_to_what_the_client_asked_for_and_have_bytes(k: int | None, kept: int):
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": k}
    answer = responses.whole(reply("H", logprobs={"content": POSITIONS}), asked(body, {"logprobs": k}))
    (position,) = answer["output"][0]["content"][0]["logprobs"]
    assert list(position) == ["token", "bytes", "logprob", "top_logprobs"]
    assert [top["token"] for top in position["top_logprobs"]] == ["H", "Y"][:kept]
    assert all(top["bytes"] == list(top["token"].encode()) for top in position["top_logprobs"])
    assert answer["top_logprobs"] == k
    Logprob.model_validate(position, strict=True)


def test_logprobs_that_were_not_asked_for_are_left_out():
    answer = responses.whole(reply("H", logprobs={"content": POSITIONS}), asked({"top_logprobs": 2}))
    assert answer["output"][0]["content"][0]["logprobs"] is None


def test_counts_that_the_worker_does_tell_are_passed_on():
    usage = {
        "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    counts = responses.whole(reply("Hi", usage=usage), asked({}))["usage"]
    assert counts["input_tokens"] == 9
    assert counts["input_tokens_details"]["cached_tokens"] == 4
    assert counts["input_tokens_details"]["cache_write_tokens"] == 2
    assert counts["output_tokens_details"]["reasoning_tokens"] == 1


def test_an_answer_without_usage_is_counted_by_its_tokens():
    answer = reply("Hi", completion=2)
    del answer["usage"]
    counts = responses.whole(answer, asked({}, {}))["usage"]
    assert (counts["input_tokens"], counts["output_tokens"], counts["total_tokens"]) == (16, 2, 18)


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 16, "service_tier": "auto"}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"parallel_tool_calls": None, "truncation": None}, {"parallel_tool_calls": True, "truncation": "disabled"}),
        ({"truncation": "auto", "user": "u"}, {"truncation": "auto", "user": "u"}),
        ({"instructions": "Be brief.", "metadata": {"k": "v"}}, {"instructions": "Be brief.", "metadata": {"k": "v"}}),
        ({"max_tool_calls": 3, "service_tier": "flex"}, {"max_tool_calls": 3, "service_tier": "flex"}),
        ({"safety_identifier": "s", "prompt_cache_key": "p"}, {"safety_identifier": "s", "prompt_cache_key": "p"}),
        ({"prompt_cache_retention": "in-memory"}, {"prompt_cache_retention": "in_memory"}),
        ({"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "24h"}),
        (
            {"prompt_cache_options": {"mode": "explicit", "prewarm": True}},
            {"prompt_cache_options": {"mode": "explicit", "ttl": "30m", "comparison_response_id": None}},
        ),
        (
            {"reasoning": {"effort": "low"}},
            {
                "reasoning": {
                    "context": None,
                    "effort": "low",
                    "generate_summary": None,
                    "mode": None,
                    "summary": None,
                }
            },
        ),
        ({"text": {"verbosity": "low"}}, {"text": {"format": None, "verbosity": "low"}}),
        ({"text": {"format": {"type": "text"}}}, {"text": {"format": {"type": "text"}, "verbosity": None}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
            {
                "text": {
                    "format": {
                        "name": "n",
                        "schema": {"type": "object"},
                        "type": "json_schema",
                        "description": None,
                        "strict": None,
                    },
                    "verbosity": None,
                }
            },
        ),
    ],
)
def test_what_the_client_sent_is_echoed(sent: dict[str, Any], echoed: dict[str, Any]):
    answer = responses.whole(reply("Hi"), asked(sent, {}))
    assert json.dumps({key: answer[key] for key in echoed}) == json.dumps(echoed)
    Response.model_validate(answer)


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        (Reasoning, "reasoning", {"effort": "low", "summary": "auto"}),
        (ResponseTextConfig, "text", {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}}),
        (ResponseTextConfig, "text", {"format": {"type": "json_object"}}),
    ],
)
def test_nested_objects_are_dumped_as_the_sdks_models_dump_them(model: Any, key: str, value: dict[str, Any]):
    dumped = model.model_validate(value).model_dump(mode="json", by_alias=True)
    assert json.dumps(responses.whole(reply("Hi"), asked({key: value}, {}))[key]) == json.dumps(dumped)


def test_sampling_fields_are_what_was_sampled_with_not_what_was_sent():
    """A greedy request is sampled with top_p 1; a cap above the context is lowered."""
    body = {"temperature": 0, "top_p": 0.5, "max_output_tokens": 9999}
    answer = responses.whole(reply("Hi"), asked(body, {"temperature": 0.0, "max_tokens": 2020}))
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.0, 1.0, 2020)
    unrendered = responses.whole(reply("Hi"), asked(body))
    assert (unrendered["temperature"], unrendered["top_p"], unrendered["max_output_tokens"]) == (0.0, 0.5, 9999)


def test_the_answer_is_the_same_each_time_and_its_arguments_stay_as_they_were():
    body = {"tools": [{"type": "function", "name": "f", "parameters": {}}], "text": {"format": {"type": "text"}}}
    given, said = asked(body, {}), reply(calling("f", reasoning="Hm."))
    before = json.dumps([given.body, given.rendered, said])
    assert responses.whole(said, given) == responses.whole(said, given)
    assert json.dumps([given.body, given.rendered, said]) == before


def test_nothing_of_the_hand_over_is_told():
    answer = {**reply("Hi"), "kv_transfer_params": {"remote_host": "10.0.0.5"}, "metrics": {}}
    assert "10.0.0.5" not in json.dumps(responses.whole(answer, asked({})))


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{"index": 0, "token_ids": [1]}]}])
def test_an_answer_with_nothing_in_it_is_the_workers_fault(broken: dict[str, Any]):
    with pytest.raises(LegFailed):
        responses.whole(broken, asked({}))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
    ],
)
def test_what_needs_state_is_refused_with_what_to_do_instead(body: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as refused:
        responses.refuse({"model": "tiny", "input": "a", **body})
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"input": [{"role": "user", "content": "a"}], "previous_response_id": None, "background": False},
        {"input": "a", "store": True, "conversation": None, "prompt": None},
        {},
    ],
)
def test_what_needs_no_state_is_let_through(body: dict[str, Any]):
    responses.refuse(body)


@pytest.mark.parametrize("body", [{}, {"store": True}, {"store": None}, {"store": False}])
def test_nothing_is_ever_stored(body: dict[str, Any]):
    assert responses.prepare({"input": "a", **body}) == {"input": "a", "store": False}

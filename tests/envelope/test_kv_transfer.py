"""A hand-over is used whole or not at all, goes on untouched, and nobody but the pipeline writes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from envelope.connectors import KV_CONNECTORS
from envelope.json_codec import dumps, loads
from envelope.kv_transfer import (
    HandoverMissing,
    put_in_generate,
    read_handover,
    without_transfer_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NIXL, SHARED = KV_CONNECTORS["kv-nixl"], KV_CONNECTORS["kv-shared-storage"]

HANDOVER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e1", "remote_block_ids": [[1, 2]],
    "remote_request_id": "r1", "remote_host": "10.9.9.9", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip


def reply(params: Any = HANDOVER, finish: Any = "length") -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish}], "kv_transfer_params": params}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in HANDOVER.items() if key != name}


ABSENT = "the answer carries no kv_transfer_params"

MISSING = {
    "absent": ({"choices": []}, "absent", ABSENT),
    "null": (reply(None), "absent", ABSENT),
    "empty": (reply({}), "absent", ABSENT),
    "a list": (reply([]), "absent", ABSENT),
    "a full list": (reply([HANDOVER]), "absent", ABSENT),
    "a text": (reply("x"), "absent", ABSENT),
    "no object": ([reply()], "not_an_object", "the answer is not a JSON object"),
    "nothing at all": (None, "not_an_object", "the answer is not a JSON object"),
    "an error under a 200": (
        {"error": {"message": "no"}, "kv_transfer_params": HANDOVER},
        "error",
        "the answer tells of an error, although its status does not",
    ),
    "aborted": (reply(None, "abort"), "bad_finish", "prefill ended with finish_reason 'abort'"),
    "aborted with params": (reply(HANDOVER, "abort"), "bad_finish", "prefill ended with finish_reason 'abort'"),
    "an unknown finish": (reply(HANDOVER, "repetition"), "bad_finish", "prefill ended with finish_reason 'repetition'"),
}


@pytest.mark.parametrize(("answer", "reason", "sentence"), MISSING.values(), ids=MISSING)
def test_a_prefill_that_hands_nothing_over_says_why(
    pure: Callable[..., Any], answer: Any, reason: str, sentence: str
) -> None:
    with pytest.raises(HandoverMissing) as caught:
        pure(read_handover, NIXL, answer)
    assert (caught.value.reason, str(caught.value)) == (reason, sentence)


REQUIRED = ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]

HALF = {
    "flags alone": ({"do_remote_prefill": True}, ", ".join(REQUIRED)),
    **{f"no {name}": (without(name), name) for name in REQUIRED},
    **{f"null {name}": ({**HANDOVER, name: None}, name) for name in REQUIRED},
    "no blocks": ({**HANDOVER, "remote_block_ids": []}, "remote_block_ids"),
    "a group without blocks": ({**HANDOVER, "remote_block_ids": [[1], []]}, "remote_block_ids"),
    "an empty host": ({**HANDOVER, "remote_host": ""}, "remote_host"),
    "two of them": ({**without("remote_port"), "remote_host": None}, "remote_host, remote_port"),
}


@pytest.mark.parametrize(("params", "lacks"), HALF.values(), ids=HALF)
def test_half_a_hand_over_is_none(pure: Callable[..., Any], params: Any, lacks: str) -> None:
    """Half of one ends a NIXL engine, or makes it wait for ever."""
    with pytest.raises(HandoverMissing) as caught:
        pure(read_handover, NIXL, reply(params))
    assert (caught.value.reason, str(caught.value)) == ("incomplete", f"kv_transfer_params lacks {lacks}")


WHOLE = {
    "as it is": reply(),
    "ended by stop": reply(finish="stop"),
    "no choices": {"choices": [], "kv_transfer_params": HANDOVER},
    "choices of another kind": {"choices": ["x"], "kv_transfer_params": HANDOVER},
    "no finish told": {"choices": [{}], "kv_transfer_params": HANDOVER},
    "responses and messages have none": {"status": "incomplete", "error": None, "kv_transfer_params": HANDOVER},
}


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE)
def test_a_whole_hand_over_is_decode_s(pure: Callable[..., Any], answer: dict[str, Any]) -> None:
    assert pure(read_handover, NIXL, answer) == HANDOVER


def test_what_is_falsy_and_still_something_is_there() -> None:
    params = {**HANDOVER, "remote_port": 0, "remote_block_ids": [0], "remote_engine_id": 0}
    assert read_handover(NIXL, reply(params)) == params


def test_values_and_number_types_go_on_as_they_came(pure: Callable[..., Any]) -> None:
    """Whole numbers that came back as floats made a worker answer 200 without tokens."""
    params = {**HANDOVER, "pp_size": 1, "x": 1.5, "y": [[3], [4, 5]], "z": None, "big": 2**53 + 1, "huge": 10**30}
    raw = dumps(reply(params))
    taken = pure(read_handover, NIXL, loads(raw))
    assert repr(taken) == repr(params)
    assert dumps(put_in_generate({"token_ids": [1]}, taken)).count(dumps(params)) == 2


def test_only_the_flags_are_set_for_decode() -> None:
    turned = {**HANDOVER, "do_remote_prefill": False, "do_remote_decode": True}
    assert read_handover(NIXL, reply(turned)) == HANDOVER
    assert read_handover(NIXL, reply({key: value for key, value in HANDOVER.items() if key[:3] != "do_"})) == HANDOVER


@pytest.mark.parametrize("params", [None, {}, HANDOVER, "x"])
def test_shared_storage_hands_nothing_over(params: Any) -> None:
    assert read_handover(SHARED, reply(params)) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(None, "abort"), "bad_finish"),
        ({"status": "failed", "error": {"message": "no"}}, "error"),
        ("x", "not_an_object"),
        (None, "not_an_object"),
    ],
)
def test_shared_storage_still_needs_a_prefill_that_ended_well(answer: Any, reason: str) -> None:
    with pytest.raises(HandoverMissing) as caught:
        read_handover(SHARED, answer)
    assert caught.value.reason == reason


PREFILLS = [
    "nixl_prefill_server/prefill_chat",
    "nixl_prefill_server/prefill_completion",
    "nixl_prefill_server/prefill_responses",
    "nixl_prefill_server/prefill_messages",
    "nixl_prefill_server/prefill_generate_top_level",
    "nixl_prefill_server/prefill_generate_extra_args",
    "nixl_prefill_server/prefill_generate_minimal_params",
    "nixl_prefill_server/prefill_generate_short_prompt",
    "nixl_prefill_server/prefill_generate_stop_finish",
    "nixl_push_prefill_server/prefill_generate",
]


@pytest.mark.parametrize("name", PREFILLS)
def test_what_real_workers_hand_over_is_whole_and_goes_on_untouched(recorded: Any, name: str) -> None:
    answer = recorded(name)["response"]["body"]
    assert read_handover(NIXL, answer) == answer["kv_transfer_params"]


def test_a_real_worker_that_was_not_asked_hands_nothing_over(recorded: Any) -> None:
    with pytest.raises(HandoverMissing, match="carries no kv_transfer_params"):
        read_handover(NIXL, recorded("nixl_prefill_server/no_kv_params")["response"]["body"])


def test_a_real_shared_storage_prefill_is_a_good_one(recorded: Any) -> None:
    assert read_handover(SHARED, recorded("shared_storage/prefill")["response"]["body"]) is None


P = {"do_remote_decode": True}

PUT = {
    "both places": ({"token_ids": [1], "sampling_params": {"n": 1}},
                    {"token_ids": [1], "sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": P}},
                     "kv_transfer_params": P}),
    "other extras stay": ({"sampling_params": {"extra_args": {"k": "v"}}},
                          {"sampling_params": {"extra_args": {"k": "v", "kv_transfer_params": P}},
                           "kv_transfer_params": P}),
    "null extras": ({"sampling_params": {"extra_args": None}},
                    {"sampling_params": {"extra_args": {"kv_transfer_params": P}}, "kv_transfer_params": P}),
    "no sampling_params": ({"token_ids": [1]},
                           {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": P}},
                            "kv_transfer_params": P}),
    "what stood there is replaced": (
        {"kv_transfer_params": None, "sampling_params": {"extra_args": {"kv_transfer_params": 7}}},
        {"kv_transfer_params": P, "sampling_params": {"extra_args": {"kv_transfer_params": P}}}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "put"), PUT.values(), ids=PUT)
def test_params_stand_where_every_vllm_reads_them(pure: Callable[..., Any], body: Any, put: Any) -> None:
    assert pure(put_in_generate, body, P) == put


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_params_leave_no_trace(pure: Callable[..., Any], nothing: Any) -> None:
    body = {"token_ids": [1], "sampling_params": {}}
    assert pure(put_in_generate, body, nothing) == body


H = {"remote_host": "192.0.2.1"}

CLEANED = {
    "nothing to take off": ({"a": 1, "vllm_xargs": {"k": "v"}, "sampling_params": {"extra_args": {"k": "v"}}},
                            {"a": 1, "vllm_xargs": {"k": "v"}, "sampling_params": {"extra_args": {"k": "v"}}}),
    "at the top": ({"a": 1, "kv_transfer_params": H, "ec_transfer_params": H}, {"a": 1}),
    "of any type": ({"a": 1, "kv_transfer_params": "x", "ec_transfer_params": None}, {"a": 1}),
    "in vllm_xargs": ({"vllm_xargs": {"k": "v", "kv_transfer_params": "x"}}, {"vllm_xargs": {"k": "v"}}),
    "in extra_args": ({"extra_args": {"ec_transfer_params": H}}, {"extra_args": {}}),
    "in sampling_params.extra_args": (
        {"sampling_params": {"n": 1, "extra_args": {"k": 1, "kv_transfer_params": H, "ec_transfer_params": H}}},
        {"sampling_params": {"n": 1, "extra_args": {"k": 1}}}),
    "in sampling_params.vllm_xargs": (
        {"sampling_params": {"vllm_xargs": {"kv_transfer_params": H}, "extra_args": None}},
        {"sampling_params": {"vllm_xargs": {}, "extra_args": None}}),
    "everywhere at once": (
        {"kv_transfer_params": H, "vllm_xargs": {"ec_transfer_params": H},
         "sampling_params": {"extra_args": {"kv_transfer_params": H}}},
        {"vllm_xargs": {}, "sampling_params": {"extra_args": {}}}),
    "maps that are none": ({"vllm_xargs": ["kv_transfer_params"], "extra_args": "x", "sampling_params": [1]},
                           {"vllm_xargs": ["kv_transfer_params"], "extra_args": "x", "sampling_params": [1]}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "clean"), CLEANED.values(), ids=CLEANED)
def test_a_client_s_transfer_params_never_reach_a_worker(pure: Callable[..., Any], body: Any, clean: Any) -> None:
    assert pure(without_transfer_params, body) == clean


def test_what_was_put_is_taken_off_again() -> None:
    body = {"token_ids": [1], "sampling_params": {"n": 2, "extra_args": {"k": "v"}}}
    assert without_transfer_params(put_in_generate(body, HANDOVER)) == body


MOONCAKE, SGLANG = KV_CONNECTORS["kv-mooncake"], KV_CONNECTORS["kv-sglang"]

# By API: how it says that a prompt's one token ended by length, by an end of text, and not at all.
ENDS = {
    "chat": [{"choices": [{"finish_reason": word}]} for word in ("length", "stop", "abort")],
    "messages": [{"type": "message", "stop_reason": word} for word in ("max_tokens", "end_turn", None)],
    "responses": [{"object": "response", "status": word} for word in ("incomplete", "completed", "failed")],
}


@pytest.mark.parametrize("api", ENDS)
def test_a_prefill_s_end_is_read_in_every_api(api: str) -> None:
    """L24, G7: Mooncake sends blocks after an end by length alone; for NIXL and SGLang an end of text will do."""
    by_length, by_text, not_at_all = ENDS[api]
    assert read_handover(MOONCAKE, by_length) is None
    for connector in (SHARED, SGLANG):
        assert read_handover(connector, by_text) is None
    bad = [(MOONCAKE, by_text), (MOONCAKE, not_at_all), (SHARED, not_at_all), (SGLANG, not_at_all)]
    for connector, reply_ in bad:
        with pytest.raises(HandoverMissing) as caught:
            read_handover(connector, reply_)
        assert caught.value.reason == "bad_finish"


def test_a_prefill_of_a_client_s_own_request_may_end_with_a_tool_call() -> None:
    assert read_handover(SGLANG, {"choices": [{"finish_reason": "tool_calls"}]}) is None


ROUTING = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "routed_dp_rank",
           "data_parallel_rank", "disagg_prefill_dp_rank")  # fmt: skip


@pytest.mark.parametrize("name", ROUTING)
def test_a_client_names_no_room_and_no_rank(pure: Callable[..., Any], name: str) -> None:
    """E6, H22."""
    assert pure(without_transfer_params, {"messages": [], name: 1}) == {"messages": []}

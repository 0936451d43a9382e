"""What is read from a client's body, and what is refused before a worker is asked; everything else passes untouched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from envelope.client_request import (
    check,
    choices,
    first_media,
    has_media,
    prompt_token_ids,
    single_prompt,
    wants_prompt_logprobs,
)
from envelope.errors import BadRequest
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

HI = [{"role": "user", "content": "hi"}]

BODIES: dict[Format, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": HI},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": HI, "max_tokens": 9},
    GENERATE: {"model": "m", "token_ids": [1, 2], "sampling_params": {}},
}
# By which name each API caps its output.
CAPS = {CHAT: ["max_tokens", "max_completion_tokens"], COMPLETIONS: ["max_tokens"], RESPONSES: ["max_output_tokens"],
        MESSAGES: ["max_tokens"], GENERATE: ["sampling_params.max_tokens"]}  # fmt: skip


def body_of(api: Format, **fields: Any) -> dict[str, Any]:
    """Return a body with more fields; ``sampling_params.x`` is a field of that object."""
    body = {**BODIES[api]}
    for name, value in fields.items():
        if name.startswith("sampling_params."):
            body["sampling_params"] = {**body["sampling_params"], name.partition(".")[2]: value}
        else:
            body[name] = value
    return body


def where(api: Format, name: str) -> str:
    return f"sampling_params.{name}" if api is GENERATE else name


def refusal(api: Format, body: Any) -> tuple[str, str | None]:
    with pytest.raises(BadRequest) as caught:
        check(api, body)
    return caught.value.message, caught.value.param


@pytest.mark.parametrize("api", Format)
def test_an_ordinary_body_passes_untouched(pure: Callable[..., Any], api: Format) -> None:
    expected = {**BODIES[api], "store": False} if api is RESPONSES else BODIES[api]
    assert pure(check, api, BODIES[api]) == expected


@pytest.mark.parametrize("api", Format)
def test_fields_that_we_do_not_know_pass_untouched(pure: Callable[..., Any], api: Format) -> None:
    fields = {"brand_new": {"x": [10**30, None]}, "n": 3, "seed": 2**53 + 1, "temperature": "hot", "stream": True}
    body = body_of(api, **fields)
    assert {name: pure(check, api, body)[name] for name in fields} == fields


def test_every_integer_of_the_body_keeps_its_digits(pure: Callable[..., Any]) -> None:
    numbers = [2**53 + 1, 2**63, 2**64, 10**30]
    assert pure(check, CHAT, body_of(CHAT, seed=numbers[0], deep={"ids": numbers}))["deep"] == {"ids": numbers}


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize("body", [None, [], [BODIES[CHAT]], 3, "x", True])
def test_a_body_is_an_object(api: Format, body: Any) -> None:
    assert refusal(api, body) == ("the request body must be a JSON object", None)


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize(("value", "shown"), [("true", '"true"'), (1, "1"), ({}, "{}")])
def test_stream_is_true_or_false(api: Format, value: Any, shown: str) -> None:
    assert refusal(api, body_of(api, stream=value)) == (f"stream must be true or false, not {shown}", "stream")


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize("value", [None, True, False])
def test_stream_may_be_null(api: Format, value: bool | None) -> None:
    assert check(api, body_of(api, stream=value))["stream"] is value


SALT = "cache_salt must be a string of 1 to 128 characters without '@', '/', '\\' or NUL"


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize("salt", ["", "x" * 129, "x" * 1025, 5, ["x"], "a@b", "a/b", "a\\b", "a\0b"])
def test_a_cache_salt_that_a_worker_would_refuse_is_refused(api: Format, salt: Any) -> None:
    assert refusal(api, body_of(api, cache_salt=salt)) == (SALT, "cache_salt")


@pytest.mark.parametrize("salt", [None, "x", "x" * 128, "tenant:7", "é" * 128])
def test_a_cache_salt_that_a_worker_takes_passes(salt: Any) -> None:
    assert check(CHAT, body_of(CHAT, cache_salt=salt))["cache_salt"] == salt


NO_COUNTS = [(0, "0"), (-1, "-1"), (2.5, "2.5"), ("5", '"5"'), ([1], "[1]"), (1e300, "1e+300"), (True, "true"),
             (2**63, str(2**63)), (10**30, str(10**30)), (["x" * 99], '["' + "x" * 55 + "...")]  # fmt: skip


@pytest.mark.parametrize(("value", "shown"), NO_COUNTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(("api", "cap"), [(api, cap) for api in Format for cap in CAPS[api]])
def test_a_cap_is_an_integer_from_1(api: Format, cap: str, value: Any, shown: str) -> None:
    assert refusal(api, body_of(api, **{cap: value})) == (f"{cap} must be an integer of at least 1, not {shown}", cap)


def test_an_echo_may_be_all_that_is_asked_for() -> None:
    """vLLM answers such a request with the prompt alone: harnesses score texts this way."""
    assert check(COMPLETIONS, body_of(COMPLETIONS, max_tokens=0, echo=True, logprobs=1))
    assert refusal(COMPLETIONS, body_of(COMPLETIONS, max_tokens=0, echo=False))[1] == "max_tokens"
    assert refusal(COMPLETIONS, body_of(COMPLETIONS, max_tokens=-1, echo=True))[1] == "max_tokens"
    assert refusal(CHAT, body_of(CHAT, max_tokens=0, echo=True))[1] == "max_tokens"


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize("value", [None, 1, 16, 2.0, 2**63 - 1])
def test_a_cap_that_can_be_meant_passes(api: Format, value: Any) -> None:
    for cap in CAPS[api]:
        body = body_of(api, **{cap: value})
        assert check(api, body).items() >= body.items()


@pytest.mark.parametrize("api", Format)
def test_another_api_s_cap_is_a_field_that_we_do_not_know(api: Format) -> None:
    for name in {"max_tokens", "max_completion_tokens", "max_output_tokens"} - set(CAPS[api]):
        body = body_of(api, **{name: -1})
        assert check(api, body)[name] == -1


@pytest.mark.parametrize("api", Format)
@pytest.mark.parametrize(("name", "least"), [("n", 1), ("min_tokens", 0)])
def test_n_and_min_tokens_are_counts_too(api: Format, name: str, least: int) -> None:
    field = where(api, name)
    assert refusal(api, body_of(api, **{field: least - 1})) == (
        f"{field} must be an integer of at least {least}, not {least - 1}",
        field,
    )
    for value in (None, least, float(least)):
        check(api, body_of(api, **{field: value}))


# (api, caps, min_tokens, the cap that it is above)
MINIMA = [
    (CHAT, {"max_tokens": 3}, 9, 3),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 20}, 9, 3),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 3}, 9, 3),
    (COMPLETIONS, {"max_tokens": 3}, 9, 3),
    (COMPLETIONS, {}, 17, 16),
    (COMPLETIONS, {"max_tokens": None}, 17, 16),
    (RESPONSES, {"max_output_tokens": 3}, 9, 3),
    (MESSAGES, {"max_tokens": 3}, 9, 3),
    (GENERATE, {"sampling_params.max_tokens": 3}, 9, 3),
]


@pytest.mark.parametrize(("api", "caps", "least", "cap"), MINIMA)
def test_a_minimum_above_the_cap_is_refused_before_prefill_hides_it(
    api: Format, caps: dict[str, Any], least: int, cap: int
) -> None:
    name = where(api, "min_tokens")
    assert refusal(api, body_of(api, **caps, **{name: least})) == (
        f"{name} is {least}, above the output cap of {cap}; lower it or raise the cap",
        name,
    )
    check(api, body_of(api, **caps, **{name: cap}))


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"min_tokens": 9}),
        (CHAT, {"max_completion_tokens": 20, "max_tokens": 3, "min_tokens": 9}),
        (GENERATE, {"sampling_params.min_tokens": 9}),
        (GENERATE, {"min_tokens": 9, "sampling_params.max_tokens": 3}),
    ],
)
def test_a_minimum_below_the_cap_that_counts_passes(api: Format, fields: dict[str, Any]) -> None:
    assert check(api, body_of(api, **fields))


OPTIONS = "stream_options needs stream: true; leave it out or ask for a stream"


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [None, False])
def test_stream_options_need_a_stream_where_vllm_says_so(api: Format, stream: Any) -> None:
    assert refusal(api, body_of(api, stream=stream, stream_options={"include_usage": True})) == (
        OPTIONS,
        "stream_options",
    )
    check(api, body_of(api, stream=True, stream_options={"include_usage": True}))
    for nothing in (None, {}):
        check(api, body_of(api, stream=stream, stream_options=nothing))


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES, GENERATE])
def test_stream_options_without_a_stream_pass_where_vllm_ignores_them(api: Format) -> None:
    assert check(api, body_of(api, stream_options={"include_usage": True}))


NO_OBJECT = "must be an object, not "
NO_LIST = "must be a list, not "
KINDS = [
    (CHAT, {"stream": True, "stream_options": ["include_usage"]}, f'stream_options {NO_OBJECT}["include_usage"]'),
    (COMPLETIONS, {"stream": True, "stream_options": "x"}, f'stream_options {NO_OBJECT}"x"'),
    (RESPONSES, {"include": True}, f"include {NO_LIST}true"),
    (RESPONSES, {"tools": {"type": "function"}}, f'tools {NO_LIST}{{"type":"function"}}'),
    (COMPLETIONS, {"logprobs": {"a": 1}}, 'logprobs must be an integer of at least -1, not {"a":1}'),
    (CHAT, {"logprobs": True, "top_logprobs": [2]}, "top_logprobs must be an integer of at least -1, not [2]"),
    (GENERATE, {"sampling_params": {"extra_args": [1]}}, f"sampling_params.extra_args {NO_OBJECT}[1]"),
]


@pytest.mark.parametrize(("api", "fields", "sentence"), KINDS)
def test_what_an_answer_is_rebuilt_by_has_its_kind(api: Format, fields: dict[str, Any], sentence: str) -> None:
    """Its renderer would say so too, where there is one; when the answer is there it is too late to."""
    with pytest.raises(BadRequest) as refused:
        check(api, {**BODIES[api], **fields})
    assert refused.value.message == sentence
    assert refused.value.param == sentence.split(" ")[0]


@pytest.mark.parametrize("value", [None, -1, 0, 5, 2.0, True])
def test_logprobs_may_be_all_that_vllm_takes_for_a_count(value: Any) -> None:
    assert check(COMPLETIONS, {**BODIES[COMPLETIONS], "logprobs": value})["logprobs"] is value


def test_top_logprobs_need_logprobs() -> None:
    for logprobs in (None, False):
        assert refusal(CHAT, body_of(CHAT, top_logprobs=2, logprobs=logprobs)) == (
            "top_logprobs needs logprobs: true",
            "top_logprobs",
        )
    check(CHAT, body_of(CHAT, top_logprobs=2, logprobs=True))
    for nothing in (None, 0):
        check(CHAT, body_of(CHAT, top_logprobs=nothing, logprobs=False))


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ["a", "b", "c"]])
def test_several_prompts_are_refused(prompts: list[Any]) -> None:
    assert refusal(COMPLETIONS, body_of(COMPLETIONS, prompt=prompts)) == (
        f"prompt holds {len(prompts)} prompts; a prefill is handed to one decode, so send one request per prompt",
        "prompt",
    )


# (what stands in prompt, the one prompt that is meant)
PROMPTS = [
    ("hi", "hi"),
    (["hi"], "hi"),
    ([1, 2], [1, 2]),
    ([[1, 2]], [1, 2]),
    ([1], [1]),
    (list(range(100_000)), list(range(100_000))),
    ("", None),
    ([], None),
    ([""], None),
    ([[]], None),
    (None, None),
    (7, None),
    ({"a": 1}, None),
]


@pytest.mark.parametrize(("prompt", "single"), PROMPTS, ids=lambda value: repr(value)[:20])
def test_the_one_prompt_of_a_completions_request(pure: Callable[..., Any], prompt: Any, single: Any) -> None:
    body = body_of(COMPLETIONS, prompt=prompt)
    assert pure(single_prompt, body) == single
    assert pure(prompt_token_ids, COMPLETIONS, body) == (single if isinstance(single, list) else None)
    assert check(COMPLETIONS, body) is body


def test_a_body_without_a_prompt_is_the_worker_s_to_refuse() -> None:
    body = {"model": "m", "prompt_embeds": "x"}
    assert (check(COMPLETIONS, body), single_prompt(body)) == (body, None)


NO_IDS = [[1, "a"], [True], [1, 2.0], [-1], [None], [1, [2]], [{}], [1, -(10**30)]]


@pytest.mark.parametrize("ids", NO_IDS, ids=repr)
@pytest.mark.parametrize(("api", "name"), [(COMPLETIONS, "prompt"), (GENERATE, "token_ids")])
def test_token_ids_are_integers_from_0(api: Format, name: str, ids: list[Any]) -> None:
    assert refusal(api, body_of(api, **{name: ids})) == (
        f"{name} must hold token ids: integers of at least 0, and nothing else",
        name,
    )


@pytest.mark.parametrize("ids", [None, [], "hi", {"a": 1}, 7])
def test_a_generate_body_has_token_ids(ids: Any) -> None:
    sentence = "token_ids must be a non-empty list of token ids"
    assert refusal(GENERATE, body_of(GENERATE, token_ids=ids)) == (sentence, "token_ids")


@pytest.mark.parametrize("params", [None, [], "x", 7])
def test_a_generate_body_has_sampling_params(params: Any) -> None:
    assert refusal(GENERATE, body_of(GENERATE, sampling_params=params)) == (
        "sampling_params must be an object; {} takes the defaults",
        "sampling_params",
    )


@pytest.mark.parametrize(("mode", "shown"), [("html", '"html"'), ("", '""'), (7, "7"), (["text"], '["text"]')])
def test_an_output_mode_that_there_is_not_is_refused(mode: Any, shown: str) -> None:
    assert refusal(GENERATE, body_of(GENERATE, output_mode=mode)) == (
        f"output_mode must be tokens, text or derender, not {shown}",
        "output_mode",
    )


@pytest.mark.parametrize("mode", [None, "tokens", "text", "derender"])
def test_every_output_mode_passes(mode: Any) -> None:
    assert check(GENERATE, body_of(GENERATE, output_mode=mode, stream=True))


IMAGE = {
    "mm_hashes": {"image": ["h"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 2}]},
    "kwargs_data": {"image": ["T"]},
    "mm_metadata": {"image": ["m"]},
}
BY_HASH = {**IMAGE, "kwargs_data": None, "mm_metadata": None}


@pytest.mark.parametrize("features", [None, IMAGE, BY_HASH, {**IMAGE, "mm_metadata": None}])
@pytest.mark.parametrize("content_parts", [None, []])
def test_a_generate_client_may_render_media_itself(pure: Callable[..., Any], features: Any, content_parts: Any) -> None:
    body = body_of(GENERATE, features=features, content_parts=content_parts)
    assert pure(check, GENERATE, body) == body


FEATURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no object": ({"features": []}, "features must be an object", "features"),
    "behind the prompt": (
        {"features": {**IMAGE, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}},
        "features.mm_placeholders.image[0] ends at 3, and the prompt has 2 tokens",
        "features.mm_placeholders.image[0]",
    ),
    "both forms": (
        {"features": IMAGE, "content_parts": [{"type": "image_url", "url": "data:image/png;base64,AAAA"}]},
        "features and content_parts both say what the prompt's media is; send one of them",
        "content_parts",
    ),
    "metadata alone": (
        {"features": {**IMAGE, "kwargs_data": None}},
        "features.kwargs_data.image[0] is missing: an item that has metadata alone needs ec_transfer_params, which "
        "are not taken from clients; send its tensors",
        "features.kwargs_data.image[0]",
    ),
    "metadata alone, with params that are dropped": (
        {"features": {**IMAGE, "kwargs_data": {"image": [None]}}, "ec_transfer_params": {"h": {"peer_host": "a"}}},
        "features.kwargs_data.image[0] is missing: an item that has metadata alone needs ec_transfer_params, which "
        "are not taken from clients; send its tensors",
        "features.kwargs_data.image[0]",
    ),
}


@pytest.mark.parametrize(("fields", "sentence", "param"), FEATURES.values(), ids=FEATURES)
def test_features_that_no_worker_could_use_are_refused(fields: dict[str, Any], sentence: str, param: str) -> None:
    assert refusal(GENERATE, body_of(GENERATE, **fields)) == (sentence, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "r"), ("background", True), ("input", [{"type": "item_reference", "id": "x"}])],
)
def test_a_response_that_needs_an_earlier_one_is_refused(field: str, value: Any) -> None:
    assert refusal(RESPONSES, body_of(RESPONSES, **{field: value}))[1] is not None


def test_a_response_is_never_stored() -> None:
    assert check(RESPONSES, body_of(RESPONSES, store=True))["store"] is False


def test_only_completions_and_generate_clients_send_tokens(pure: Callable[..., Any]) -> None:
    for api in (CHAT, RESPONSES, MESSAGES):
        assert pure(prompt_token_ids, api, {**BODIES[api], "prompt": [1], "token_ids": [1]}) is None
    assert pure(prompt_token_ids, GENERATE, BODIES[GENERATE]) == [1, 2]


def parts(*types: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind} for kind in types]}]


MEDIA = {
    "text alone": ({"messages": HI}, None),
    "text parts": ({"messages": parts("text", "input_text", "tool_use", "thinking")}, None),
    "an image": ({"messages": parts("text", "image_url")}, "messages[0].content[1] (image_url)"),
    "audio": ({"messages": [*HI, *parts("input_audio")]}, "messages[1].content[0] (input_audio)"),
    "video": ({"messages": parts("video_url")}, "messages[0].content[0] (video_url)"),
    "audio by URL": ({"messages": parts("audio_url")}, "messages[0].content[0] (audio_url)"),
    "Anthropic's image": ({"messages": parts("image")}, "messages[0].content[0] (image)"),
    "Anthropic's document": ({"messages": parts("document")}, "messages[0].content[0] (document)"),
    "a file": ({"messages": parts("file")}, "messages[0].content[0] (file)"),
    "responses' image": ({"input": parts("input_text", "input_image")}, "input[0].content[1] (input_image)"),
    "responses' file": ({"input": parts("input_file")}, "input[0].content[0] (input_file)"),
    "tensors": ({"messages": parts("image_embeds")}, "messages[0].content[0] (image_embeds)"),
    "a prompt's own tensors": ({"messages": parts("prompt_embeds")}, "messages[0].content[0] (prompt_embeds)"),
    "no type": ({"messages": [{"content": [{"text": "x"}, {"video_url": "a"}]}]}, "messages[0].content[1] (video_url)"),
    "in a worker's cache": (
        {"messages": [{"content": [{"type": "x", "image_url": None, "uuid": "u"}]}]},
        "messages[0].content[0] (image_url)"),
    "a named text": ({"messages": [{"content": [{"type": "text", "text": "x", "uuid": "u"}]}]}, None),
    "in a tool's result": (
        {"messages": [*HI, {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        "messages[1].content[0].content[0] (image)"),
    "in a call's output": (
        {"input": [{"type": "function_call_output", "output": parts("input_image")[0]["content"]}]},
        "input[0].output[0] (input_image)"),
    "a call's output as text": ({"input": [{"type": "function_call_output", "output": "input_image"}]}, None),
    "the first of several": ({"messages": parts("image_url", "video_url")}, "messages[0].content[0] (image_url)"),
    "no messages": ({"prompt": "hi"}, None),
    "input as text": ({"input": "image_url"}, None),
    "odd shapes": ({"messages": [None, "x", {"content": None}, {"content": {"type": "image_url"}}, {"role": "user"},
                                 {"content": ["image_url", {"type": 7}, {"text": "x"}, None]}]}, None),
    "messages that are none": ({"messages": {"content": []}, "input": 7}, None),
}  # fmt: skip


@pytest.mark.parametrize(("body", "found"), MEDIA.values(), ids=MEDIA)
def test_media_is_found_and_named_by_its_place(pure: Callable[..., Any], body: dict[str, Any], found: Any) -> None:
    assert pure(first_media, body) == found
    assert pure(has_media, body) is (found is not None)


def test_as_deep_as_json_is_read_nothing_overflows() -> None:
    part: dict[str, Any] = {"type": "image"}
    for _ in range(510):
        part = {"content": [part]}
    assert has_media({"messages": [part]})


@pytest.mark.parametrize("value", [None, 1, 3])
def test_how_many_answers_were_asked_for(pure: Callable[..., Any], value: int | None) -> None:
    assert pure(choices, CHAT, body_of(CHAT, n=value)) == (value or 1)
    assert pure(choices, GENERATE, body_of(GENERATE, **{"sampling_params.n": value, "n": 7})) == (value or 1)
    assert choices(CHAT, BODIES[CHAT]) == choices(GENERATE, BODIES[GENERATE]) == 1


PROMPT_LOGPROBS = [
    (CHAT, {"prompt_logprobs": 1}, True),
    (CHAT, {"prompt_logprobs": 0}, True),
    (CHAT, {"prompt_logprobs": None}, False),
    (CHAT, {"logprobs": True}, False),
    (COMPLETIONS, {"echo": True}, True),
    (COMPLETIONS, {"echo": False}, False),
    (GENERATE, {"sampling_params.prompt_logprobs": 1}, True),
    (GENERATE, {"prompt_logprobs": 1}, False),
]


@pytest.mark.parametrize(("api", "fields", "wanted"), PROMPT_LOGPROBS)
def test_values_of_the_prompt_come_only_from_who_computes_it(
    pure: Callable[..., Any], api: Format, fields: dict[str, Any], wanted: bool
) -> None:
    assert pure(wants_prompt_logprobs, api, body_of(api, **fields)) is wanted


# Recorded refusals of real workers that would come after prefill, or not at all once prefill's cap is set.
REFUSED_BY_WORKERS = [
    ("generate_error_max_tokens_zero", GENERATE),
    ("generate_error_n_zero", GENERATE),
    ("generate_error_empty_token_ids", GENERATE),
    ("generate_error_negative_token_id", GENERATE),
    ("generate_error_missing_token_ids", GENERATE),
    ("generate_error_missing_sampling_params", GENERATE),
    ("generate_error_bad_output_mode", GENERATE),
    ("generate_error_cache_salt_char", GENERATE),
    ("generate_error_cache_salt_empty", GENERATE),
    ("generate_error_cache_salt_long", GENERATE),
    ("chat_error_stream_options_without_stream", CHAT),
    ("chat_error_top_logprobs_without_logprobs", CHAT),
    ("render_responses_error_previous_response_id", RESPONSES),
]


@pytest.mark.parametrize(("name", "api"), REFUSED_BY_WORKERS)
def test_what_a_worker_would_refuse_too_late_is_refused_here(recorded: Any, name: str, api: Format) -> None:
    with pytest.raises(BadRequest):
        check(api, recorded(f"errors/{name}")["request"]["body"])


RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"

TAKEN = [
    (f"{folder}/{file.stem}", Format(folder))
    for folder in ("chat", "completions", "responses", "messages", "generate")
    for file in sorted((RECORDINGS / folder).glob("*.json"))
    if "error" not in file.stem and "two_prompts" not in file.stem
]


@pytest.mark.parametrize(("name", "api"), TAKEN)
def test_every_body_that_a_worker_answered_passes(recorded: Any, name: str, api: Format) -> None:
    body = recorded(name)["request"]["body"]
    assert check(api, body).items() >= {**body, **({"store": False} if api is RESPONSES else {})}.items()

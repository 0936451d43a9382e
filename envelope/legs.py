"""The request body of every leg in every format: rules that stand once, each a pure function.

A body is never changed in place: the client's and the renderer's are read by several legs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.client_request import prompt_token_ids
from envelope.features import only
from envelope.formats import Format
from envelope.generate import DERENDER, TEXT, TOKENS
from envelope.json_codec import without
from envelope.kv_transfer import put_in_generate, without_transfer_params
from envelope.sampling import client_sampling, complete

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envelope.features import Feature
    from envelope.json_codec import Json

# What only decode needs, and the modes a prefill worker may not know.
_DECODE_ONLY = frozenset(
    (
        "output_mode",
        "chat_request",
        "parse_context",
        "stream_options",
        "return_token_ids",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "token_offsets",
    )
)

# What costs work on an OpenAI route and is thrown away with prefill's answer, or makes a one-token request illegal.
# Everything that shapes the prompt stays: messages, tools, tool_choice, response_format, reasoning_effort, ...
_NOT_FOR_PREFILL = _DECODE_ONLY | frozenset(
    (
        "n",
        "best_of",
        "use_beam_search",
        "echo",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "return_tokens_as_token_ids",
        "min_tokens",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "include_stop_str_in_output",
        "bad_words",
        "structured_outputs",
        "thinking_token_budget",
        "repetition_detection",
    )
)

_STREAM_OPTIONS = frozenset(("stream_options",))

_CAP_FIELDS = ("max_completion_tokens", "max_output_tokens")

# They change what the media becomes, and so its hash. The generate route knows neither: there the renderer has seen to
# it, and what they were stays on the leg for whoever reads it.
_MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")

# Fields of another API's body that the generate route has too, under the same name.
_SHARED_FIELDS = ("model", "cache_salt", "priority", "return_token_ids", *_MEDIA_OPTIONS)

_ENCODE_FIELDS = ("model", "cache_salt", "priority", *_MEDIA_OPTIONS)


def one_token() -> Json:
    """Return the ``sampling_params`` of a leg that runs the prompt and throws its one token away.

    It must end by length: a connector may keep blocks for that finish alone, so an end-of-text token is ignored and
    nothing that stops early is sent. Greedy, so that no seed or generator state is made.
    """
    return {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


def one_token_openai(api: Format, body: Json) -> Json:
    """Return a client's body that asks for exactly one output token, unstreamed, on the client's own route.

    Whatever the client capped is capped at 1, by every name that API has for it. ``min_tokens`` is dropped rather
    than set: vLLM refuses a minimum above the cap.
    """
    leg = without(body, _NOT_FOR_PREFILL)
    leg["stream"] = False
    if api is Format.RESPONSES:
        leg["max_output_tokens"] = 1
    else:
        leg["max_tokens"] = 1
    for name in _CAP_FIELDS:
        if leg.get(name) is not None:
            leg[name] = 1
    if api is not Format.MESSAGES:  # which has no such field
        leg["ignore_eos"] = True
    thinking = leg.get("thinking")
    if api is Format.MESSAGES and isinstance(thinking, dict) and thinking.get("type") == "enabled":
        del leg["thinking"]  # its budget must lie below max_tokens; the prompt is the same without it
    return leg


def unstreamed(body: Json) -> Json:
    """Return a client's own request, its answer to come whole: the prefill leg of a fleet that samples there.

    What caps and shapes the output stays: the worker stops after the prompt by itself, and its token is the first of
    the answer.
    """
    return without(body, _STREAM_OPTIONS) | {"stream": False}


def identified(api: Format, leg: Json, id: str) -> Json:
    """Return a leg that the worker knows by this id: on the responses route the header does not say it."""
    return {**leg, "request_id": f"resp_{id}"} if api is Format.RESPONSES else leg


def prefill_reset(generate: Json) -> Json:
    """Return a generate body as a prefill worker takes it: tokens mode, nothing of the answer's parsing.

    The worker may have no tokenizer (``--tokens-only``), and refuses any other mode then.
    """
    leg = without(generate, _DECODE_ONLY)
    return {**leg, "output_mode": TOKENS, "stream": False, "sampling_params": one_token()}


def from_render(rendered: Json, api: Format, body: Json) -> Json:
    """Return the generate request behind a client's request: the renderer's answer, completed.

    Everything that only render knows stays: ``features``, ``parse_context``, ``reasoning_ended``, ...
    """
    whole = without_transfer_params(rendered)
    whole["sampling_params"] = complete(whole.get("sampling_params") or {}, api, body)
    for name in _SHARED_FIELDS:
        if whole.get(name) is None and body.get(name) is not None:
            whole[name] = body[name]
    return whole


def from_token_prompt(api: Format, body: Json) -> Json:
    """Return the generate request of a completions client who sent token ids: no renderer is needed."""
    return {
        **_given(body, _SHARED_FIELDS),
        "token_ids": prompt_token_ids(api, body),
        "sampling_params": client_sampling(api, body),
    }


def encode_openai(body: Json, part: Json) -> Json:
    """Return the encode leg of one piece of media on the chat route, whatever API the client speaks.

    Args:
        part: the media, as a part of a chat message.
    """
    prompt = {"messages": [{"role": "user", "content": [part]}]}
    return one_token_openai(Format.CHAT, {**_given(body, _ENCODE_FIELDS), **prompt})


def encode_generate(rendered: Json, item: Feature) -> Json:
    """Return the encode leg of one item of a rendered prompt on the generate route."""
    token_ids, features = only(rendered, item)
    return prefill_reset({**_given(rendered, _ENCODE_FIELDS), "token_ids": token_ids, "features": features})


def prefill_generate(generate: Json, kv: Mapping[str, Any]) -> Json:
    """Return the prefill leg in generate format."""
    return put_in_generate(prefill_reset(generate), kv)


def prefill_openai(api: Format, body: Json, kv: Mapping[str, Any], token_ids: Sequence[int] | None) -> Json:
    """Return the prefill leg on the client's own route."""
    return _with_openai_kv(api, one_token_openai(api, body), kv, token_ids)


def decode_openai(api: Format, body: Json, kv: Mapping[str, Any] | None, token_ids: Sequence[int] | None) -> Json:
    """Return the decode leg on the client's own route: the client's body, enriched."""
    return _with_openai_kv(api, body, kv or {}, token_ids)


def mode_for(api: Format, configured: str) -> str:
    """Return the output mode that an API's answers are made of.

    Completions answers hold the text as it was generated: vLLM runs no parser for them, and its render gives none the
    context that ``derender`` needs.
    """
    return TEXT if api is Format.COMPLETIONS and configured == DERENDER else configured


def stream_options(api: Format, body: Json, *, counted: bool) -> Json | None:
    """Return the ``stream_options`` of a streamed decode leg in generate format.

    Args:
        counted: ask for the usage chunk whatever the client asked: a rebuilt stream leaves it out again, and some
            envelopes (and our own metrics) need the numbers.
    """
    own = body.get("stream_options") if api in (Format.CHAT, Format.COMPLETIONS) else None
    if not counted:
        return own
    return {**(own if isinstance(own, dict) else {}), "include_usage": True}


def decode_generate(
    generate: Json, mode: str, kv: Mapping[str, Any] | None, *, stream: bool, stream_options: Json | None
) -> Json:
    """Return the decode leg in generate format for a client of another API.

    ``derender`` is never asked for as a stream: vLLM refuses it.
    """
    streamed = stream and mode != DERENDER
    leg = without(generate, _STREAM_OPTIONS)
    leg |= {"output_mode": mode, "stream": streamed}
    if streamed and stream_options is not None:
        leg["stream_options"] = stream_options
    return put_in_generate(leg, kv)


def decode_for_generate_client(body: Json, kv: Mapping[str, Any] | None) -> Json:
    """Return the decode leg of a client that speaks the generate route: every field as it was sent.

    The one exception is a stream in ``derender`` mode, which vLLM refuses: the leg is sent unstreamed.
    """
    leg = body
    if body.get("stream") and body.get("output_mode") == DERENDER:
        leg = without(body, _STREAM_OPTIONS) | {"stream": False}
    return put_in_generate(leg, kv)


def _given(body: Json, names: tuple[str, ...]) -> Json:
    return {name: body[name] for name in names if body.get(name) is not None}


def _with_openai_kv(api: Format, leg: Json, kv: Mapping[str, Any], token_ids: Sequence[int] | None) -> Json:
    """Add the hand-over, and the tokens so that the worker need not tokenize again.

    ``kv_transfer_params.prompt_token_ids`` takes the place of templating on the chat, responses and messages routes;
    the worker takes the key off before the connector sees it. Completions takes ids as its prompt.
    """
    params = dict(kv)
    if token_ids is not None and api is not Format.COMPLETIONS:
        params["prompt_token_ids"] = token_ids
    if token_ids is not None and api is Format.COMPLETIONS:
        leg = {**leg, "prompt": token_ids}
    return {**leg, "kv_transfer_params": params} if params else leg

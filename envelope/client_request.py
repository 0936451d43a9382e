"""What we read from a client's body, what we refuse before any worker is asked, and why.

Refusals are made early on purpose. The prefill leg is sent with its output capped and its extras taken off, so a
mistake in those fields would come to light at decode, when a prefill worker already holds blocks for it.
Everything else is the worker's to judge, and fields we do not know pass untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import features, responses
from envelope.errors import BadRequest
from envelope.formats import Format
from envelope.json_codec import dumps
from envelope.sampling import OUTPUT_CAPS, output_cap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.json_codec import Json

_INT64 = 2**63
_SALT_LENGTH = 128
_SALT_REFUSED = "@/\\\0"
# What is read when the answer is rebuilt, by when prefill and decode have worked for it.
_TAKEN_APART: dict[Format, dict[str, type]] = {
    Format.CHAT: {"stream_options": dict},
    Format.COMPLETIONS: {"stream_options": dict},
    Format.RESPONSES: {"include": list, "tools": list},
}
_MEDIA_PARTS = frozenset(
    (
        *("image_url", "input_audio", "audio_url", "video_url", "image", "audio", "video", "image_pil"),
        *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
        *("input_image", "input_file", "file", "document"),
    )
)
# Where a part says no type, or names media that a worker has in its cache, workers look at its keys.
_MEDIA_KEYS = (
    *("image_url", "audio_url", "video_url", "input_audio"),
    *("image_embeds", "audio_embeds", "video_embeds", "image_pil"),
)


def check(api: Format, body: Any) -> Json:
    """Return the body of a client's request, checked.

    Raises:
        BadRequest: naming the field, and what to write instead.
    """
    if not isinstance(body, dict):
        raise BadRequest("the request body must be a JSON object")
    _check_flag(body, "stream")
    _check_salt(body)
    _check_kinds(api, body)
    if api is Format.GENERATE:
        _check_generate(body)
        params = body["sampling_params"]
        _check_counts(params, ("max_tokens",), where="sampling_params.")
        _check_minimum(params, params.get("max_tokens"), where="sampling_params.")
    else:
        # An echo may be all that is asked for: the prompt's own logprobs, say.
        _check_counts(body, OUTPUT_CAPS[api], least=0 if api is Format.COMPLETIONS and body.get("echo") else 1)
        _check_minimum(body, output_cap(api, body))
    if api is Format.CHAT:
        _check_chat(body)
    if api is Format.COMPLETIONS:
        _check_completions(body)
    if api is Format.RESPONSES:
        responses.refuse(body)
        return responses.prepare(body)
    return body


def prompt_token_ids(api: Format, body: Json) -> list[int] | None:
    """Return the prompt of a client who tokenized it, or None when it is still text."""
    if api is Format.GENERATE:
        ids: list[int] = body["token_ids"]
        return ids
    if api is not Format.COMPLETIONS:
        return None
    prompt = single_prompt(body)
    return prompt if isinstance(prompt, list) else None


def single_prompt(body: Json) -> str | list[int] | None:
    """Return the one prompt of a completions request: text, or token ids; None when there is none."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    return prompt if isinstance(prompt, (str, list)) and prompt else None


def has_media(body: Json) -> bool:
    """Say whether a chat, responses or messages body holds anything but text."""
    return first_media(body) is not None


def first_media(body: Json) -> str | None:
    """Return the path of the first media part, such as ``messages[0].content[1] (image_url)``, or None."""
    found = (f"{path} ({kind})" for path, kind in _parts(body) if kind in _MEDIA_PARTS)
    return next(found, None)


def choices(api: Format, body: Json) -> int:
    """Return how many answers a client asked for (``n``); 1 where it did not say."""
    source = body["sampling_params"] if api is Format.GENERATE else body
    return source.get("n") or 1


def wants_prompt_logprobs(api: Format, body: Json) -> bool:
    """Say whether the answer needs values that only a worker that computes the prompt itself can give."""
    source = body["sampling_params"] if api is Format.GENERATE else body
    return source.get("prompt_logprobs") is not None or bool(body.get("echo"))


def _check_flag(body: Json, name: str) -> None:
    if body.get(name) is not None and not isinstance(body[name], bool):
        raise BadRequest(f"{name} must be true or false, not {_shown(body[name])}", param=name)


def _check_kinds(api: Format, body: Json) -> None:
    for name, kind in _TAKEN_APART.get(api, {}).items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            wanted = "an object" if kind is dict else "a list"
            raise BadRequest(f"{name} must be {wanted}, not {_shown(body[name])}", param=name)


def _check_counts(source: Json, caps: tuple[str, ...], where: str = "", least: int = 1) -> None:
    for name in caps:
        _check_count(source, name, where, least=least)
    _check_count(source, "n", where, least=1)
    _check_count(source, "min_tokens", where, least=0)


def _check_minimum(source: Json, cap: Any, where: str = "") -> None:
    if cap is not None and (source.get("min_tokens") or 0) > cap:
        raise BadRequest(
            f"{where}min_tokens is {source['min_tokens']}, above the output cap of {cap}; lower it or raise the cap",
            param=f"{where}min_tokens",
        )


def _check_count(source: Json, name: str, where: str, *, least: int) -> None:
    value = source.get(name)
    if value is None:
        return
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
    if not whole or not least <= value < _INT64:
        raise BadRequest(
            f"{where}{name} must be an integer of at least {least}, not {_shown(value)}", param=where + name
        )


def _check_salt(body: Json) -> None:
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not 1 <= len(salt) <= _SALT_LENGTH or any(c in salt for c in _SALT_REFUSED):
        raise BadRequest(
            f"cache_salt must be a string of 1 to {_SALT_LENGTH} characters without '@', '/', '\\' or NUL",
            param="cache_salt",
        )


def _check_chat(body: Json) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise BadRequest("stream_options needs stream: true; leave it out or ask for a stream", param="stream_options")
    if body.get("top_logprobs") and not body.get("logprobs"):  # 0 asks for none, and clients do send it
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_count(body, "top_logprobs", "", least=-1)  # -1 is all of them


def _check_completions(body: Json) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise BadRequest("stream_options needs stream: true; leave it out or ask for a stream", param="stream_options")
    if not isinstance(body.get("logprobs"), bool):  # vLLM takes true for 1
        _check_count(body, "logprobs", "", least=-1)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list)):
        raise BadRequest(
            f"prompt holds {len(prompt)} prompts; a prefill is handed to one decode, so send one request per prompt",
            param="prompt",
        )
    ids = single_prompt(body)
    if isinstance(ids, list):
        _check_token_ids(ids, "prompt")


def _check_generate(body: Json) -> None:
    if not isinstance(body.get("token_ids"), list) or not body["token_ids"]:
        raise BadRequest("token_ids must be a non-empty list of token ids", param="token_ids")
    _check_token_ids(body["token_ids"], "token_ids")
    if not isinstance(body.get("sampling_params"), dict):
        raise BadRequest("sampling_params must be an object; {} takes the defaults", param="sampling_params")
    extra = body["sampling_params"].get("extra_args")
    if extra is not None and not isinstance(extra, dict):
        raise BadRequest(
            f"sampling_params.extra_args must be an object, not {_shown(extra)}", param="sampling_params.extra_args"
        )
    mode = body.get("output_mode")
    if mode not in (None, "tokens", "text", "derender"):
        raise BadRequest(f"output_mode must be tokens, text or derender, not {_shown(mode)}", param="output_mode")
    _check_features(body)


def _check_features(body: Json) -> None:
    if body.get("features") is None:
        return
    if body.get("content_parts"):
        raise BadRequest(
            "features and content_parts both say what the prompt's media is; send one of them", param="content_parts"
        )
    try:
        found = features.check(body["features"], len(body["token_ids"]))
    except features.FeaturesWrong as wrong:
        raise BadRequest(str(wrong), param=wrong.where) from None
    for item in found:
        if item.metadata and not item.tensors:
            where = f"features.kwargs_data.{item.modality}[{item.index}]"
            raise BadRequest(
                f"{where} is missing: an item that has metadata alone needs ec_transfer_params, which are not taken "
                "from clients; send its tensors",
                param=where,
            )


def _check_token_ids(ids: list[Any], name: str) -> None:
    # A set of types looks at every item in C; a Python loop over a long prompt would stall other requests.
    if set(map(type, ids)) != {int} or min(ids) < 0:
        raise BadRequest(f"{name} must hold token ids: integers of at least 0, and nothing else", param=name)


def _parts(body: Json) -> Iterator[tuple[str, str]]:
    """Yield the typed content parts of a body as (path, type)."""
    for key in ("messages", "input"):
        for i, message in _objects(body.get(key)):
            # Most messages are one text, and to look for parts in it would cost five times as much as this.
            if isinstance(message.get("content"), list) or isinstance(message.get("output"), list):
                yield from _parts_below(f"{key}[{i}]", message)


def _parts_below(path: str, item: Json) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message, and those that a tool's result holds: in content, or output on responses."""
    for key in ("content", "output"):
        for j, part in _objects(item.get(key)):
            inner = f"{path}.{key}[{j}]"
            if (kind := _kind(part)) is not None:
                yield inner, kind
            yield from _parts_below(inner, part)


def _kind(part: Json) -> str | None:
    kind = part.get("type")
    named = isinstance(kind, str)
    if not named or part.get("uuid") is not None:
        kind = next((key for key in _MEDIA_KEYS if key in part), kind)
    return kind if named or kind in _MEDIA_KEYS else None


def _objects(items: Any) -> Iterator[tuple[int, Json]]:
    return ((i, item) for i, item in enumerate(items if isinstance(items, list) else ()) if isinstance(item, dict))


def _shown(value: Any) -> str:
    text = dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."

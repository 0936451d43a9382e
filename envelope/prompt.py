"""How long a prompt is, and what it begins with, before any worker has seen it: for choosing the worker.

Both are exact where the prompt's tokens are numbers. What is still text is measured by its characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.client_request import prompt_token_ids
from envelope.json_codec import dumps
from envelope.token_ids import Counted, TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envelope.formats import Format
    from envelope.json_codec import Json

CHARACTERS_PER_TOKEN = 4

# What holds text in the bodies of any API; media, tools and settings are beside it.
_TEXT = ("messages", "input", "prompt", "instructions", "system", "content", "text")
# What chat templates put before the conversation.
_BEFORE = ("tools", "system", "instructions")
_CONVERSATION = ("messages", "input", "prompt")
_PROMPT = frozenset((*_CONVERSATION, "system", "token_ids", "features"))


def known_tokens(api: Format, body: Json, rendered: Json | None) -> Sequence[int] | None:
    """Return the prompt's tokens, of render or of a client who tokenized it; None while it is text."""
    return prompt_token_ids(api, body) if rendered is None else rendered["token_ids"]


def count_tokens(api: Format, body: Json, rendered: Json | None) -> int:
    """Return how many tokens a prompt has, or about how many."""
    known = known_tokens(api, body, rendered)
    if isinstance(known, TokenIds):
        return known.about()
    return _characters(body) // CHARACTERS_PER_TOKEN if known is None else len(known)


def beginning(body: Json, max_bytes: int) -> tuple[bytes, bytes]:
    """Return what stands before a conversation, and the conversation, as bytes.

    The conversation's bytes are the beginning of those of its next turn, but for its last few.
    """
    before = [body[name] for name in _BEFORE if body.get(name)]
    said = next((body[name] for name in _CONVERSATION if body.get(name)), "")
    return dumps(before) if before else b"", dumps(said)[:max_bytes]


def without_prompt(body: Json) -> Json:
    """Return what of a client's body its answer is rebuilt from."""
    if body.get("echo") or body.get("add_generation_prompt") is False:
        return body  # the answer goes on with the last message, or as its speaker
    return {name: value for name, value in body.items() if name not in _PROMPT}


def without_tokens(rendered: Json) -> Json:
    """Return what of a rendered prompt its answer is rebuilt from."""
    found: Json = {name: rendered.get(name) for name in ("model", "sampling_params")}
    ids = rendered.get("token_ids") or ()
    return {**found, "token_ids": ids if rendered.get("return_token_ids") else Counted(ids)}


def _characters(value: Any) -> int:
    """Return the length of all text in a body, which may be nested more deeply than functions may call themselves."""
    found, left = 0, [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += [value[name] for name in _TEXT if name in value]
    return found

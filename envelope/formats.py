"""The wire formats of client requests and of legs, their paths, and which one a leg uses."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """A wire format. The first four are a client's own API; ``generate`` is vLLM's tokens-in route."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"


PATHS: dict[Format, str] = {
    Format.CHAT: "/v1/chat/completions",
    Format.COMPLETIONS: "/v1/completions",
    Format.RESPONSES: "/v1/responses",
    Format.MESSAGES: "/v1/messages",
    Format.GENERATE: "/inference/v1/generate",
}

# Where a client of each API writes its prompt.
PROMPT_FIELDS: dict[Format, str] = {
    Format.CHAT: "messages",
    Format.COMPLETIONS: "prompt",
    Format.RESPONSES: "input",
    Format.MESSAGES: "messages",
    Format.GENERATE: "token_ids",
}

RENDER_PATHS: dict[Format, str] = {api: path + "/render" for api, path in PATHS.items() if api is not Format.GENERATE}


def leg_format(client: Format, use_openai_format: bool) -> Format:
    """Return the format in which a leg of a request is sent.

    A generate client stays on its route in both settings; any other client's path is kept, or replaced by the
    tokens-in route.
    """
    return client if use_openai_format else Format.GENERATE

"""The message of a rebuilt chat answer: who speaks, what is said before the model, why it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope.json_codec import without
from envelope.rebuild import content_of

if TYPE_CHECKING:
    from envelope.json_codec import Json


def message_of(choice: Json, body: Json) -> Json:
    """Return the message of a generate choice: the worker's own (derender), or one made of its text.

    ``tool_calls`` is there only when there are calls, as vLLM sends it.

    Raises:
        LegFailed: the choice has neither text nor message.
    """
    content = content_of(choice)
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
    elif message.get("tool_calls") == []:
        message = without(message, frozenset(("tool_calls",)))
    said = echoed(body)
    changed = {"content": said + (content or "")} if said else {}
    return {**message, "role": role(body, message.get("role") or "assistant"), **changed}


def finish_reason_of(choice: Json, body: Json) -> str | None:
    """Return why a choice ended. ``tool_calls`` only where the engine stopped by itself and there are calls.

    A ``length`` stays, so that a client can tell a cut call from a whole one; a forced named function stays
    ``stop``, as OpenAI has it.

    Source: vLLM ``resolve_finish_reason``.
    """
    reason: str | None = choice.get("finish_reason")
    message = choice.get("message")
    calls = isinstance(message, dict) and message.get("tool_calls")
    named = isinstance(body.get("tool_choice"), dict)
    return "tool_calls" if reason == "stop" and calls and not named else reason


def role(body: Json, speaker: str = "assistant") -> str:
    """Return who speaks: the assistant, or the last speaker where the prompt leaves that turn open."""
    last = _last_message(body)
    return str(last.get("role") or speaker) if body.get("add_generation_prompt") is False else speaker


def echoed(body: Json) -> str:
    """Return what ``echo`` puts before the answer: the last message, if it is the same speaker's. Else ""."""
    last = _last_message(body)
    if not body.get("echo") or last.get("role") != role(body):
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or "" for part in content if isinstance(part, dict))


def _last_message(body: Json) -> Json:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    return last if isinstance(last, dict) else {}

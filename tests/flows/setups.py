"""The three set-ups that most fleets run, and answers made comparable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.flows.client import Got, exchange

if TYPE_CHECKING:
    from coordinator.sim import SimFleet, SimWorker
    from tests.flows.conftest import Running

TOKENS = {"send_prompt_token_ids": True}
# Tokenized once by render in each: the worker's own routes; tokens in and text out; tokens in and messages out.
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("openai", {"render": {}, "prefill": TOKENS, "decode": TOKENS}),
    "text": ("text", {}),
    "derender": ("derender", {}),
}

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def started(coordinator: Any, fleet: SimFleet, setup: str) -> Running:
    shape, steps = SETUPS[setup]
    return await coordinator(fleet, shape, steps=steps)  # type: ignore[no-any-return]


def question(path: str, text: str, *, tool: bool = False, thinking: bool = False, **fields: Any) -> dict[str, Any]:
    """Return one question as the API of a path asks it."""
    body: dict[str, Any] = {"model": "tiny"}
    if path == COMPLETIONS:
        return {**body, "prompt": text, **fields}
    named = {"name": "get_weather", "description": "Look outside."}
    if path == RESPONSES:
        body |= {"input": text} | ({} if thinking else {"reasoning": {"effort": "none"}})
        tools: list[dict[str, Any]] = [{"type": "function", **named, "parameters": PARAMETERS, "strict": False}]
    else:
        body |= {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"enable_thinking": thinking}}
        tools = [{"type": "function", "function": {**named, "parameters": PARAMETERS}}]
    if path == MESSAGES:
        body |= {"max_tokens": 500}
        tools = [{**named, "input_schema": PARAMETERS}]
    return {**body, **({"tools": tools} if tool else {}), **fields}


async def own(worker: SimWorker, path: str, body: Any) -> Got:
    """Ask a worker itself, as if there were no coordinator."""
    async with exchange(worker.url, path, body) as live:
        await live.head()
        return await live.rest()


# What is new in every answer, whoever gives it.
_RANDOM = frozenset(
    (
        "id",
        "item_id",
        "call_id",
        "signature",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
        "generate_id",
    )
)


def comparable(value: Any, *also: str) -> Any:
    """Return an answer or its events with what differs by nature blanked: ids, times, and the names in ``also``.

    Of what an answer repeats of its request (``reasoning`` of responses), nulls count as absent.
    """
    if isinstance(value, list):
        return [comparable(item, *also) for item in value]
    if not isinstance(value, dict):
        return value
    if "effort" in value:
        value = {key: item for key, item in value.items() if item is not None}
    return {
        key: f"<{type(item).__name__}>" if key in _RANDOM and item is not None else comparable(item, *also)
        for key, item in value.items()
        if key not in also
    }

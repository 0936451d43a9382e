"""Anthropic's messages as the chat request that vLLM makes of them.

Source: vLLM 0.33 ``entrypoints/anthropic/protocol.py``, ``entrypoints/anthropic/serving.py``
(``to_chat_completion_request`` and what it calls).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.rendering.conversation import BILLING
from coordinator.rendering.fields import ChatFields, ReadFields, read
from envelope.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.json_codec import Json

EFFORTS = ("low", "medium", "high", "xhigh", "max")
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class Tool(ReadFields):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None

    def chat(self) -> Json:
        """Return the tool as chat has it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema if "type" in self.input_schema else {**self.input_schema, "type": "object"},
            "strict": self.strict,
            "defer_loading": self.defer_loading,
        }
        return {"type": "function", "function": function}


class ToolReference(ReadFields):
    type: Literal["tool_reference"]
    name: str


class ToolDefinition(ReadFields):
    type: Literal["tool_definition"]
    definition: Tool


ToolChange = Annotated[ToolReference | ToolDefinition, Field(discriminator="type")]


class Block(ReadFields):
    type: Literal[
        "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
        "tool_addition", "tool_removal",
    ]  # fmt: skip
    text: str | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    tool: ToolChange | None = None

    @property
    def changes_tools(self) -> bool:
        return self.type in ("tool_addition", "tool_removal")

    @model_validator(mode="after")
    def _names_a_tool(self) -> Block:
        if self.changes_tools and self.tool is None:
            raise ValueError(f"tool is required for {self.type} blocks")
        if self.type == "tool_removal" and not isinstance(self.tool, ToolReference):
            raise ValueError("tool_removal only accepts a tool_reference")
        return self


class Message(ReadFields):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @model_validator(mode="after")
    def _changes_tools_as_system(self) -> Message:
        if self.role != "system" and any(block.changes_tools for block in self.blocks):
            raise ValueError('tools are only added and removed in messages with role "system"')
        return self

    @property
    def blocks(self) -> list[Block]:
        return [] if isinstance(self.content, str) else self.content


class ToolChoice(ReadFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_the_tool(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("tool_choice.name is required when type is 'tool'")
        return self

    def chat(self) -> Any:
        named = {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none", "tool": named}[self.type]


class OutputFormat(ReadFields):
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(ReadFields):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Thinking(ReadFields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> Thinking:
        if self.type == "enabled" and (self.budget_tokens is None or self.budget_tokens < 1024):
            raise ValueError("thinking.budget_tokens must be at least 1024")
        return self


class MessagesFields(ReadFields):
    model: Annotated[str, Field(min_length=1)]
    messages: list[Message]
    max_tokens: Annotated[int, Field(gt=0)]
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    system: str | list[Block] | None = None
    temperature: float | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _budget_fits(self) -> MessagesFields:
        budget = self.thinking.budget_tokens if self.thinking is not None and self.thinking.type == "enabled" else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        if isinstance(self.system, list) and any(block.changes_tools for block in self.system):
            raise ValueError('tools are only added and removed in messages with role "system"')
        return self


def read_messages(body: Json, *, system_first: bool, disabled_effort: str) -> ChatFields:
    """
    Args:
        system_first: the chat template takes no system message after the first message.
        disabled_effort: the reasoning effort that stands for disabled thinking.

    Raises:
        BadRequest: vLLM's messages route would refuse the body.
    """
    asked = read(MessagesFields, body)
    chat: Json = {
        "model": asked.model,
        "messages": list(_messages(asked, system_first=system_first)),
        "max_tokens": asked.max_tokens,
        "max_completion_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "watermarking": asked.watermarking,
        "cache_salt": asked.cache_salt,
        "vllm_xargs": asked.vllm_xargs,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "tool_choice": None,
    }
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return read(ChatFields, chat | _output(asked) | _thinking(asked.thinking, disabled_effort) | _tools(asked))


def _output(asked: MessagesFields) -> Json:
    config = asked.output_config
    found: Json = {}
    if config is not None and config.format is not None and config.format.schema_:
        schema = {"name": config.format.type, "schema": config.format.schema_}
        found["response_format"] = {"type": config.format.type, "json_schema": schema}
    if config is not None and config.effort is not None:
        found["reasoning_effort"] = config.effort
    return found


def _thinking(thinking: Thinking | None, disabled_effort: str) -> Json:
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "disabled":
        return {"reasoning_effort": disabled_effort}
    return {"thinking_token_budget": thinking.budget_tokens}


def _tools(asked: MessagesFields) -> Json:
    choice = asked.tool_choice
    found: Json = {}
    if choice is not None:
        found = {"tool_choice": choice.chat(), "parallel_tool_calls": not choice.disable_parallel_tool_use}
    tools = _tools_in_effect(asked)
    if tools is not None:
        found["tools"] = [tool.chat() for tool in tools]
        found.setdefault("tool_choice", "auto")
    return found


def _tools_in_effect(asked: MessagesFields) -> list[Tool] | None:
    """Return the tools at the end of the conversation, which may have added and removed some."""
    changes = [block for message in asked.messages for block in message.blocks if block.changes_tools]
    if not changes:
        return asked.tools
    tools, removed = {tool.name: tool for tool in asked.tools or ()}, set[str]()
    for block in changes:
        change = block.tool
        if isinstance(change, ToolDefinition):
            name = change.definition.name
            tools[name] = change.definition
        else:
            assert change is not None
            name = change.name
            if name not in tools:
                raise BadRequest(f"{block.type} references tool {name!r}, which is not declared in tools")
            if block.type == "tool_addition":
                tools[name] = tools[name].model_copy(update={"defer_loading": None})
        if block.type == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _messages(asked: MessagesFields, *, system_first: bool) -> Iterator[Json]:
    system = [asked.system] if isinstance(asked.system, str) else list(_texts(asked.system or []))
    if system_first:
        system += [_system(message) for message in asked.messages if message.role == "system"]
    if any(system):
        yield {"role": "system", "content": "".join(system)}
    for message in asked.messages:
        if message.role != "system":
            yield from _turn(message)
        elif not system_first and (text := _system(message)):
            yield {"role": "system", "content": text}


def _texts(blocks: list[Block]) -> Iterator[str]:
    for block in blocks:
        if block.type == "text" and block.text and not block.text.startswith(BILLING):
            yield block.text


def _system(message: Message) -> str:
    if isinstance(message.content, str):
        return "" if message.content.startswith(BILLING) else message.content
    return "".join(_texts(message.content))


def _turn(message: Message) -> Iterator[Json]:
    """Yield a turn's messages: results of tools become messages of their own, before what else the user said."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    turn: Json = {"role": message.role}
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in message.content:
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result" and message.role == "user":
            yield from _result(block)
        elif block.type == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.content or ''}"})
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if message.role != "user" or "content" in turn:
        yield turn


def _result(block: Block) -> Iterator[Json]:
    items = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else None
    if text is None:
        text = "\n".join(item.get("text", "") for item in items if item.get("type") == "text")
    message = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    yield {**message, "content": text}
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    if found := [{"type": "tool_reference", "name": name} for name in names if name]:
        yield {**message, "content": found}

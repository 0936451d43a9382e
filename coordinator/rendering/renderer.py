"""One client's body in, the answer of vLLM's render service out.

Source: vLLM 0.33 ``entrypoints/scale_out/render/serving.py`` (``render_chat_request``, ``render_completion_request``),
``renderers/online_renderer.py``, ``renderers/params.py`` (the limits on length).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from coordinator.rendering import anthropic, fields, sampling, tokenizer
from coordinator.rendering.conversation import NEEDS_SERVICE, conversation, count_tool_calls
from coordinator.rendering.parsers import Adjusted, Parsers, Reasoning, Tools
from coordinator.rendering.threads import Threads
from envelope.client_request import single_prompt
from envelope.errors import BadRequest, LegTimeout
from envelope.formats import Format

if TYPE_CHECKING:
    from coordinator.rendering.fields import ChatFields, ClientFields
    from coordinator.rendering.template import ContentFormat
    from coordinator.rendering.tokenizer import Encoded, Tokenizer
    from envelope.json_codec import Json

APIS = (Format.CHAT, Format.COMPLETIONS, Format.MESSAGES)

# vLLM's --cohere-format: it stands among the template kwargs of every model.
_VLLM_KWARGS: Json = {"cohere_format": "cmd4"}


@dataclass(frozen=True, slots=True)
class Model:
    """The model whose prompts are rendered, and how its workers were started.

    Attributes:
        folder: with tokenizer.json, tokenizer_config.json, generation_config.json.
        max_model_len: the workers' context length in tokens.
        sha256: that of tokenizer.json; another one is refused.
        generation_config: ``auto`` is the model's own, ``vllm`` none, else a folder.
        overrides: the workers' --override-generation-config.
        template_kwargs: the workers' --default-chat-template-kwargs.
    """

    folder: str
    max_model_len: int
    sha256: str | None = None
    chat_template: str | None = None
    content_format: ContentFormat | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: str = "auto"
    overrides: Json = field(default_factory=dict)
    template_kwargs: Json = field(default_factory=dict)


class Renderer:
    """Renders chat, completions and messages requests of one model, on threads.

    Raises:
        ValueError: a sentence that says what is wrong with the model's files.
    """

    def __init__(self, model: Model, threads: int) -> None:
        self.model = model
        self.tokenizer: Tokenizer = tokenizer.load(model.folder, model.chat_template, model.content_format)
        if model.sha256 is not None and model.sha256 != self.tokenizer.sha256:
            raise ValueError(
                f"{model.folder}/tokenizer.json has the SHA-256 {self.tokenizer.sha256}, not that of tokenizer_sha"
            )
        self._parsers = Parsers(
            Tools(model.tool_parser) if model.tool_parser else None,
            Reasoning(model.reasoning_parser, self.tokenizer.id_of) if model.reasoning_parser else None,
        )
        own = model.generation_config == "auto"
        folder = model.folder if own else model.generation_config
        found = {} if folder == "vllm" else tokenizer.generation_config(folder)
        self._defaults = sampling.model_defaults({**found, **model.overrides})
        stated = own or model.generation_config == "vllm"
        self._most = model.overrides.get("max_new_tokens") if stated else self._defaults.get("max_tokens")
        self._template_kwargs = {**_VLLM_KWARGS, **model.template_kwargs}
        self._threads = Threads(threads)

    async def render(self, api: Format, body: Json, request_id: str, timeout_s: float | None) -> Json:
        """Return the generate request behind a client's.

        Raises:
            BadRequest: vLLM would refuse the request, or only a render service can do what it asks for.
            LegTimeout: it took too long, the wait for a thread included.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._threads.run(partial(self.render_now, api, body, request_id))
        except TimeoutError:
            raise LegTimeout("render", f"the prompt was not rendered within {timeout_s:g} s") from None

    def render_now(self, api: Format, body: Json, request_id: str) -> Json:
        """As ``render``, on the caller's thread."""
        if api is Format.CHAT:
            return self._chat(fields.read_chat(body), request_id)
        if api is Format.COMPLETIONS:
            return self._completion(body, request_id)
        if api is Format.MESSAGES:
            return self._messages(body, request_id)
        raise BadRequest(NEEDS_SERVICE.format(f"the {api} API"))

    @property
    def facts(self) -> Json:
        """What an operator may want to hold against the workers: for the log."""
        template = self.tokenizer.template
        return {
            "tokenizer": self.model.folder,
            "tokenizer_sha": self.tokenizer.sha256,
            "tokens": self.tokenizer.size,
            "content_format": None if template is None else "openai" if template.parts else "string",
        }

    async def run(self) -> None:
        """Stay until cancelled, and let the threads end then."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._threads.close()

    def _chat(self, asked: ChatFields, request_id: str) -> Json:
        cap = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        self._check_cap(asked, cap)
        adjusted = self._parsers.adjust(asked)
        kwargs = self._kwargs(asked)
        tools = None if asked.tools is None else [tool.written() for tool in asked.tools]
        text = self._templated(asked, tools, kwargs)
        encoded = self._encode(text, asked)
        return {
            **self._generate(asked, encoded, f"chatcmpl-{request_id}", adjusted),
            "reasoning_ended": self._parsers.reasoning_ended(asked, encoded.token_ids, kwargs),
            "reasoning_parser_kwargs": {"chat_template_kwargs": kwargs} if self._parsers.reasoning else None,
            "parse_context": {
                "tools": tools,
                "tool_choice": asked.model_dump(include={"tool_choice"})["tool_choice"],
                "parallel_tool_calls": asked.parallel_tool_calls,
                "include_reasoning": asked.include_reasoning,
                "chat_template_kwargs": kwargs,
                "history_tool_call_cnt": count_tool_calls(asked.messages),
            },
        }

    def _messages(self, body: Json, request_id: str) -> Json:
        template = self.tokenizer.template
        thinking = body.get("thinking")
        off = isinstance(thinking, dict) and thinking.get("type") == "disabled"
        asked = anthropic.read_messages(
            body,
            system_first=template is None or not template.system_later,
            disabled_effort=self._disabled_effort if off else "none",
        )
        return self._chat(asked, request_id)

    @cached_property
    def _disabled_effort(self) -> str:
        """The effort that disabled thinking is: low, where the template refuses none or takes it for another."""
        none = self._probed("none")
        seen = [self._probed(effort) for effort in anthropic.EFFORTS]
        return "low" if none is None or none in seen else "none"

    def _probed(self, effort: str) -> str | None:
        asked = fields.read_chat({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        try:
            return self._templated(asked, None, self._kwargs(asked))
        except BadRequest:
            return None

    def _completion(self, body: Json, request_id: str) -> Json:
        prompt = single_prompt(body)
        if prompt is None:
            raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        asked = fields.read_completion(body)
        self._check_cap(asked, "max_tokens")
        encoded = (
            self._encode(prompt, asked) if isinstance(prompt, str) else self._fitting(tokenizer.Encoded(prompt, None))
        )
        return self._generate(asked, encoded, f"cmpl-{request_id}", Adjusted(asked.constraint(), None))

    def _kwargs(self, asked: ChatFields) -> Json:
        """Return what the template is given beside messages and tools; a later one wins, unless it says nothing."""
        own = asked.chat_template_kwargs or {}
        extra: Json = {
            "add_generation_prompt": asked.add_generation_prompt,
            "continue_final_message": asked.continue_final_message,
            "documents": asked.documents,
            "reasoning_effort": asked.reasoning_effort,
        }
        if asked.reasoning_effort is not None and "enable_thinking" not in own:
            extra["enable_thinking"] = asked.reasoning_effort != "none"
        return {**self._template_kwargs, **_said({**own, **_said(extra)})}

    def _templated(self, asked: ChatFields, tools: list[Json] | None, kwargs: Json) -> str:
        template = self.tokenizer.template
        messages = conversation(
            asked.messages,
            parts=template is not None and template.parts,
            developers=template is None or template.developers,
        )
        return self.tokenizer.apply_template(messages, tools, kwargs)

    def _encode(self, text: str, asked: ChatFields | fields.CompletionFields) -> Encoded:
        """
        Raises:
            BadRequest: the text is longer than the context.
        """
        most, limit = self.model.max_model_len, self.model.max_model_len * self.tokenizer.max_chars_per_token
        if len(text) > limit:
            raise BadRequest(
                f"This model's maximum context length is {most} tokens. However, your prompt contains {len(text)} "
                f"characters (more than {limit} characters, which is the upper bound for {most} input tokens). Please "
                f"reduce the length of the input prompt. (parameter=input_text, value={len(text)})",
                param="input_text",
            )
        return self._fitting(self.tokenizer.encode(text, add_special_tokens=asked.add_special_tokens))

    def _fitting(self, encoded: Encoded) -> Encoded:
        """
        Raises:
            BadRequest: the prompt is longer than the context, or there is none.
        """
        most = self.model.max_model_len
        if len(encoded.token_ids) > most:
            raise BadRequest(
                f"This model's maximum context length is {most} tokens. However, your prompt contains at least "
                f"{most + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={most + 1})",
                param="input_tokens",
            )
        if not encoded.token_ids:
            raise BadRequest("No token_ids rendered")
        return encoded

    def _check_cap(self, asked: ClientFields, name: str) -> None:
        cap, most = getattr(asked, name), self.model.max_model_len
        if cap is not None and cap > most:
            raise BadRequest(
                f"{name}={cap} cannot be greater than max_model_len={most}. Please request fewer output tokens. "
                f"(parameter={name}, value={cap})",
                param=name,
            )

    def _generate(self, asked: ClientFields, encoded: Encoded, request_id: str, adjusted: Adjusted) -> Json:
        tokens = len(encoded.token_ids)
        cap = sampling.output_cap(asked.asked_tokens, tokens, self.model.max_model_len, self._defaults, self._most)
        return {
            "request_id": request_id,
            "token_ids": encoded.token_ids,
            "token_offsets": encoded.offsets if asked.return_token_offsets else None,
            "features": None,
            "content_parts": None,
            "sampling_params": sampling.sampling_params(asked, cap, self._defaults, adjusted),
            "model": asked.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": asked.return_token_ids,
            "output_mode": "tokens",
            "parse_context": None,
            "stream": bool(asked.stream),
            "stream_options": _stream_options(asked),
            "cache_salt": asked.cache_salt,
            "priority": asked.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }


def _said(kwargs: Json) -> Json:
    return {key: value for key, value in kwargs.items() if value not in (None, "auto")}


def _stream_options(asked: ClientFields) -> Any:
    if not asked.stream or asked.stream_options is None:
        return None
    return {"include_usage": False, "continuous_usage_stats": False, **asked.stream_options}

"""vLLM's own parsers, driven as its servers drive them: one parser per choice, fed once per chunk.

The entry points are those of the chat route and of the derender routes: ``ChatStreamProcessor`` for streams,
``Parser.parse`` and ``assemble_chat_message_fields`` for whole answers, and ``ParseContext`` for what both depend on.
Nothing of a parser is written here.

vLLM is imported inside functions: only a parser process comes this far, and it takes some ten seconds.

Source: vLLM 0.33 ``renderers/online_derenderer.py`` and ``entrypoints/openai/chat_completion/stream_processor.py``.
"""

from __future__ import annotations

import difflib
import importlib
import os
from typing import Any

from coordinator.derender.vllm_detokenizer import Detokenized, counts, with_prompt_texts

Json = dict[str, Any]

# What requests need of vLLM beside what a parser needs: loaded at the start, so that the first of a kind, and all that
# are parsed beside it, need not wait.
_OF_REQUESTS = (
    "vllm.entrypoints.openai.chat_completion.message_assembly",
    "vllm.entrypoints.openai.chat_completion.stream_processor",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol",
    "vllm.renderers.online_derenderer",
    "vllm.v1.engine.detokenizer",
    "vllm.v1.engine.logprobs",
)


class Unusable(Exception):
    """What the configuration names cannot be used; the text is one for the operator."""


class Refused(Exception):
    """What the request asks for cannot be parsed; the text is one for the client."""


class Parsers:
    """The tokenizer and the parsers that a configuration names.

    Raises:
        Unusable: there is no such parser, it does not go with the tokenizer, or there is no tokenizer.
    """

    def __init__(self, *, tokenizer: str, tool_parser: str | None, reasoning_parser: str | None) -> None:
        from vllm.parser import ParserManager

        _check_name("tool_parser", tool_parser, _tool_parsers())
        _check_name("reasoning_parser", reasoning_parser, _reasoning_parsers())
        self.model_config, self.tokenizer = _load(tokenizer)
        hf_config = getattr(self.model_config, "hf_config", None)
        try:
            self.parser_cls = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                model_name=tokenizer,
                is_harmony=getattr(hf_config, "model_type", None) == "gpt_oss",
                tokenizer=self.tokenizer,
            )
        except (TypeError, ValueError) as error:
            raise Unusable(str(error)) from error
        self.auto_tools = tool_parser is not None
        for module in _OF_REQUESTS:
            importlib.import_module(module)

    @property
    def facts(self) -> Json:
        """What the coordinator wants to know of the model: the token that ends an answer, or None."""
        return {"eos_token_id": self.tokenizer.eos_token_id}

    def stream(self, job: Json) -> StreamParse:
        """Begin a stream: its parsers are made here, one per choice."""
        return StreamParse(self, job)

    def whole(self, job: Json, reply: Json) -> Json:
        """Return a whole generate answer with a ``message`` on each choice; its ``text`` alone where none is parsed."""
        choices = reply["choices"]
        if job["decoding"]:
            each = [Detokenized(self.tokenizer, job) for _ in choices]
            choices = [detokenized.choice(choice) for detokenized, choice in zip(each, choices, strict=True)]
            if any(detokenized.stopped for detokenized in each):
                reply = {**reply, "usage": {**(reply.get("usage") or {}), **counts(job, each)}}
            if reply.get("prompt_logprobs"):
                reply = {**reply, "prompt_logprobs": with_prompt_texts(self.tokenizer, reply["prompt_logprobs"])}
        if job["context"] is None:
            return {**reply, "output_mode": "text", "choices": choices}
        request = self.request(job)
        choices = [self._message(job, request, choice) for choice in choices]
        return {**reply, "output_mode": "derender", "choices": choices}

    def request(self, job: Json) -> Any:
        """Return the chat request behind a job, as the generate route makes it of its ``parse_context``."""
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import ParseContext
        from vllm.exceptions import VLLMValidationError

        try:
            return ParseContext.model_validate(job["context"]).to_chat_request()
        except (VLLMValidationError, ValueError) as error:
            raise Refused(str(error)) from error

    def parser(self, job: Json, request: Any) -> Any:
        """Return a parser for one choice, or None where only text is to be had."""
        if self.parser_cls is None:
            return None
        parser = self.parser_cls(
            self.tokenizer,
            request.tools,
            chat_template_kwargs=request.chat_template_kwargs or {},
            model_config=self.model_config,
        )
        parser.set_history_tool_call_count(job["context"].get("history_tool_call_cnt") or 0)
        return parser

    def _message(self, job: Json, request: Any, choice: Json) -> Json:
        from vllm.entrypoints.openai.chat_completion.message_assembly import assemble_chat_message_fields
        from vllm.entrypoints.openai.chat_completion.protocol import ChatMessage
        from vllm.entrypoints.serve.utils.tool_calls_utils import resolve_finish_reason

        parser = self.parser(job, request)
        if parser is None:
            message = ChatMessage(role="assistant", content=choice["text"])
        else:
            parser.set_prompt_token_ids(job["prompt"])
            reasoning, content, calls = parser.parse(
                choice["text"],
                request,
                enable_auto_tools=self.auto_tools,
                model_output_token_ids=choice.get("token_ids") or [],
            )
            fields = assemble_chat_message_fields(
                request, reasoning, content, calls, enable_auto_tools=self.auto_tools, parser_cls=self.parser_cls
            )
            message = ChatMessage(
                role="assistant", reasoning=fields.reasoning, content=fields.content, tool_calls=fields.tool_calls
            )
        finish = resolve_finish_reason(choice.get("finish_reason"), request, bool(message.tool_calls))
        made = {key: value for key, value in choice.items() if key != "text"}
        made |= {"message": message.model_dump(mode="json"), "finish_reason": finish}
        return hidden(made) if parser is not None and not request.include_reasoning else made


class StreamParse:
    """One request's stream: chunks go in as generate sends them, and come out with a ``delta`` on each choice.

    Without a ``context`` nothing is parsed and choices keep their ``text``.
    """

    def __init__(self, parsers: Parsers, job: Json) -> None:
        self._job = job
        self._prompt: list[int] = job["prompt"]
        self._processors: list[Any] = []
        self._detokenizers = [Detokenized(parsers.tokenizer, job) for _ in range(job["n"])] if job["decoding"] else []
        self._ours = False  # a choice was ended here, which the worker cannot know
        if job["context"] is not None:
            self._processors = [self._processor(parsers, parsers.request(job)) for _ in range(job["n"])]

    def _processor(self, parsers: Parsers, request: Any) -> Any:
        from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor

        return ChatStreamProcessor(
            request,
            parsers.parser(self._job, request),
            enable_auto_tools=parsers.auto_tools,
            parser_cls=parsers.parser_cls,
        )

    @property
    def over(self) -> bool:
        """Whether every choice has ended here, so that nothing more is wanted of the worker."""
        return self._ours and all(choice.ended for choice in self._detokenizers)

    def chunk(self, chunk: Json) -> Json | None:
        """Return a chunk, parsed; None where there is nothing of it to tell."""
        choices = chunk.get("choices")
        if not choices:
            return self._counted(chunk)
        made = [parsed for choice in choices if (parsed := self._choice(choice)) is not None]
        if not made:
            return None
        return {**chunk, "output_mode": "derender" if self._processors else "text", "choices": made}

    def usage(self, chunk: Json) -> Json:
        """Return the usage chunk of a stream that was ended here."""
        return {"request_id": chunk.get("request_id"), "usage": counts(self._job, self._detokenizers), "choices": []}

    def _counted(self, chunk: Json) -> Json:
        if not (self._ours and chunk.get("usage")):
            return chunk
        return {**chunk, "usage": {**chunk["usage"], **counts(self._job, self._detokenizers)}}

    def _choice(self, choice: Json) -> Json | None:
        index = choice["index"]
        if self._detokenizers:
            detokenized = self._detokenizers[index].choice(choice)
            if detokenized is None:
                return None
            self._ours = self._ours or self._detokenizers[index].stopped
            choice = detokenized
        return self._parsed(self._processors[index], choice) if self._processors else choice

    def _parsed(self, processor: Any, choice: Json) -> Json | None:
        text, token_ids, finish = choice["text"], choice.get("token_ids") or [], choice.get("finish_reason")
        if not text and not token_ids and not processor.num_output_tokens and finish is None:
            return None  # a prompt that is still being computed
        step = processor.step(text, token_ids, finish, self._prompt)
        delta = None if step.delta is None else step.delta.model_dump(mode="json", exclude_unset=True)
        made = {key: value for key, value in choice.items() if key != "text"}
        made |= {"delta": delta, "finish_reason": step.finish_reason}
        return hidden(made) if processor.hide_metadata else made


def hidden(choice: Json) -> Json:
    """Return a choice without what would tell of reasoning that the client does not want to see."""
    return {**choice, "logprobs": None, "token_ids": None, "sampling_mask": None}


def _load(path: str) -> tuple[Any, Any]:
    """Return the model's configuration, or None where the folder has none, and its tokenizer."""
    from vllm.config import ModelConfig
    from vllm.tokenizers import cached_tokenizer_from_config, get_tokenizer

    mode = "mistral" if _in_mistral_s_format_alone(path) else "auto"
    try:
        if os.path.exists(os.path.join(path, "config.json")):
            config = ModelConfig(model=path, tokenizer=path, tokenizer_mode=mode)
            return config, cached_tokenizer_from_config(config)
        return None, get_tokenizer(path, tokenizer_mode=mode)
    except Exception as error:  # whatever transformers says of a folder that holds no tokenizer
        raise Unusable(f"tokenizer: {path} cannot be loaded: {type(error).__name__}: {error}") from error


def _in_mistral_s_format_alone(path: str) -> bool:
    """Say whether there is no other tokenizer in a folder than one in Mistral's own format.

    vLLM takes that one where the weights' name is Mistral's too (``consolidated*.safetensors``); here are no weights.
    """
    names = os.listdir(path)
    return "tokenizer.json" not in names and any(
        name == "tekken.json" or name.startswith("tokenizer.model.v") for name in names
    )


def _tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


def _reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return sorted(ReasoningParserManager.list_registered())


def _check_name(key: str, name: str | None, known: list[str]) -> None:
    if name is None or name in known:
        return
    near = difflib.get_close_matches(name, known, n=3)
    hint = f", did you mean {' or '.join(near)}?" if near else f"; vLLM has {', '.join(known)}"
    raise Unusable(f"{key}: vLLM has no {name!r}{hint}")

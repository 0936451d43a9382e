"""From an OpenAI request to an engine request: what render answers, and what the native routes run.

Source: recordings ``render/`` and ``errors/{chat,completion,render}_*``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim import media, tokenizer
from coordinator.sim.generate_request import check_named_tool
from coordinator.sim.refusals import Refusal, unknown_model, value_error
from coordinator.sim.sampling import Sampling
from coordinator.sim.schema import Schema
from coordinator.sim.structured import structural_tag, structured_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.sim.media import Media
    from coordinator.sim.settings import Settings

# The model's generation_config.json: used where the client leaves a value unset.
_GENERATION_CONFIG = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
_SAME_NAME = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words",
    "thinking_token_budget",
)  # fmt: skip


@dataclass(slots=True)
class Prepared:
    """One prompt, ready for the engine.

    Attributes:
        text: of the prompt; None where it came as token ids.
        context: the ``parse_context``; None where no parser runs.
        template_kwargs: what the template was given beside messages and tools.
    """

    token_ids: list[int]
    text: str | None
    sampling: Sampling
    context: dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()

    @property
    def reasoning_ended(self) -> bool:
        hidden = (self.context or {}).get("include_reasoning") is False
        return hidden or self.template_kwargs.get("enable_thinking") is False


def check_common(body: Mapping[str, Any], settings: Settings) -> None:
    """Check what the chat and completions routes, and their renders, have in common.

    Raises:
        Refusal
    """
    schema = Schema(body)
    schema.strings("model", "request_id", "cache_salt", "user")
    schema.booleans("stream", "echo", "return_token_ids", "include_reasoning", "ignore_eos")
    schema.numbers("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    schema.integers("n", "top_k", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs")
    schema.objects("kv_transfer_params", "ec_transfer_params", "stream_options", "vllm_xargs", "logit_bias")
    schema.objects("mm_processor_kwargs", "media_io_kwargs", "chat_template_kwargs", "response_format")
    schema.priority()
    schema.done()
    if body.get("stream_options") is not None and not body.get("stream"):
        raise value_error("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.get("model") and body["model"] != settings.model:
        raise unknown_model(body["model"], settings.model)
    media.check_trusted(body, trusted=settings.trust_mm_kwargs)


def prepare_chat(body: Mapping[str, Any], settings: Settings) -> Prepared:
    """
    Raises:
        Refusal: vLLM's chat route would refuse the request.
    """
    schema = Schema(body)
    schema.required("messages")
    schema.objects_in("messages", "tools")
    schema.done()
    for at, message in enumerate(body["messages"]):
        if "role" not in message:
            schema.wrong(f"body.messages.{at}.role", "missing", "Field required", message)
    schema.done()
    check_common(body, settings)
    _check_chat(body, settings)
    return prepare_conversation(
        body,
        settings,
        messages=body["messages"],
        tools=body.get("tools"),
        choice=tool_choice(body),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        logprobs=(body.get("top_logprobs") or 0) if body.get("logprobs") else None,
    )


def _check_chat(body: Mapping[str, Any], settings: Settings) -> None:
    if body.get("tools") == []:
        raise value_error(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise value_error("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    choice = tool_choice(body)
    check_named_tool(choice, body.get("tools"))
    if choice == "required" and not body.get("tools"):
        raise value_error("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if choice == "auto" and body.get("tools") and not settings.parsers:
        raise Refusal('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if settings.tokens_only:
        raise Refusal("Tokenizer not available when `skip_tokenizer_init=True`")


def tool_choice(body: Mapping[str, Any]) -> Any:
    if body.get("tool_choice") is not None:
        return body["tool_choice"]
    return "auto" if body.get("tools") else "none"


def prepare_conversation(
    body: Mapping[str, Any],
    settings: Settings,
    *,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None,
    choice: Any,
    max_tokens: int | None,
    logprobs: int | None,
    effort: str | None = None,
) -> Prepared:
    """Template and tokenize messages, whatever API they came from.

    Raises:
        Refusal: the prompt is too long, or a sampling value is out of range.
    """
    kwargs = template_kwargs(body, effort or body.get("reasoning_effort"))
    vocabulary = tokenizer.load()
    reused = reused_ids(body)
    found: list[Media] = []
    flat = [_flat(message, found, body) for message in messages]
    try:
        text = vocabulary.apply_template(flat, tools, kwargs)
    except Exception as error:
        raise Refusal(str(error)) from error
    token_ids, there = media.placed(vocabulary, text, found)
    if reused is not None and not found:  # beside media, ids are left unread
        token_ids = reused
    check_length(len(token_ids), settings, exact=False)
    sampling = sampling_of(
        body,
        settings,
        prompt=len(token_ids),
        max_tokens=max_tokens,
        logprobs=logprobs,
        tag=structural_tag(tools, choice),
    )
    if settings.parsers and "skip_special_tokens" not in body:
        sampling.skip_special_tokens = False
    context = {
        "tools": tools,
        "tool_choice": _ordered(choice),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "include_reasoning": body.get("include_reasoning") is not False,
        "chat_template_kwargs": kwargs,
        "history_tool_call_cnt": sum(len(message.get("tool_calls") or ()) for message in messages),
    }
    return Prepared(token_ids, media.shown(text, found), sampling, context, kwargs, there)


def prepare_completions(body: Mapping[str, Any], settings: Settings) -> list[Prepared]:
    """Return one per prompt.

    Raises:
        Refusal: vLLM's completions route would refuse the request.
    """
    check_common(body, settings)
    prompt = body.get("prompt")
    if not prompt:
        raise value_error("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if not isinstance(prompt, str | list):
        schema = Schema(body)
        schema.wrong("body.prompt", "string_type", "Input should be a valid string", prompt)
        schema.done()
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    prepared = []
    for one in prompts:
        if settings.tokens_only and isinstance(one, str):
            raise Refusal("Tokenizer not available when `skip_tokenizer_init=True`")
        token_ids = tokenizer.load().encode(one) if isinstance(one, str) else list(one)
        check_length(len(token_ids), settings, exact=not isinstance(one, str))
        given = 16 if body.get("max_tokens") is None else body["max_tokens"]
        sampling = sampling_of(body, settings, prompt=len(token_ids), max_tokens=given, logprobs=body.get("logprobs"))
        if body.get("echo") and sampling.logprobs is not None:
            sampling.prompt_logprobs = sampling.logprobs
        prepared.append(Prepared(token_ids, one if isinstance(one, str) else None, sampling))
    return prepared


def sampling_of(
    body: Mapping[str, Any],
    settings: Settings,
    *,
    prompt: int,
    max_tokens: int | None,
    logprobs: int | None,
    tag: str | None = None,
) -> Sampling:
    """Turn an OpenAI request's generation fields into the engine's.

    Args:
        prompt: its length in tokens.
        tag: the structural tag of a forced tool call.

    Raises:
        Refusal: a value is out of range.
    """
    limit = settings.max_model_len
    if max_tokens is not None and max_tokens > limit:
        raise value_error(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            param="max_tokens",
            value=max_tokens,
        )
    given = dict(_GENERATION_CONFIG) | {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    given["max_tokens"] = limit - prompt if max_tokens is None else min(max_tokens, limit - prompt)
    given["logprobs"] = logprobs
    given["output_kind"] = 1 if body.get("stream") else 2
    given["stream_interval"] = body.get("stream_interval")
    given["extra_args"] = body.get("vllm_xargs")
    structure = structured_outputs(body, tag)
    if structure is not None:
        given["structured_outputs"] = structure
    if body.get("logit_bias"):
        given["logit_bias"] = {str(id): float(bias) for id, bias in body["logit_bias"].items()}
    return Sampling.of(given)


def template_kwargs(body: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"cohere_format": "cmd4", **(body.get("chat_template_kwargs") or {})}
    kwargs["add_generation_prompt"] = body.get("add_generation_prompt") is not False
    kwargs["continue_final_message"] = bool(body.get("continue_final_message"))
    if effort is not None:
        kwargs |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return kwargs


def reused_ids(body: Mapping[str, Any]) -> list[int] | None:
    """Return ``kv_transfer_params.prompt_token_ids``, which takes the place of templating.

    Raises:
        Refusal: it is no list of token ids.
    """
    params = body.get("kv_transfer_params") or {}
    if "prompt_token_ids" not in params:
        return None
    ids = params["prompt_token_ids"]
    if not (isinstance(ids, list) and ids and all(type(id) is int and id >= 0 for id in ids)):
        raise value_error(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
            param="kv_transfer_params.prompt_token_ids",
        )
    return ids


def check_length(length: int, settings: Settings, *, exact: bool) -> None:
    """
    Args:
        exact: the prompt came as ids; a text is cut while it is tokenized, and its length is then only a bound.

    Raises:
        Refusal: the prompt is longer than the context.
    """
    limit = settings.max_model_len
    if length <= limit:
        return
    shown = length if exact else limit + 1
    raise value_error(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{'' if exact else 'at least '}{shown} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
        value=shown,
    )


def _flat(message: Mapping[str, Any], found: list[Media], body: Mapping[str, Any]) -> dict[str, Any]:
    """Join parts, as vLLM does for templates that want strings; media leaves a mark and goes to ``found``."""
    flat = dict(message)
    if isinstance(flat.get("content"), list):
        flat["content"] = "\n".join(_text_of(part, found, body) for part in flat["content"])
    return flat


def _text_of(part: Any, found: list[Media], body: Mapping[str, Any]) -> str:
    item = media.media_of(part, body)
    if item is None:
        return part if isinstance(part, str) else str(part.get("text", ""))
    found.append(item)
    return media.mark(len(found) - 1)


def _ordered(choice: Any) -> Any:
    return {"function": choice["function"], "type": "function"} if isinstance(choice, dict) else choice

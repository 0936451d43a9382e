"""A client's body as vLLM's chat and completions routes read it: the types they take, their defaults, what they refuse.

The types are vLLM's own, so that ``"temperature": "0.5"`` or ``"n": 2.0`` are read here as they are there. What vLLM
would take and a coordinator cannot resolve is refused with the words of ``NEEDS_SERVICE``: nothing is dropped silently.

Source: vLLM 0.33 ``entrypoints/openai/{chat_completion,completion}/protocol.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coordinator.rendering.conversation import NEEDS_SERVICE
from envelope.errors import BadRequest

if TYPE_CHECKING:
    from envelope.json_codec import Json

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Stop = str | Annotated[list[str], Field(max_length=4)] | None
NoneIsZero = Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)]

# What only a render service can do: it has the model's processor, or the engine's grammars, or more than one beam.
_SERVICE_ONLY = (
    *("truncate_prompt_tokens", "truncation_side", "prompt_embeds", "suffix"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class ReadFields(BaseModel):
    """What is read of an object; other keys are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class StructuredOutputs(ReadFields):
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetection(ReadFields):
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class JsonSchema(ReadFields):
    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(ReadFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(ReadFields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(ReadFields):
    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None

    def written(self) -> Json:
        """Return the tool as templates and parsers see it: what was not said of strictness or loading stays out."""
        outer = {} if self.defer_loading is None else {"defer_loading": self.defer_loading}
        function = self.function.model_dump()
        if function["defer_loading"] is None:
            function |= outer
        for name in ("strict", "defer_loading"):
            if function.get(name) is None:
                function.pop(name, None)
        return {"type": self.type, "function": function, **outer}


class NamedFunction(ReadFields):
    name: str


class NamedTool(ReadFields):
    function: NamedFunction
    type: Literal["function"] = "function"


class ClientFields(ReadFields):
    """What chat and completions have in common."""

    max_tokens_names: ClassVar[tuple[str, ...]]

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    watermarking: bool | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = 1
    seed: Int64 | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Field(strict=True, ge=-1)] | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = False
    echo: bool | None = False
    use_beam_search: bool = False

    @property
    def asked_tokens(self) -> int | None:
        """The cap on the output that was asked for."""
        return next((value for name in self.max_tokens_names if (value := getattr(self, name)) is not None), None)

    @property
    @abstractmethod
    def sampled_logprobs(self) -> int | None:
        """How many logprobs each output token has."""

    @property
    @abstractmethod
    def echoed_logprobs(self) -> int | None:
        """How many logprobs of the prompt an echo has."""

    @property
    def only_echoes(self) -> bool:
        return False

    def constraint(self) -> Json | None:
        """Return what the output is constrained to, in ``structured_outputs``'s keys.

        Raises:
            BadRequest: to more than one thing.
        """
        own: Json = {}
        if self.structured_outputs is not None:
            own = _one(self.structured_outputs.model_dump(by_alias=True))
        form = self.response_format
        if form is None or form.type == "text":
            return own or None
        asked = {"json_object": True} if form.json_schema is None else {"json": form.json_schema.schema_}
        return _one({**own, **asked})


def _one(constraint: Json) -> Json:
    if sum(constraint.get(name) is not None for name in _CONSTRAINTS) != 1:
        raise BadRequest(
            f"structured outputs take exactly one constraint of {', '.join(_CONSTRAINTS[:-1])}",
            param="structured_outputs",
        )
    return constraint


Fields = TypeVar("Fields", bound=ReadFields)


class ChatFields(ClientFields):
    max_tokens_names = ("max_completion_tokens", "max_tokens")

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: NoneIsZero = 0
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def sampled_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def echoed_logprobs(self) -> int | None:
        return self.top_logprobs if self.echo else None


class CompletionFields(ClientFields):
    max_tokens_names = ("max_tokens",)

    n: int = 1
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def sampled_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def only_echoes(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


def read_chat(body: Json) -> ChatFields:
    """
    Raises:
        BadRequest: vLLM's chat route would refuse the body, or only a render service can do what it asks for.
    """
    _check_common(body)
    _check_logprobs(body, body.get("logprobs"), counts=("prompt_logprobs", "top_logprobs"))
    if body.get("tools") == []:
        raise BadRequest(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    kwargs = body.get("chat_template_kwargs")
    if body.get("chat_template") is not None or (isinstance(kwargs, dict) and kwargs.get("chat_template") is not None):
        raise BadRequest(
            "Chat template is passed with request, and templates of clients are not trusted.", param="chat_template"
        )
    if body.get("tools") and "tool_choice" not in body:
        body = {**body, "tool_choice": "auto"}
    fields = read(ChatFields, body)
    _check_tool_choice(fields)
    for at, message in enumerate(fields.messages):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{at}].role must be a string", param=f"messages[{at}].role")
    return fields


def read_completion(body: Json) -> CompletionFields:
    """
    Raises:
        BadRequest: as ``read_chat``.
    """
    _check_common(body)
    _check_logprobs(body, body.get("logprobs") is not None, counts=("prompt_logprobs", "logprobs"))
    given = {name: value for name, value in body.items() if name != "prompt"}
    if given.get("max_tokens") is None:
        given["max_tokens"] = 16
    fields = read(CompletionFields, given)
    if fields.logprob_token_ids and fields.only_echoes:
        raise BadRequest(
            "`logprob_token_ids` is not supported when `echo=True` and `max_tokens=0` because no output tokens are "
            "generated.",
            param="logprob_token_ids",
        )
    return fields


def _check_common(body: Json) -> None:
    for name in _SERVICE_ONLY:
        if body.get(name) is not None:
            raise BadRequest(NEEDS_SERVICE.format(name), param=name)
    if body.get("use_beam_search"):
        raise BadRequest("Beam search is not supported by the render endpoint", param="use_beam_search")
    for name in ("response_format", "structured_outputs"):
        value = body.get(name)
        if isinstance(value, dict) and (value.get("type") == "structural_tag" or value.get("structural_tag")):
            raise BadRequest(NEEDS_SERVICE.format(f"a structural tag in {name}"), param=name)
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise BadRequest(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            param="response_format",
        )
    if body.get("stream_options") and not body.get("stream"):
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")


def _check_logprobs(body: Json, asked: Any, *, counts: tuple[str, ...]) -> None:
    if body.get("logprob_token_ids") and not asked:
        raise BadRequest("when using `logprob_token_ids`, `logprobs` must be set.", param="logprob_token_ids")
    for name in counts:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise BadRequest(f"`{name}` must be an integer.", param=name)
        if value < 0 and value != -1:
            raise BadRequest(f"`{name}` must be a positive value or -1.", param=name)
    if body.get("stream") and body.get("prompt_logprobs"):
        raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")


def _check_tool_choice(fields: ChatFields) -> None:
    if fields.tool_choice in ("none", None):
        return
    if fields.tools is None:
        raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if not isinstance(fields.tool_choice, NamedTool):
        return
    own = fields.structured_outputs
    if own is not None and (own.json_, own.regex, own.choice) != (None, None, None):
        raise BadRequest(
            "You can only either use constraints for structured outputs or tools, not both.",
            param="structured_outputs",
        )
    name = fields.tool_choice.function.name
    if all(tool.function.name != name for tool in fields.tools):
        raise BadRequest(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", param="tool_choice"
        )


def read(model: type[Fields], body: Json) -> Fields:
    """
    Raises:
        BadRequest: the body is not what the model describes.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{where}: {said}" if where else said, param=where or None) from None

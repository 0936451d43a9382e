"""Step type -> class, and the steps that a configuration names, built and checked against one another.

A pipeline that cannot work is refused here, before a port is bound. Each rule is one function that yields the
path at fault and a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import SchemaSerializer, core_schema

from coordinator.config import Config, ConfigError, EcConnectorName, KvConnectorName, Pool
from coordinator.problems import Path, nearest, sentences
from coordinator.step import PipelineSettings
from coordinator.units import origin
from envelope.formats import Format
from envelope.kv_transfer import KV_CONNECTORS
from steps import conditional_decode, decode, encode, prefill, render, replace_media_urls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.step import Events, Step


class StepType(NamedTuple):
    """A class of steps, whose workers it asks, and the model of its params."""

    make: Callable[[Any, PipelineSettings], Step]
    role: str | None
    params: type[BaseModel]


STEP_TYPES: dict[str, StepType] = {
    "replace-media-urls": StepType(
        replace_media_urls.ReplaceMediaUrls,
        replace_media_urls.ReplaceMediaUrls.role,
        replace_media_urls.Params,
    ),
    "render": StepType(render.Render, render.Render.role, render.Params),
    "conditional-decode": StepType(
        conditional_decode.ConditionalDecode,
        conditional_decode.ConditionalDecode.role,
        conditional_decode.Params,
    ),
    "encode": StepType(encode.Encode, encode.Encode.role, encode.Params),
    "prefill": StepType(prefill.Prefill, prefill.Prefill.role, prefill.Params),
    "decode": StepType(decode.Decode, decode.Decode.role, decode.Params),
}

_LATER = {
    "async-broker": "async-broker (requests that queue) comes in a later release, take the step out",
    "force-stream": "force-stream comes in a later release, take the step out",
    "prefill-decode": "prefill-decode (both legs in flight at once) comes in a later release, "
    "write a prefill and a decode step",
}

Fault = tuple[Path, str]


def build(config: Config, events: Events) -> list[Step]:
    """Make the steps that the file names, in its order.

    Raises:
        ConfigError: with everything that is wrong with the steps, alone or together.
    """
    settings = PipelineSettings(
        kv=KV_CONNECTORS[config.pipeline.kv_connector],
        use_openai_format=config.pipeline.use_openai_format,
        on_missing_handover=config.pipeline.on_missing_handover,
        expose_transfer_params=config.pipeline.expose_transfer_params,
        events=events,
    )
    faults: list[Fault] = []
    placed = tuple(_place(config, index, settings, faults) for index in range(len(config.pipeline.steps)))
    layout = Layout(config, placed)
    for rule in RULES:
        faults += rule(layout)
    if faults:
        raise ConfigError([config.sources.problem(path, sentence) for path, sentence in faults])
    return [step.step for step in placed if step.step is not None]


@dataclass(frozen=True, slots=True)
class Placed:
    """A step at its place in the file.

    ``params`` and ``step`` are None where the params are wrong: its place is checked all the same. A type
    that is not known stands here as the one that was probably meant.
    """

    index: int
    type: str
    role: str | None = None
    params: Any = None
    step: Step | None = None

    def path(self, *more: str) -> Path:
        return ("pipeline", "steps", self.index, *more)

    @property
    def tokens_in(self) -> bool | None:
        """Say whether this leg of a chat client's request goes to the generate route; None: unknown."""
        return None if self.step is None else self.step.plan(Format.CHAT).format is Format.GENERATE

    def param(self, name: str, default: Any = None) -> Any:
        return getattr(self.params, name, default)


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole configuration with its steps, as the rules see it."""

    config: Config
    steps: tuple[Placed, ...]

    def of(self, *types: str) -> Iterator[Placed]:
        return (placed for placed in self.steps if placed.type in types)

    def has_render_before(self, placed: Placed) -> bool:
        return any(render.index < placed.index for render in self.of("render"))

    def connector(self, placed: Placed) -> str:
        return str(placed.param("kv_connector") or self.config.pipeline.kv_connector)


def _place(config: Config, index: int, settings: PipelineSettings, faults: list[Fault]) -> Placed:
    """Make one step; what is wrong with it is added to ``faults``."""
    named = config.pipeline.steps[index]
    path: Path = ("pipeline", "steps", index)
    kind = STEP_TYPES.get(named.type)
    if kind is None:
        faults.append(((*path, "type"), _unknown_step(named.type)))
        meant = None if named.type in _LATER else nearest(named.type, STEP_TYPES)
        return Placed(index, meant or named.type)
    given = {key: value for key, value in named.params.items() if value is not None}
    try:
        params = kind.params.model_validate(given)
    except ValidationError as error:
        faults += [((*path, "params", *where), text) for where, text in sentences(error, kind.params)]
        return Placed(index, named.type, kind.role)
    if wrong := list(_connector_faults(params, (*path, "params"))):
        faults += wrong
        return Placed(index, named.type, kind.role)
    return Placed(index, named.type, kind.role, params, kind.make(params, settings))


def _unknown_step(name: str) -> str:
    if name in _LATER:
        return _LATER[name]
    meant = nearest(name, STEP_TYPES)
    hint = f", did you mean {meant}?" if meant else ", write one of these:"
    return f"{name!r} is not a step{hint} ({', '.join(STEP_TYPES)})"


_CONNECTORS: dict[str, TypeAdapter[Any]] = {
    "kv_connector": TypeAdapter(KvConnectorName),
    "ec_connector": TypeAdapter(EcConnectorName),
}


def _connector_faults(params: BaseModel, path: Path) -> Iterator[Fault]:
    """Check a step's own connectors as the pipeline's are."""
    for key, names in _CONNECTORS.items():
        value = getattr(params, key, None)
        if value is None:
            continue
        try:
            names.validate_python(value)
        except ValidationError as error:
            yield from (((*path, key), text) for _, text in sentences(error, type(params)))


# A step must stand before these, or it cannot do what it is for.
_BEFORE: dict[str, tuple[tuple[str, ...], str]] = {
    "replace-media-urls": (
        ("render", "conditional-decode", "encode", "prefill", "decode"),
        "which would be sent the URLs",
    ),
    "render": (("encode", "prefill", "decode"), "which needs its tokens"),
    "conditional-decode": (("prefill", "decode"), "whose work it may save"),
    "encode": (("prefill", "decode"), "which needs its result"),
    "prefill": (("decode",), "which needs its result"),
}


def order_works(layout: Layout) -> Iterator[Fault]:
    for placed in layout.steps:
        later, why = _BEFORE.get(placed.type, ((), ""))
        for early in (other for other in layout.of(*later) if other.index < placed.index):
            yield placed.path(), f"{placed.type} must stand before {early.type} (steps[{early.index}]), {why}"
            break


def each_step_stands_once(layout: Layout) -> Iterator[Fault]:
    seen: dict[str, int] = {}
    for placed in layout.steps:
        if placed.type in seen:
            yield placed.path(), f"{placed.type} stands at steps[{seen[placed.type]}] already, take one out"
        seen.setdefault(placed.type, placed.index)


def decode_answers(layout: Layout) -> Iterator[Fault]:
    if not any(layout.of("decode")) and all(placed.type in STEP_TYPES for placed in layout.steps):
        yield ("pipeline", "steps"), "no step answers the client, write {type: decode} as the last one"


def every_role_has_workers(layout: Layout) -> Iterator[Fault]:
    config = layout.config
    for placed in layout.steps:
        if placed.role in ("prefill", "decode") and config.gateway is None and not _pool(config, placed.role):
            yield (
                placed.path(),
                f"{placed.type} has no workers, write pools.{placed.role}.endpoints or gateway.address",
            )


def every_pool_is_used(layout: Layout) -> Iterator[Fault]:
    asked = {placed.role for placed in layout.steps}
    for role in ("prefill", "decode"):
        if _pool(layout.config, role) and role not in asked:
            yield ("pools", role), f"no step asks these workers, add a {role} step or take the pool out"
    roles = asked & {"prefill", "decode"}
    unasked = roles and all(_pool(layout.config, str(role)) for role in roles) and not any(layout.of("encode"))
    if layout.config.gateway and unasked:
        yield ("gateway",), "every role has a pool, so no leg goes to the gateway: take one of them out"


def pools_name_different_workers(layout: Layout) -> Iterator[Fault]:
    prefill, decode = layout.config.pools.prefill, layout.config.pools.decode
    if prefill is None or decode is None:
        return
    if prefill.header is not None and prefill.header == decode.header:
        yield (
            ("pools", "decode", "header"),
            f"{decode.header} names the prefill worker already, write another",
        )
    if not any(layout.connector(placed) == "kv-nixl" for placed in layout.of("prefill", "decode")):
        return
    others = {origin(url) for url in prefill.endpoints or ()}
    for index, url in enumerate(decode.endpoints or ()):
        if origin(url) in others:
            yield (
                ("pools", "decode", "endpoints", index),
                f"{url} is in pools.prefill too, and a NIXL worker cannot fetch from itself: take one out",
            )


def legs_agree_on_the_connector(layout: Layout) -> Iterator[Fault]:
    prefill, decode = next(layout.of("prefill"), None), next(layout.of("decode"), None)
    if prefill is None or decode is None or prefill.step is None or decode.step is None:
        return
    ours, theirs = layout.connector(prefill), layout.connector(decode)
    if ours != theirs:
        at = decode if decode.param("kv_connector") else prefill
        yield (
            at.path("params", "kv_connector"),
            f"prefill leaves its result by {ours} and decode takes it by {theirs}, write the same for both",
        )


def tokens_in_has_tokens(layout: Layout) -> Iterator[Fault]:
    seen: set[Path] = set()
    for placed in layout.of("encode", "prefill", "decode"):
        if placed.tokens_in and not layout.has_render_before(placed):
            own = placed.param("use_openai_format") is not None
            path = placed.path("params", "use_openai_format") if own else ("pipeline", "use_openai_format")
            if path not in seen:
                yield (
                    path,
                    "false sends token ids, and no render step makes them: add one before the first leg, or write true",
                )
            seen.add(path)


def wrap_has_something_to_wrap(layout: Layout) -> Iterator[Fault]:
    for placed in layout.of("decode"):
        if placed.tokens_in is False:
            yield from (
                (
                    placed.path("params", name),
                    "the answer is in the client's envelope already, take it out or send this leg tokens-in",
                )
                for name in type(placed.params).model_fields
                if name.startswith("wrap") and placed.param(name)
            )


def token_ids_are_known_and_wanted(layout: Layout) -> Iterator[Fault]:
    for placed in layout.steps:
        if not placed.param("send_prompt_token_ids"):
            continue
        path = placed.path("params", "send_prompt_token_ids")
        if placed.tokens_in:
            yield path, "a leg on the generate route carries the token ids anyway, take it out"
        elif not layout.has_render_before(placed):
            yield path, "no render step makes token ids, add one before it or take it out"


RULES: tuple[Callable[[Layout], Iterator[Fault]], ...] = (
    order_works,
    each_step_stands_once,
    decode_answers,
    every_role_has_workers,
    every_pool_is_used,
    pools_name_different_workers,
    legs_agree_on_the_connector,
    tokens_in_has_tokens,
    wrap_has_something_to_wrap,
    token_ids_are_known_and_wanted,
)


def _pool(config: Config, role: str) -> Pool | None:
    return {"prefill": config.pools.prefill, "decode": config.pools.decode}[role]


class _FileSchema(GenerateJsonSchema):
    """Writes defaults as the file has them (``30s``, not 30.0), and no titles: the names say as much."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        described = super().default_schema(schema)
        if described.get("default") is not None:
            dump = SchemaSerializer(schema["schema"]).to_python
            described["default"] = dump(schema["default"], mode="json")
        return described

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the whole file; a step's type decides which params it has."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(Config, "validation")]
    models += [(kind.params, "validation") for kind in STEP_TYPES.values()]
    refs, schema = models_json_schema(models, title="coordinator configuration", schema_generator=_FileSchema)
    step = schema["$defs"]["StepConfig"]
    step["properties"]["type"] = {"enum": list(STEP_TYPES), "description": "the step's type"}
    step["allOf"] = [_params_of(name, kind, refs[kind.params, "validation"]) for name, kind in STEP_TYPES.items()]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, **refs[Config, "validation"]}


def _params_of(name: str, kind: StepType, ref: dict[str, Any]) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"params": ref}}
    if any(info.is_required() for info in kind.params.model_fields.values()):
        then["required"] = ["params"]
    return {"if": {"properties": {"type": {"const": name}}, "required": ["type"]}, "then": then}

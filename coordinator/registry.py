"""Step type -> class, and the steps that a configuration names, built and checked against one another.

A pipeline that cannot work (``rules``) is refused here, before a port is bound.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import SchemaSerializer, core_schema

from coordinator.config import Config, ConfigError, EcConnectorName, KvConnectorName, StepConfig
from coordinator.settings.pools import DEFAULT_BOOTSTRAP_PORT
from coordinator.settings.problems import Path, nearest, sentences
from coordinator.settings.rules import RULES, Fault, Layout, Placed
from coordinator.step import PipelineSettings
from envelope.connectors import KV_CONNECTORS
from envelope.ec_transfer import EC_CONNECTORS
from steps import (
    conditional_decode,
    decode,
    derender,
    encode,
    prefill,
    prefill_decode,
    render,
    replace_media_urls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.settings.pools import Pool
    from coordinator.step import Events, Step


class StepType(NamedTuple):
    """A class of steps, whose workers it asks, and the model of its params.

    Attributes:
        also: other roles whose workers it asks at the same time.
    """

    make: Callable[[Any, PipelineSettings], Step]
    role: str | None
    params: type[BaseModel]
    also: tuple[str, ...] = ()


STEP_TYPES: dict[str, StepType] = {
    "replace-media-urls": StepType(
        replace_media_urls.ReplaceMediaUrls,
        replace_media_urls.ReplaceMediaUrls.role,
        replace_media_urls.Params,
    ),
    "render": StepType(render.Render, "render", render.Params),
    "conditional-decode": StepType(
        conditional_decode.ConditionalDecode,
        conditional_decode.ConditionalDecode.role,
        conditional_decode.Params,
    ),
    "encode": StepType(encode.Encode, encode.Encode.role, encode.Params),
    "prefill": StepType(prefill.Prefill, prefill.Prefill.role, prefill.Params),
    "decode": StepType(decode.Decode, decode.Decode.role, decode.Params),
    "prefill-decode": StepType(
        prefill_decode.PrefillDecode,
        prefill_decode.PrefillDecode.role,
        prefill_decode.Params,
        also=(prefill.Prefill.role,),
    ),
    "derender": StepType(derender.Derender, derender.Derender.role, derender.Params),
}

_LATER = {
    "async-broker": "async-broker (requests that queue) comes in a later release, take the step out",
    "force-stream": "force-stream comes in a later release, take the step out",
}


def build(config: Config, events: Events, clock: Callable[[], float] = time.monotonic) -> list[Step]:
    """Make the steps that the file names, in its order.

    Raises:
        ConfigError: with everything that is wrong with the steps, alone or together.
    """
    settings = PipelineSettings(
        kv=KV_CONNECTORS[config.pipeline.kv_connector],
        ec=EC_CONNECTORS[config.pipeline.ec_connector],
        use_openai_format=config.pipeline.use_openai_format,
        tokens_in=any(_is_tokens_in(config, named) for named in config.pipeline.steps),
        on_missing_handover=config.pipeline.on_missing_handover,
        on_prefill_failure=config.pipeline.on_prefill_failure,
        on_encode_failure=config.pipeline.on_encode_failure,
        max_handover_age_s=config.pipeline.max_handover_age or None,
        expose_transfer_params=config.pipeline.expose_transfer_params,
        events=events,
        clock=clock,
        bootstrap_port=_bootstrap_port(config.pools.prefill),
    )
    faults: list[Fault] = []
    placed = tuple(_place(config, index, settings, faults) for index in range(len(config.pipeline.steps)))
    layout = Layout(config, placed)
    for rule in RULES:
        faults += rule(layout)
    if faults:
        raise ConfigError([config.sources.problem(path, sentence) for path, sentence in faults])
    return [step.step for step in placed if step.step is not None]


def _bootstrap_port(prefill: Pool | None) -> Callable[[str], int]:
    return (lambda url: DEFAULT_BOOTSTRAP_PORT) if prefill is None else prefill.bootstrap_port_of


def _place(config: Config, index: int, settings: PipelineSettings, faults: list[Fault]) -> Placed:
    """Make one step; what is wrong with it is added to ``faults``."""
    named = config.pipeline.steps[index]
    path: Path = ("pipeline", "steps", index)
    kind = STEP_TYPES.get(named.type)
    if kind is None:
        faults.append(((*path, "type"), _unknown_step(named.type)))
        meant = None if named.type in _LATER else nearest(named.type, STEP_TYPES)
        return Placed(index, meant or named.type, known=meant is not None)
    roles = () if kind.role is None else (kind.role, *kind.also)
    given = {key: value for key, value in named.params.items() if value is not None}
    try:
        params = kind.params.model_validate(given)
    except ValidationError as error:
        faults += [((*path, "params", *where), text) for where, text in sentences(error, kind.params)]
        return Placed(index, named.type, roles)
    if wrong := list(_connector_faults(params, (*path, "params"))):
        faults += wrong
        return Placed(index, named.type, roles)
    return Placed(index, named.type, roles, params, kind.make(params, settings))


_FLAG = TypeAdapter(bool)


def _is_tokens_in(config: Config, named: StepConfig) -> bool:
    if named.type not in ("encode", "prefill", "decode", "prefill-decode"):
        return False
    own = named.params.get("use_openai_format")
    try:
        return not (config.pipeline.use_openai_format if own is None else _FLAG.validate_python(own))
    except ValidationError:
        return False  # told with the step's other faults


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

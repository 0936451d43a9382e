"""A configuration becomes the plan that requests are answered by."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from coordinator import registry
from coordinator.admission import Admission
from coordinator.background import Background
from coordinator.derender.held import HeldParsers, ParserPools
from coordinator.derender.pool import ParserSettings
from coordinator.fetch import HttpMediaFetcher
from coordinator.intake import Intake
from coordinator.links import discarded, finders, links, places, routing_headers, watches
from coordinator.logs import log
from coordinator.pipeline import Pipeline
from coordinator.plan import Plan
from coordinator.questions import Questions
from coordinator.rendering.tokenizer import digest
from coordinator.respond import Manner
from coordinator.routing.discovery import Discovery, Finder
from coordinator.routing.gateway import GatewayRouter
from coordinator.routing.header import HeaderRouter
from coordinator.routing.pool import PoolRouter
from coordinator.settings.problems import ConfigError, Path
from coordinator.settings.units import megabytes_to_bytes
from coordinator.upstream import HttpUpstream, RoleLink
from coordinator.workers.health import Readiness, RoleProbe
from coordinator.workers.release import Releaser
from envelope.derender import derender_path
from envelope.formats import PATHS, RENDER_PATHS, Format
from envelope.generate import TOKENS
from envelope.legs import mode_for
from steps.decode import Decode
from steps.prefill_decode import PrefillDecode
from steps.render import Render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.background import Faults
    from coordinator.config import Config
    from coordinator.metrics import Metrics
    from coordinator.rendering.renderer import Renderer
    from coordinator.security.credentials import Credentials
    from coordinator.step import Step
    from coordinator.telemetry.model_names import ModelNames

SERVED = tuple(Format)


def plan(
    metrics: Metrics,
    faults: Faults,
    names: ModelNames,
    pools: ParserPools,
    config: Config,
    credentials: Credentials,
    before: Plan | None = None,
) -> Plan:
    """Return what requests are answered by; nothing is opened before it runs.

    Args:
        pools: of parser processes, which plans with the same parsers share.
        before: the plan whose place it will take, and with which it shares the places that requests hold.

    Raises:
        ConfigError: as ``app.build``.
    """
    steps = registry.build(config, metrics)
    renderers = open_renderers(config, steps)
    parsers = parsers_of(config, steps, pools)
    server, media = config.server, HttpMediaFetcher()
    carry = config.pipeline.forward_response_headers
    pool = None if parsers is None else parsers.pool
    upstream = HttpUpstream(links(config, steps, credentials), carry, metrics, faults, media, pool)
    keys = credentials.client_keys(server)
    credentials.check()
    decode = next(step for step in steps if isinstance(step, (Decode, PrefillDecode)))
    found = finders(config, upstream.links, metrics, before)
    discovery = Discovery(list(found.values()))
    more = () if pool is None else (pool.problems,)
    readiness = Readiness(probes(steps, upstream.links, found), server.readiness_interval, faults, more)
    questions = Questions(upstream, names, renderers[0].render if renderers else None)
    names.add(server.metrics_models)
    routing = routing_headers(config)
    return Plan(
        config=config,
        keys=keys,
        admission=Admission(
            server.max_concurrency,
            places(config, upstream.links),
            queue_size=server.queue_size,
            queue_timeout_s=server.queue_timeout or None,
            events=metrics,
            clock=time.monotonic,
            after=None if before is None else before.admission,
        ),
        pipeline=Pipeline(steps, upstream, metrics, time.monotonic),
        releaser=Releaser(decode.release_leg, upstream, metrics, faults),
        intake=Intake(megabytes_to_bytes(server.max_request_body_size), server.read_timeout or None),
        manner=Manner(
            server.write_timeout or None,
            server.heartbeat_after or None,
            server.heartbeat_interval,
            time.monotonic,
            time.time,
            server.server_timing,
        ),
        readiness=readiness,
        questions=questions,
        upstream=upstream,
        media=media,
        watch=credentials.watch,
        routing_headers=tuple(routing),
        drop=frozenset((*routing, *discarded(config))),
        discovery=discovery,
        faults=faults,
        background=(
            Background("keys", credentials.watch.run),
            *(Background("discovery", finder.run) for finder in found.values()),
            Background("probes", partial(_ask_who_is_found, discovery, readiness)),
            Background("models", partial(names.run, questions.listed)),
            *watches(upstream.links, faults),
            *(Background("render", renderer.run) for renderer in renderers),
        ),
        parsers=parsers,
    )


# Long enough for a cluster's DNS or API server to answer, short enough for a start-up probe to wait for.
_FIRST_ANSWER_S = 5.0


async def _ask_who_is_found(discovery: Discovery, readiness: Readiness) -> None:
    await asked_once(discovery)
    await readiness.run()


async def asked_once(discovery: Discovery) -> bool:
    """Wait for the first look-up of each role, for as long as a start may; return whether all were answered."""
    return await discovery.answered(_FIRST_ANSWER_S)


def parsers_of(config: Config, steps: Sequence[Step], pools: ParserPools) -> HeldParsers | None:
    """Return the parsers that decode is to use, not yet started; None where it uses none.

    Raises:
        ConfigError: what they need is not installed, or not there.
    """
    for index, step in enumerate(steps):
        if isinstance(step, (Decode, PrefillDecode)) and step.params.derender == "coordinator":
            params, at = step.params, ("pipeline", "steps", index, "params")
            assert params.tokenizer is not None, "a rule asks for it"
            settings = ParserSettings(
                params.tokenizer,
                params.tool_parser,
                params.reasoning_parser,
                params.parser_processes,
                params.parser_timeout,
            )
            held = HeldParsers(pools.of(settings), partial(_problem, config, at))
            held.check()
            return held
    return None


def _problem(config: Config, at: Path, key: str, sentence: str) -> ConfigError:
    return ConfigError([config.sources.problem((*at, key), sentence)])


def open_renderers(config: Config, steps: Sequence[Step]) -> list[Renderer]:
    """Load the models whose prompts are rendered in this process; each runs as long as it is used.

    Raises:
        ConfigError: their files are not what they should be, or what renders them is not installed; or decode makes
            text of tokens with another tokenizer.
    """
    opened: list[Renderer] = []
    for index, step in enumerate(steps):
        if isinstance(step, Render) and step.role is None:
            try:
                renderer = step.open()
            except ValueError as error:
                at: Path = ("pipeline", "steps", index, "params", "tokenizer")
                raise ConfigError([config.sources.problem(at, str(error))]) from None
            log.info("prompts are rendered here", extra={"fields": renderer.facts})
            opened.append(renderer)
            _check_tokenizers(config, steps, renderer)
    return opened


def _check_tokenizers(config: Config, steps: Sequence[Step], renderer: Renderer) -> None:
    for index, step in enumerate(steps):
        if isinstance(step, (Decode, PrefillDecode)) and step.params.tokenizer is not None:
            folder, at = step.params.tokenizer, ("pipeline", "steps", index, "params")
            if digest(folder) not in ("", renderer.tokenizer.sha256):
                other = f"another tokenizer.json than {renderer.model.folder}, which render makes the prompts with"
                raise _problem(config, at, "tokenizer", f"{folder} has {other}: write the same folder in both")


def probes(
    steps: Sequence[Step], links: Mapping[str, RoleLink], finders: Mapping[str, Finder] | None = None
) -> list[RoleProbe]:
    """Return what readiness asks of each role: reachable, and serving the routes that its legs use."""
    paths: dict[str, set[str]] = {}
    for step in steps:
        for api in SERVED:
            row = step.plan(api)
            for role in (row.role, *row.also):
                if role is not None and row.path is not None:
                    paths.setdefault(role, set()).add(row.path)
    # A generate client alone does not make the route required: its own requests would be told.
    needed = {PATHS[Format.GENERATE]} if _tokens_in(steps) else set()
    needed |= {*RENDER_PATHS.values(), *map(derender_path, SERVED)}
    return [
        RoleProbe(
            role,
            router.known,
            () if gateway else tuple(sorted(paths[role] & needed)),
            gateway=gateway,
            tls=links[role].tls,
            our_key=links[role].our_key,
            why_none=finders[role].why_none if finders and role in finders else None,
            health=router.health if isinstance(router, PoolRouter) else None,
            modes=_modes(steps) if role == "decode" and not gateway else (),
            texts=() if gateway else tuple(sorted(paths[role] - {PATHS[Format.GENERATE]})),
            learn=router.learn if isinstance(router, PoolRouter) else None,
        )
        for role in paths
        for router in [links[role].router]
        if not isinstance(router, HeaderRouter)  # its workers are known to the router in front
        for gateway in [isinstance(router, GatewayRouter)]
    ]


def _modes(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the output modes, other than token ids, that decode is asked for by clients of any API but generate."""
    asked = {
        mode_for(api, step.params.mode)
        for step in steps
        if isinstance(step, (Decode, PrefillDecode))
        for api in SERVED
        if api is not Format.GENERATE and step.plan(api).format is Format.GENERATE
    }
    return tuple(sorted(asked - {TOKENS}))


def _tokens_in(steps: Sequence[Step]) -> bool:
    return any(step.plan(Format.CHAT).format is Format.GENERATE for step in steps)

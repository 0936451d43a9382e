"""What makes a pipeline that cannot work: rules on the order of its steps, their formats, and their workers.

Each rule is one function over the whole layout that yields the path at fault and a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from coordinator.settings.problems import Path
from coordinator.settings.units import origin
from envelope.connectors import KV_CONNECTORS, Tie
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.config import Config
    from coordinator.settings.pools import Pool
    from coordinator.step import Step

Fault = tuple[Path, str]

ROLES = ("encode", "prefill", "decode")  # those that pools or a gateway have workers for


@dataclass(frozen=True, slots=True)
class Placed:
    """A step at its place in the file.

    ``params`` and ``step`` are None where the params are wrong: its place is checked all the same. A type
    that is not known stands here as the one that was probably meant.
    """

    index: int
    type: str
    roles: tuple[str, ...] = ()
    params: Any = None
    step: Step | None = None
    known: bool = True

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

    def connector(self, placed: Placed, kind: str = "kv_connector") -> str:
        return str(placed.param(kind) or getattr(self.config.pipeline, kind))


_ANSWERS = ("decode", "prefill-decode")
_LEGS = ("prefill", *_ANSWERS)

# A step must stand before these, or it cannot do what it is for.
_BEFORE: dict[str, tuple[tuple[str, ...], str]] = {
    "replace-media-urls": (
        ("render", "conditional-decode", "encode", *_LEGS),
        "which would be sent the URLs",
    ),
    "render": (("encode", *_LEGS), "which needs its tokens"),
    "conditional-decode": (_LEGS, "whose work it may save"),
    "encode": (_LEGS, "which needs its result"),
    "prefill": (("decode",), "which needs its result"),
    **dict.fromkeys(_ANSWERS, (("derender",), "which takes its tokens")),
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
    if not any(layout.of(*_ANSWERS)) and all(placed.known for placed in layout.steps):
        yield ("pipeline", "steps"), "no step answers the client, write {type: decode} as the last one"


def every_role_has_workers(layout: Layout) -> Iterator[Fault]:
    config = layout.config
    for placed in layout.steps:
        for role in placed.roles:
            if role in ROLES and config.gateway is None and not _pool(config, role):
                yield placed.path(), f"{placed.type} has no workers, write pools.{role}.endpoints or gateway.address"


def proxied_routes_have_one_worker(layout: Layout) -> Iterator[Fault]:
    pool = _pool(layout.config, "decode")
    if layout.config.server.proxied_routes and (pool is None or len(pool.endpoints or ()) != 1):
        yield (
            ("server", "proxied_routes"),
            "they are those of one worker: write it alone into pools.decode.endpoints, or take the routes out",
        )


def render_has_one_server(layout: Layout) -> Iterator[Fault]:
    pool = _pool(layout.config, "render")
    for placed in layout.of("render"):
        if placed.params is None:
            continue
        if placed.param("tokenizer") is not None:
            if pool is not None:
                yield ("pools", "render"), "render has a tokenizer and asks no server: take one of the two out"
        elif placed.param("address") is None and pool is None:
            yield placed.path("params", "address"), f"missing: write {_ADDRESS}, or its workers as pools.render"
        elif pool is not None:
            for name in sorted(placed.params.model_fields_set & OF_ADDRESS):
                yield placed.path("params", name), "pools.render says how render servers are reached: take one out"


_ADDRESS = "the render service, as http://host:port"
OF_ADDRESS = {
    *("address", "api_key", "ca_file", "insecure_skip_verify", "max_idle_conns_per_host", "idle_conn_timeout"),
}


def extras_are_installed(layout: Layout) -> Iterator[Fault]:
    for role in (*ROLES, "render"):
        pool = _pool(layout.config, role)
        for way, package in (("dns", "dns"), ("kubernetes", "kubernetes_asyncio")):
            if pool is not None and getattr(pool, way) is not None and find_spec(package) is None:
                yield ("pools", role, way), f"a package is not installed, pip install 'pd-coordinator[{way}]'"


def every_pool_is_used(layout: Layout) -> Iterator[Fault]:
    asked = {role for placed in layout.steps for role in placed.roles}
    for role in (*ROLES, "render"):
        if _pool(layout.config, role) and role not in asked:
            yield ("pools", role), f"no step asks these workers, add {_a(role)} step or take the pool out"
    roles = asked.intersection(ROLES)
    if layout.config.gateway and roles and all(_pool(layout.config, role) for role in roles):
        yield ("gateway",), "every role has a pool, so no leg goes to the gateway: take one of them out"


def pools_name_different_workers(layout: Layout) -> Iterator[Fault]:
    named: dict[str, str] = {}
    for role in ROLES:
        pool = _pool(layout.config, role)
        if pool is not None and pool.header is not None:
            if pool.header in named:
                yield (
                    ("pools", role, "header"),
                    f"{pool.header} names the {named[pool.header]} worker already, write another",
                )
            named.setdefault(pool.header, role)
    prefill, decode = layout.config.pools.prefill, layout.config.pools.decode
    if prefill is None or decode is None:
        return
    kinds = [KV_CONNECTORS[layout.connector(placed)] for placed in layout.of(*_LEGS)]
    kind = next((kind for kind in kinds if kind.needs_handover or kind.concurrent), None)
    if kind is None:
        return
    others = {origin(url) for url in prefill.endpoints or ()}
    for index, url in enumerate(decode.endpoints or ()):
        if origin(url) in others:
            yield (
                ("pools", "decode", "endpoints", index),
                f"{url} is in pools.prefill too, and with {kind.name} a worker cannot fetch from itself: take one out",
            )


# Who leaves something, who takes it, and by which connector.
_HANDED = (
    ("encode", "prefill", "ec_connector"),
    ("encode", "prefill-decode", "ec_connector"),
    ("prefill", "decode", "kv_connector"),
)


def legs_agree_on_the_connector(layout: Layout) -> Iterator[Fault]:
    for leaves, takes, kind in _HANDED:
        giver, taker = next(layout.of(leaves), None), next(layout.of(takes), None)
        if giver is None or taker is None or giver.step is None or taker.step is None:
            continue
        ours, theirs = layout.connector(giver, kind), layout.connector(taker, kind)
        if ours != theirs:
            at = taker if taker.param(kind) else giver
            yield (
                at.path("params", kind),
                f"{leaves} leaves its result by {ours} and {takes} takes it by {theirs}, write the same for both",
            )


def legs_of_one_id_take_one_route(layout: Layout) -> Iterator[Fault]:
    """The route is part of the id by which the engine pairs them."""
    first, second = next(layout.of("prefill"), None), next(layout.of("decode"), None)
    if first is None or second is None or None in (first.tokens_in, second.tokens_in):
        return
    kind = KV_CONNECTORS[layout.connector(first)]
    if kind.one_id and first.tokens_in != second.tokens_in:
        at = second if second.param("use_openai_format") is not None else first
        yield (
            at.path("params", "use_openai_format"),
            f"{kind.name} pairs the legs by an id that the route is part of, write the same for both",
        )


def tokens_in_has_tokens(layout: Layout) -> Iterator[Fault]:
    seen: set[Path] = set()
    for placed in layout.of("encode", *_LEGS):
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
    for placed in layout.of(*_ANSWERS):
        if placed.tokens_in is False:
            yield from (
                (
                    placed.path("params", name),
                    "the answer is in the client's envelope already, take it out or send this leg tokens-in",
                )
                for name in type(placed.params).model_fields
                if name.startswith("wrap") and placed.param(name)
            )


def derender_has_tokens_to_take(layout: Layout) -> Iterator[Fault]:
    by_service = [placed for placed in layout.of(*_ANSWERS) if placed.param("derender") == "service"]
    for placed in layout.of(*_ANSWERS):
        path = placed.path("params", "derender")
        if placed.tokens_in is False and placed.param("derender") != "worker":
            yield path, "the worker's answer is in the client's envelope already: take this out, or send it tokens-in"
        elif placed.param("derender") == "coordinator":
            yield from _parsers_that_are_named(placed)
        elif placed in by_service and not any(layout.of("derender")):
            yield path, "no step asks the service, write {type: derender, params: {address: ...}} as the last one"
        if placed.param("derender") != "coordinator":
            for key in ("tokenizer", "tool_parser", "reasoning_parser"):
                if placed.param(key) is not None:
                    yield placed.path("params", key), "nobody parses here, write derender: coordinator or take it out"
    for placed in layout.of("derender"):
        if not by_service and all(decode.step is not None for decode in layout.of(*_ANSWERS)):
            yield placed.path(), "decode leaves it no tokens, write derender: service there or take this step out"


def _parsers_that_are_named(placed: Placed) -> Iterator[Fault]:
    if placed.param("tokenizer") is None:
        yield placed.path("params", "tokenizer"), "missing: derender: coordinator needs the folder of the tokenizer"
    if placed.param("output_mode") == "text" and not (placed.param("tool_parser") or placed.param("reasoning_parser")):
        yield (
            placed.path("params", "derender"),
            "coordinator has nothing to do, write the workers' tool_parser, reasoning_parser or both",
        )


_PARSERS = (("tool_parser", "--tool-call-parser"), ("reasoning_parser", "--reasoning-parser"))


def render_and_decode_have_the_same_parsers(layout: Layout) -> Iterator[Fault]:
    """Render asks the workers for the special tokens and grammars of its parsers: decode's would miss theirs."""
    here = next((placed for placed in layout.of("render") if placed.param("tokenizer") is not None), None)
    for placed in layout.of(*_ANSWERS):
        if here is None or placed.param("derender") != "coordinator":
            continue
        for key, flag in _PARSERS:
            ours, theirs = (step.param(key) or "none" for step in (placed, here))
            if ours != theirs:
                both = f"render (steps[{here.index}]) has {theirs} and this has {ours}"
                yield placed.path("params", key), f"{both}, write the workers' {flag} in both"


def token_ids_are_known_and_wanted(layout: Layout) -> Iterator[Fault]:
    for placed in layout.steps:
        if not placed.param("send_prompt_token_ids"):
            continue
        path = placed.path("params", "send_prompt_token_ids")
        if placed.tokens_in:
            yield path, "a leg on the generate route carries the token ids anyway, take it out"
        elif not layout.has_render_before(placed):
            yield path, "no render step makes token ids, add one before it or take it out"


def limits_can_be_divided(layout: Layout) -> Iterator[Fault]:
    """Each serving process has its share of a limit, and 0 would be no limit."""
    config, count = layout.config, layout.config.server.workers
    limits: list[tuple[Path, int]] = [(("server", "max_concurrency"), config.server.max_concurrency)]
    limits += [
        (("pools", role, "max_inflight"), pool.max_inflight)
        for role in (*ROLES, "render")
        if (pool := _pool(config, role))
    ]
    for path, limit in limits:
        if 0 < limit < count:
            yield (
                path,
                f"{limit} cannot be divided among the {count} processes of server.workers, write {count} or more",
            )


def steps_suit_the_connector(layout: Layout) -> Iterator[Fault]:
    """Both legs at once, or one after the other: whichever it is not, decode would wait for ever, or find nothing."""
    for placed in layout.of("prefill", "prefill-decode"):
        kind = KV_CONNECTORS[layout.connector(placed)]
        path = placed.path("params", "kv_connector") if placed.param("kv_connector") else ("pipeline", "kv_connector")
        if placed.type == "prefill" and kind.concurrent:
            steps = "{type: prefill-decode} in place of the prefill and the decode step"
            yield path, f"{kind.name} needs both legs in flight at once: write {steps}"
        elif placed.type == "prefill-decode" and not kind.concurrent:
            steps = "{type: prefill} and {type: decode} in place of the prefill-decode step"
            yield path, f"{kind.name} needs prefill to end first: write {steps}"


def one_step_makes_each_leg(layout: Layout) -> Iterator[Fault]:
    for placed in layout.of("prefill-decode"):
        for other in layout.of("prefill", "decode"):
            yield other.path(), f"prefill-decode (steps[{placed.index}]) makes this leg already, take one of them out"


def a_pair_knows_its_prefill_worker(layout: Layout) -> Iterator[Fault]:
    config = layout.config
    for placed in layout.of("prefill-decode"):
        kind = KV_CONNECTORS[layout.connector(placed)]
        if config.pools.prefill is None and config.gateway is not None:
            yield placed.path(), (
                "decode is told where prefill is, and behind a gateway nobody knows: write pools.prefill with endpoints"
            )
        elif kind.tie is Tie.KV_REQUEST and config.pools.prefill and not config.pools.prefill.bootstrap_port:
            yield ("pools", "prefill"), "bootstrap_port is missing: write the port of the workers' P2P tier"
    unused = not any(layout.of("prefill-decode"))
    if unused and config.pools.prefill is not None and config.pools.prefill.bootstrap_port:
        yield ("pools", "prefill", "bootstrap_port"), "no prefill-decode step asks for it, take the key out"


def a_pair_is_sent_once(layout: Layout) -> Iterator[Fault]:
    if any(layout.of("prefill-decode")) and layout.config.pipeline.on_encode_failure == "prefill_encodes":
        yield (
            ("pipeline", "on_encode_failure"),
            "prefill_encodes sends prefill a second time, and the decode beside it waits for the first: write fail",
        )


def steps_suit_the_fleet(layout: Layout) -> Iterator[Fault]:
    """What no worker of such a fleet could do: tokens in, encoders, or a prompt on decode alone."""
    for placed in layout.of("prefill-decode"):
        kind = KV_CONNECTORS[layout.connector(placed)]
        if kind.openai_only:
            for other in layout.of("render", "encode", "conditional-decode"):
                yield other.path(), f"the workers behind {kind.name} have nothing for {other.type} to ask, take it out"
            if placed.tokens_in:
                own = placed.param("use_openai_format") is not None
                path = placed.path("params", "use_openai_format") if own else ("pipeline", "use_openai_format")
                yield path, f"the workers behind {kind.name} have no route for token ids, write true"
        if not kind.decodes_alone:
            for name in ("on_prefill_failure", "on_missing_handover"):
                if getattr(layout.config.pipeline, name) == "decode_alone":
                    yield ("pipeline", name), f"a decode worker behind {kind.name} computes no prompts, write fail"


def skipping_prefill_can_be_judged(layout: Layout) -> Iterator[Fault]:
    for placed in layout.of("prefill", "prefill-decode"):
        kind = KV_CONNECTORS[layout.connector(placed)]
        for name in ("min_uncached_tokens", "min_output_tokens"):
            if placed.param(name) and not kind.decodes_alone:
                why = f"a decode worker behind {kind.name} computes no prompts"
                yield placed.path("params", name), f"{why}, take it out"
        if not placed.param("min_uncached_tokens"):
            continue
        path, decode = placed.path("params", "min_uncached_tokens"), _pool(layout.config, "decode")
        if decode is None or decode.policy != "prefix_affinity":
            yield path, "it goes by what pools.decode remembers, write policy: prefix_affinity there"
        if not layout.has_render_before(placed):
            yield path, "it counts tokens, and no render step makes them: add one before it or take it out"


RULES: tuple[Callable[[Layout], Iterator[Fault]], ...] = (
    order_works,
    each_step_stands_once,
    decode_answers,
    every_role_has_workers,
    proxied_routes_have_one_worker,
    render_has_one_server,
    extras_are_installed,
    every_pool_is_used,
    pools_name_different_workers,
    legs_agree_on_the_connector,
    legs_of_one_id_take_one_route,
    tokens_in_has_tokens,
    wrap_has_something_to_wrap,
    derender_has_tokens_to_take,
    render_and_decode_have_the_same_parsers,
    token_ids_are_known_and_wanted,
    limits_can_be_divided,
    steps_suit_the_connector,
    one_step_makes_each_leg,
    a_pair_knows_its_prefill_worker,
    a_pair_is_sent_once,
    steps_suit_the_fleet,
    skipping_prefill_can_be_judged,
)


def _a(role: str) -> str:
    return f"an {role}" if role.startswith("e") else f"a {role}"


def _pool(config: Config, role: str) -> Pool | None:
    pool: Pool | None = getattr(config.pools, role)
    return pool

"""What makes a pipeline that cannot work: rules on the order of its steps, their formats, and their workers.

Each rule is one function over the whole layout that yields the path at fault and a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.problems import Path
from coordinator.units import origin
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.config import Config, Pool
    from coordinator.step import Step

Fault = tuple[Path, str]


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

    def connector(self, placed: Placed) -> str:
        return str(placed.param("kv_connector") or self.config.pipeline.kv_connector)


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
    if not any(layout.of("decode")) and all(placed.known for placed in layout.steps):
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

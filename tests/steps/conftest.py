"""A step is run against an upstream without sockets, which writes down each leg and gives the answers it was told."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.config import Config
from coordinator.context import RequestContext
from coordinator.registry import build
from coordinator.step import Reply
from envelope.formats import Format
from envelope.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.context import Headers
    from coordinator.step import Leg, PipelineSettings


@dataclass
class FakeStream:
    """A stream that has begun. Implements ``coordinator.context.LiveStream``."""

    first_event: bytes
    headers: Headers = (("x-worker", "1"),)
    closed: bool = False

    async def read(self) -> bytes:
        return b""

    async def aclose(self) -> None:
        self.closed = True


class FakeUpstream:
    """Implements ``coordinator.step.Upstream``.

    Args:
        answers: one for each leg: a Reply, a FakeStream, a JSON value for a 200, or an error to raise.
        serves: what is said of every role.
    """

    media: Any = None
    bootstrap: Any = None

    def __init__(self, *answers: Any, serves: bool = True, uncached: int | None = None) -> None:
        self._answers = list(answers)
        self._serves = serves
        self._uncached = uncached
        self.legs: list[Leg] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.asked: list[str] = []

    def serves(self, ctx: RequestContext, role: str) -> bool:
        self.asked.append(role)
        return self._serves

    def uncached_tokens(self, ctx: RequestContext, role: str, most: int) -> int | None:
        assert role == "decode"
        return self._uncached

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Any:
        return self._answer("post_json", leg, accept)

    async def stream(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Any:
        return self._answer("stream", leg, accept)

    def _answer(self, how: str, leg: Leg, accept: tuple[int, ...]) -> Any:
        self.legs.append(leg)
        self.calls.append((how, accept))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, (Reply, FakeStream)):
            return answer
        return Reply(200, dumps(answer), answer, lambda: (("x-worker", "1"),))


class Counted:
    """What a step counted: the event's name and what was said of it. Implements ``coordinator.step.Events``."""

    def __init__(self) -> None:
        self.all: list[tuple[str, ...]] = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        return lambda *said: self.all.append((event, *said))


@pytest.fixture
def upstream() -> type[FakeUpstream]:
    return FakeUpstream


@pytest.fixture
def stream() -> type[FakeStream]:
    return FakeStream


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def settings(counted: Counted) -> Callable[..., PipelineSettings]:
    """Return what a step inherits from the pipeline: NIXL and a hand-over of any age, else the file's defaults."""
    pipeline = {"kv_connector": "kv-nixl", "steps": [{"type": "decode"}]}
    config = Config.model_validate({"gateway": {"address": "http://g"}, "pipeline": pipeline})
    (step,) = build(config, counted, lambda: 100.0)
    plain: PipelineSettings = step._settings  # type: ignore[attr-defined]  # as the registry makes them

    def made(**changes: Any) -> PipelineSettings:
        return replace(plain, **{"max_handover_age_s": None, **changes})

    return made


@pytest.fixture
def context() -> Iterator[Callable[..., RequestContext]]:
    """Make contexts of requests; at the test's end, no body or rendered request that went in may have changed."""
    kept: list[tuple[Any, str]] = []

    def keep(value: Any) -> Any:
        kept.append((value, repr(copy.deepcopy(value))))
        return value

    def made(api: str, body: dict[str, Any], *, rendered: Any = None, **slots: Any) -> RequestContext:
        return RequestContext(
            request_id="req",
            leg_id="req-1234",
            api=Format(api),
            body=keep(body),
            headers=(),
            routing={},
            stream=bool(body.get("stream")),
            rendered=keep(rendered),
            **slots,
        )

    yield made
    for value, before in kept:
        assert repr(value) == before, "a step changed what other legs read"

"""The steps run in their order, each is timed, and the first answer or error is the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.context import Answer, LegTime, RequestContext
from coordinator.pipeline import Pipeline
from envelope.errors import BadRequest, InternalError, LegFailed, NoWorker
from envelope.formats import Format

HANDOVER = {"remote_host": "10.9.9.9"}


class Clock:
    """Seconds that pass by one at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class FakeStep:
    """A step that does one thing with the context. Implements ``coordinator.step.Step``."""

    type: str
    do: Callable[[RequestContext], Any] = lambda ctx: "ok"
    role: str | None = None
    refuse: Exception | None = None
    ran: list[str] = field(default_factory=list)

    def admit(self, ctx: RequestContext) -> None:
        self.ran.append(f"admit {self.type}")
        if self.refuse is not None:
            raise self.refuse

    async def run(self, ctx: RequestContext, upstream: Any) -> str:
        self.ran.append(self.type)
        outcome = self.do(ctx)
        return await outcome if isinstance(outcome, Awaitable) else outcome


class Asked:
    """Says of every role whether it has a worker; counts what a pipeline counts."""

    def __init__(self, refuse: Exception | None = None) -> None:
        self.roles: list[str] = []
        self.again = 0
        self._refuse = refuse

    def serves(self, ctx: RequestContext, role: str) -> bool:
        self.roles.append(role)
        if self._refuse is not None:
            raise self._refuse
        return True

    def begun_again(self) -> None:
        self.again += 1


@dataclass
class Freed:
    """Implements ``coordinator.context.Places``."""

    roles: list[str] = field(default_factory=list)

    def free(self, role: str) -> None:
        self.roles.append(role)


def context(**slots: Any) -> RequestContext:
    return RequestContext("req", "req-1", Format.CHAT, {}, (), {}, False, **slots)


def answer(ctx: RequestContext) -> str:
    ctx.answer = Answer(b"{}", Format.CHAT)
    return "ok"


def hand_over(ctx: RequestContext) -> str:
    ctx.handover = HANDOVER
    return "ok"


def raising(error: BaseException) -> Callable[[RequestContext], Any]:
    def run(ctx: RequestContext) -> Any:
        raise error

    return run


def pipeline(*steps: FakeStep, asked: Any = None) -> tuple[Pipeline, list[str]]:
    """Return a pipeline, and the one list that all its steps write to."""
    ran: list[str] = []
    for step in steps:
        step.ran = ran
    asked = asked or Asked()
    return Pipeline(steps, asked, asked, Clock()), ran


async def test_steps_run_in_their_order_up_to_the_answer() -> None:
    made, ran = pipeline(FakeStep("render"), FakeStep("decode", answer), FakeStep("late"))
    ctx = context()
    await made.run(ctx)
    assert ran == ["admit render", "admit decode", "admit late", "render", "decode"]
    assert ctx.legs == [LegTime("render", 1.0, "ok"), LegTime("decode", 1.0, "ok")]


PROMPT = {"messages": [1], "model": "m"}


def stream(ctx: RequestContext) -> str:
    ctx.answer = Answer(object(), Format.CHAT)  # type: ignore[arg-type]  # nobody reads it
    return "ok"


@pytest.mark.parametrize(
    ("steps", "forgets"),
    [
        ([FakeStep("decode", stream)], True),
        ([FakeStep("render"), FakeStep("decode"), FakeStep("derender", stream)], True),
        ([FakeStep("decode", answer)], False),
        ([FakeStep("prefill", hand_over), FakeStep("decode", stream)], False),
        ([FakeStep("prefill-decode", stream)], False),
    ],
    ids=["stream", "derendered stream", "whole", "unread hand-over", "prefill still out"],
)
async def test_the_prompt_is_forgotten_when_the_answer_streams_and_no_leg_may_still_need_it(
    steps: list[FakeStep], forgets: bool
) -> None:
    made, _ = pipeline(*steps)
    ctx = RequestContext("req", "req-1", Format.CHAT, PROMPT, (), {}, True, rendered={"token_ids": [1, 2]})
    await made.run(ctx)
    assert ctx.rendered is not None
    assert (ctx.body == {"model": "m"}) is forgets
    assert (ctx.rendered["token_ids"] != [1, 2]) is forgets
    assert PROMPT == {"messages": [1], "model": "m"}


async def test_a_fetched_hand_over_is_forgotten_with_the_prompt() -> None:
    def fetch(ctx: RequestContext) -> str:
        ctx.handover_fetched = True
        return stream(ctx)

    made, _ = pipeline(FakeStep("prefill", hand_over), FakeStep("decode", fetch))
    ctx = context()
    await made.run(ctx)
    assert (ctx.handover, ctx.unfetched()) == (None, [])


async def test_a_step_s_own_word_is_its_outcome() -> None:
    made, _ = pipeline(FakeStep("prefill", lambda ctx: "skipped"), FakeStep("decode", answer))
    ctx = context()
    await made.run(ctx)
    assert [leg.outcome for leg in ctx.legs] == ["skipped", "ok"]


async def test_a_step_refuses_before_the_first_leg_is_made() -> None:
    made, ran = pipeline(FakeStep("prefill"), FakeStep("decode", refuse=BadRequest("no")))
    ctx = context()
    with pytest.raises(BadRequest):
        await made.run(ctx)
    assert (ran, ctx.legs) == (["admit prefill", "admit decode"], [])


async def test_every_role_is_asked_for_a_worker_before_the_first_leg_is_made() -> None:
    """A decode worker that is named wrongly must not be found out when prefill holds blocks."""
    asked = Asked(refuse=BadRequest("no worker"))
    made, ran = pipeline(FakeStep("replace-media-urls"), FakeStep("decode", role="decode"), asked=asked)
    with pytest.raises(BadRequest):
        await made.run(context())
    assert (ran, asked.roles) == (["admit replace-media-urls", "admit decode"], ["decode"])


ERRORS = [
    (LegFailed("prefill", "x"), "LegFailed"),
    (BadRequest("x"), "BadRequest"),
    (ZeroDivisionError(), "InternalError"),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS)
async def test_an_error_ends_it_and_is_the_step_s_outcome(error: Exception, outcome: str) -> None:
    made, ran = pipeline(FakeStep("prefill", raising(error)), FakeStep("decode", answer))
    ctx = context()
    with pytest.raises(type(error)) as caught:
        await made.run(ctx)
    assert caught.value is error
    assert ran[-1] == "prefill"
    assert ctx.legs == [LegTime("prefill", 1.0, outcome)]


async def test_a_client_who_leaves_is_neither() -> None:
    class Gone(BaseException):
        """Stands for a cancellation, which is no Exception either."""

    made, _ = pipeline(FakeStep("decode", raising(Gone())))
    ctx = context()
    with pytest.raises(Gone):
        await made.run(ctx)
    assert ctx.legs == [LegTime("decode", 1.0, "cancelled")]


async def test_without_an_answer_it_is_a_fault_of_ours() -> None:
    made, _ = pipeline(FakeStep("prefill"))
    with pytest.raises(InternalError, match="its last step must be decode"):
        await made.run(context())


async def test_prefill_s_place_is_given_back_when_its_leg_is_over() -> None:
    made, _ = pipeline(FakeStep("render"), FakeStep("prefill"), FakeStep("decode", answer))
    freed = Freed()
    await made.run(context(places=freed))
    assert freed.roles == ["prefill"]


def failing(*, retryable: bool = True, elsewhere: bool = True) -> LegFailed:
    error = LegFailed("decode", "x")
    error.retryable, error.elsewhere = retryable, elsewhere
    return error


async def test_a_decode_that_may_have_read_its_hand_over_begins_again_at_prefill_under_another_id() -> None:
    errors = [failing()]

    def decode(ctx: RequestContext) -> str:
        if errors:
            raise errors.pop()
        return answer(ctx)

    asked = Asked()
    made, ran = pipeline(FakeStep("render"), FakeStep("prefill", hand_over), FakeStep("decode", decode), asked=asked)
    ctx = context()
    await made.run(ctx)
    assert ran[3:] == ["render", "prefill", "decode", "prefill", "decode"]
    assert [leg.outcome for leg in ctx.legs] == ["ok", "ok", "LegFailed", "ok", "ok"]
    assert ctx.leg_id != "req-1"
    assert ctx.leg_id.startswith("req-")
    assert asked.again == 1


async def test_it_begins_again_only_once() -> None:
    made, ran = pipeline(FakeStep("prefill", hand_over), FakeStep("decode", raising(failing())))
    with pytest.raises(LegFailed):
        await made.run(context())
    assert ran[2:] == ["prefill", "decode", "prefill", "decode"]


ENDS: dict[str, tuple[list[FakeStep], Exception]] = {
    "the failure is for good": ([FakeStep("prefill", hand_over)], failing(retryable=False)),
    "another worker would not do": ([FakeStep("prefill", hand_over)], failing(elsewhere=False)),
    "nothing was handed over": ([FakeStep("prefill")], failing()),
    "the pipeline has no prefill": ([FakeStep("conditional-decode", hand_over)], failing()),
    "nobody was there": ([FakeStep("prefill")], NoWorker("decode", "x")),
}


@pytest.mark.parametrize(("before", "error"), ENDS.values(), ids=ENDS)
async def test_it_does_not_begin_again_where_that_cannot_help(before: list[FakeStep], error: Exception) -> None:
    asked = Asked()
    made, _ = pipeline(*before, FakeStep("decode", raising(error)), asked=asked)
    with pytest.raises(type(error)) as caught:
        await made.run(context())
    assert (caught.value, asked.again) == (error, 0)

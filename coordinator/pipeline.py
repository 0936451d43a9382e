"""Runs the steps in file order, times each, and stops at the first answer or error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.context import LegTime
from coordinator.headers import leg_id
from envelope.errors import ApiError, InternalError, LegError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.context import RequestContext
    from coordinator.step import Events, Step, Upstream


class Pipeline:
    """The steps of one configuration.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, steps: Sequence[Step], upstream: Upstream, events: Events, clock: Callable[[], float]) -> None:
        self.steps = tuple(steps)
        self._upstream = upstream
        self._events = events
        self._clock = clock
        # A prefill beside decode may be out still, and what it leaves is fetched by a leg with the prompt.
        self._forgets = all(step.type != "prefill-decode" for step in self.steps)
        self._prefill = next((i for i, step in enumerate(self.steps) if step.type == "prefill"), None)

    async def run(self, ctx: RequestContext) -> None:
        """Fill ``ctx.answer``.

        Raises:
            ApiError: of the step that failed; the steps behind it were not run.
        """
        for step in self.steps:
            step.admit(ctx)
            if step.role is not None:
                self._upstream.serves(ctx, step.role)
        try:
            await self._run_from(0, ctx)
        except LegError as error:
            if not (error.retryable and error.elsewhere) or ctx.handover is None or self._prefill is None:
                raise
            # Decode failed and may have read the hand-over, which is good for one reader. So: once more, from prefill.
            ctx.begin_again(leg_id(ctx.request_id))
            self._events.begun_again()
            await self._run_from(self._prefill, ctx)

    async def _run_from(self, first: int, ctx: RequestContext) -> None:
        for step in self.steps[first:]:
            await self._run(step, ctx)
            if ctx.heard:
                ctx.carry()
            early = ctx.answer is not None and step is not self.steps[-1]  # a probe that hit: no prefill will be asked
            if ctx.places is not None and (step.type == "prefill" or early):
                ctx.places.free("prefill")  # decode takes far longer, and others can be computed meanwhile
            if ctx.answer is not None:
                if self._forgets and not isinstance(ctx.answer.source, bytes) and not ctx.unfetched():
                    ctx.forget_prompt()
                return
        raise InternalError("the pipeline ended without an answer; its last step must be decode")

    async def _run(self, step: Step, ctx: RequestContext) -> None:
        begun, outcome, before = self._clock(), "cancelled", len(ctx.attempts)
        try:
            outcome = await step.run(ctx, self._upstream)
        except ApiError as error:
            outcome = type(error).__name__
            raise
        except Exception:
            outcome = "InternalError"
            raise
        finally:
            seconds, attempts = self._clock() - begun, tuple(ctx.attempts[before:])
            ctx.legs.append(LegTime(step.type, seconds, outcome, attempts, begun))

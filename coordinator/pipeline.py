"""Runs the steps in file order, times each, and stops at the first answer or error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.context import LegTime
from envelope.errors import ApiError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.context import RequestContext
    from coordinator.step import Step, Upstream


class Pipeline:
    """The steps of one configuration.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, steps: Sequence[Step], upstream: Upstream, clock: Callable[[], float]) -> None:
        self.steps = tuple(steps)
        self._upstream = upstream
        self._clock = clock

    async def run(self, ctx: RequestContext) -> None:
        """Fill ``ctx.answer``.

        Raises:
            ApiError: of the step that failed; the steps behind it were not run.
        """
        for step in self.steps:
            step.admit(ctx)
        for step in self.steps:
            await self._run(step, ctx)
            if ctx.answer is not None:
                return
        raise InternalError("the pipeline ended without an answer; its last step must be decode")

    async def _run(self, step: Step, ctx: RequestContext) -> None:
        begun, outcome = self._clock(), "cancelled"
        try:
            outcome = await step.run(ctx, self._upstream)
        except ApiError as error:
            outcome = type(error).__name__
            raise
        except Exception:
            outcome = "InternalError"
            raise
        finally:
            ctx.legs.append(LegTime(step.type, self._clock() - begun, outcome))

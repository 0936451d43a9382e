"""What the parameters of every step that makes a leg have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from coordinator.settings.units import Count, Duration
from coordinator.step import LegLimits


class StepParams(BaseModel):
    """Base of every step's ``Params``: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LegParams(StepParams):
    """Time limits of the leg that a step makes; unset means no limit, except for connecting."""

    connect_timeout: Duration | None = Field(
        default=5.0, description="until a connection to the worker stands; then another error is a 502"
    )
    first_byte_timeout: Duration | None = Field(
        default=None, description="until the answer begins; unset in gateway mode means gateway.timeout"
    )
    idle_timeout: Duration | None = Field(default=None, description="between two reads of an answer that has begun")
    request_timeout: Duration | None = Field(default=None, description="the whole leg, all its attempts together")
    max_attempts: Count = Field(
        default=2, description="how many workers are tried, while nothing has reached the client; 1 is no retry"
    )

    def limits(self) -> LegLimits:
        return LegLimits(
            connect_s=self.connect_timeout or None,
            first_byte_s=self.first_byte_timeout,
            idle_s=self.idle_timeout or None,
            request_s=self.request_timeout or None,
            attempts=self.max_attempts,
        )

"""What every step's params have in common: known keys only, and the time limits of a leg."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.step import LegLimits
from steps.params import LegParams, StepParams


def test_an_unknown_key_is_refused_and_values_never_change() -> None:
    with pytest.raises(ValidationError):
        StepParams.model_validate({"x": 1})
    with pytest.raises(ValidationError):
        LegParams().idle_timeout = 3.0  # type: ignore[misc]


# (what the file says, the limits of the leg in seconds); 0 is no limit
LIMITS: list[tuple[dict[str, Any], LegLimits]] = [
    ({}, LegLimits(connect_s=5.0, first_byte_s=None, idle_s=None, request_s=None)),
    (
        {"connect_timeout": "500ms", "first_byte_timeout": "30s", "idle_timeout": "2m", "request_timeout": "1h"},
        LegLimits(connect_s=0.5, first_byte_s=30.0, idle_s=120.0, request_s=3600.0),
    ),
    ({"connect_timeout": 0, "idle_timeout": 0, "request_timeout": 0}, LegLimits(connect_s=None)),
    ({"connect_timeout": None, "idle_timeout": None, "request_timeout": None}, LegLimits(connect_s=None)),
]


@pytest.mark.parametrize(("given", "limits"), LIMITS)
def test_the_file_s_durations_become_limits(given: dict[str, Any], limits: LegLimits) -> None:
    assert LegParams.model_validate(given).limits() == limits


def test_a_first_byte_of_0_is_no_limit_where_the_role_has_one() -> None:
    """Unset (None) means the role's own limit, so 0 must stay what it is."""
    assert LegParams.model_validate({"first_byte_timeout": 0}).limits().first_byte_s == 0.0
    assert LegParams().limits().first_byte_s is None


def test_how_many_workers_are_tried() -> None:
    assert LegParams().limits().attempts == 2
    assert LegParams.model_validate({"max_attempts": 1}).limits().attempts == 1
    with pytest.raises(ValidationError):
        LegParams.model_validate({"max_attempts": 0})

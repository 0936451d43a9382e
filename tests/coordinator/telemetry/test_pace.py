"""The clock points of a stream: from the request read, between frames with content, and by the token."""

from __future__ import annotations

import pytest

from coordinator.telemetry.pace import GAP_SECONDS, Pace


def paced(*ticks: float, read_at: float = 0.0) -> Pace:
    left = iter(ticks)
    pace = Pace(lambda: next(left), read_at)
    for _ in ticks:
        pace.mark()
    return pace


def test_a_stream_without_content_has_no_times() -> None:
    pace = paced()
    assert (pace.ttft_s, pace.lasted_s, pace.per_token_s(5)) == (None, 0.0, None)
    assert sum(pace.gaps) == 0


def test_the_first_frame_ends_the_time_to_the_first_token_and_is_no_gap() -> None:
    pace = paced(12.0, read_at=10.0)
    assert (pace.ttft_s, pace.lasted_s, sum(pace.gaps)) == (2.0, 0.0, 0)


def test_a_clock_at_zero_is_a_clock() -> None:
    pace = paced(0.0, 0.5)
    assert (pace.ttft_s, sum(pace.gaps)) == (0.0, 1)


@pytest.mark.parametrize(("gap", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (60.0, 16), (61.0, 17)])
def test_a_gap_is_in_the_first_bucket_whose_bound_it_does_not_exceed(gap: float, bucket: int) -> None:
    gaps = paced(0.0, gap).gaps
    assert len(gaps) == len(GAP_SECONDS) + 1
    assert [index for index, count in enumerate(gaps) if count] == [bucket]


def test_the_time_of_a_token_is_the_mean_over_all_but_the_first() -> None:
    """TPOT: (last - first) / (output tokens - 1); a frame may hold several."""
    pace = paced(1.0, 2.0, 4.0)
    assert pace.per_token_s(7) == 0.5
    assert pace.per_token_s(1) is None
    assert pace.per_token_s(0) is None


def test_one_frame_has_no_time_per_token_however_many_it_holds() -> None:
    assert paced(1.0).per_token_s(100) is None

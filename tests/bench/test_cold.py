"""The measurement of single chunks runs, and says what it measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bench import cold

if TYPE_CHECKING:
    import pytest


def test_chunks_of_each_shape_are_timed_with_and_without_warm_caches(capsys: pytest.CaptureFixture[str]) -> None:
    cold.main(["--chunks", "8", "--spoil-kib", "1"])
    figures = r"[0-9.]+ µs \(p10 [0-9.]+\)"
    told = re.findall(rf"^(\w+): cold {figures}, warm {figures}$", capsys.readouterr().out, re.MULTILINE)
    assert told == list(cold.SHAPES)

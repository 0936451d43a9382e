"""What the tests of wire shapes share: a call that proves it changed nothing, and the recordings."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"


@pytest.fixture
def pure() -> Callable[..., Any]:
    """Call a function, and fail if it changed an argument: a value, a number's type or the order of keys."""

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before = repr(copy.deepcopy((args, options)))
        try:
            return function(*args, **options)
        finally:
            assert repr((args, options)) == before, "an argument was changed"

    return call


@pytest.fixture(scope="session")
def recorded() -> Callable[..., dict[str, Any]]:
    """Return one recorded exchange, such as ``render/render_chat_plain``."""

    def read(name: str, version: str = "vllm-0.33.0") -> dict[str, Any]:
        exchange: dict[str, Any] = json.loads((RECORDINGS / version / f"{name}.json").read_text())
        return exchange

    return read

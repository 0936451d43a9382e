"""The tiny model, rendered in this process as its workers are started: hermes tools, qwen3 reasoning, 4096 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.rendering.renderer import Model, Renderer
from envelope.errors import ApiError
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL = DATA / "tiny-model"


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(Model(str(MODEL), 4096, tool_parser="hermes", reasoning_parser="qwen3"), threads=2)


@pytest.fixture(scope="session")
def rendered(renderer: Renderer) -> Callable[..., tuple[int, Any]]:
    """Return the status and the answer, as a render service would send them."""

    def ask(api: str, body: dict[str, Any], by: Renderer = renderer) -> tuple[int, Any]:
        try:
            return 200, json.loads(json.dumps(by.render_now(Format(api), body, "id")))
        except ApiError as error:
            return error.status, {"error": error.body("")}

    return ask

"""A worker on an OpenAI route is given render's tokens only where they say all that the request says."""

from __future__ import annotations

from typing import Any

import pytest

from steps.prompt import prompt_ids

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
RENDERED = {"token_ids": [1, 2]}

CASES = {
    "text": ("chat", {"messages": HI}, RENDERED, [1, 2]),
    "a completion": ("completions", {"prompt": "hi", "echo": False}, RENDERED, [1, 2]),
    "nothing was rendered": ("chat", {"messages": HI}, None, None),
    "media would be dropped": ("chat", {"messages": IMAGE}, RENDERED, None),
    "an echo needs the text": ("completions", {"prompt": "hi", "echo": True}, RENDERED, None),
}


@pytest.mark.parametrize(("api", "body", "rendered", "ids"), CASES.values(), ids=CASES)
def test_the_tokens_that_stand_for_the_text(context: Any, api: str, body: Any, rendered: Any, ids: Any) -> None:
    assert prompt_ids(context(api, body, rendered=rendered)) == ids

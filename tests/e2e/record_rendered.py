"""Ask a render service of vLLM's for what the quick tests compare with: ``python -m tests.e2e.record_rendered URL``.

The service serves ``tests/data/tiny-model`` as ``tests.e2e.servers`` starts it.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.bounds import HANG_S
from tests.coordinator.rendering.requests import REFUSED, REQUESTS

FILE = Path(__file__).resolve().parents[1] / "data" / "rendered.json"
PATHS = {
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "messages": "/v1/messages/render",
}


def ask(url: str, api: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status and the body of a render service's answer."""
    headers = {"Content-Type": "application/json", "X-Request-Id": "id"}
    request = urllib.request.Request(url + PATHS[api], json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def main(url: str) -> None:
    answers = {
        name: dict(zip(("status", "body"), ask(url, *request), strict=True))
        for name, request in (REQUESTS | {f"refused: {name}": request for name, request in REFUSED.items()}).items()
    }
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""The official Node SDK adds up a chat stream to the answer that the Python one is given whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bounds import HANG_S
from tests.e2e.conftest import BOOT_S
from tests.e2e.conversations import CONVERSATIONS
from tests.e2e.vllm_env import DEFAULT_VERSION, environment

if TYPE_CHECKING:
    from tests.e2e.conftest import Coordinator

pytestmark = pytest.mark.e2e

SOURCE = Path(__file__).parent / "node_sdk"
TALKS = ("plain", "japanese", "tool call after text", "two tool calls")


@pytest.fixture(scope="module")
def script() -> Path:
    """Install the SDK once, beside the other environments of this suite."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    package = (SOURCE / "package.json").read_bytes()
    folder = environment(DEFAULT_VERSION).parent / f"node-{hashlib.sha256(package).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "installed").exists():
        shutil.copy(SOURCE / "package.json", folder)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=BOOT_S)
        (folder / "installed").touch()
    return Path(shutil.copy(SOURCE / "stream.mjs", folder))


@pytest.mark.parametrize("name", TALKS)
def test_a_stream_adds_up_to_the_whole_answer(front: Coordinator, script: Path, name: str) -> None:
    asked = CONVERSATIONS[name].ask()
    whole = front.sdk.chat.completions.create(**asked)

    body = asked | asked.get("extra_body", {}) | {"stream": True, "stream_options": {"include_usage": True}}
    body.pop("extra_body", None)
    command = ["node", str(script), f"{front.url}/v1", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)

    assert done.returncode == 0, done.stderr
    streamed = json.loads(done.stdout)
    (choice,) = whole.choices
    message, calls = streamed["choice"]["message"], choice.message.tool_calls or []
    assert (streamed["ids"], streamed["choice"]["finish_reason"]) == (1, choice.finish_reason)
    assert (message.get("content") or "") == (choice.message.content or "")
    assert [call["function"]["arguments"] for call in message.get("tool_calls") or []] == [
        call.function.arguments for call in calls
    ]
    assert streamed["usage"]["completion_tokens"] == whole.usage.completion_tokens

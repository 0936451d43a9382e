"""SGLang's own request models read what ``kv-sglang`` sends to both workers. No SGLang server is run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Config
from coordinator.sim import Settings, SimFleet
from tests.e2e import sglang_env
from tests.e2e.conftest import BOOT_S, VLLM_VERSION
from tests.e2e.servers import ON_CPU
from tests.flows.conftest import config_tree, listening
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, question

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="SGLang imports what the environment of vLLM 0.33 alone has"),
]

Body = dict[str, Any]

# Some of what SGLang has fields for, on each route.
ASKED: dict[str, Body] = {
    CHAT: {"max_completion_tokens": 40, "temperature": 0, "seed": 3, "stop": ["x"], "logprobs": True},
    COMPLETIONS: {"max_tokens": 40, "top_k": 5, "min_p": 0.1, "ignore_eos": False, "logit_bias": {"5": 1.0}},
    RESPONSES: {"max_output_tokens": 40, "instructions": "Be brief.", "store": False, "metadata": {"user": "one"}},
    MESSAGES: {"system": "Be brief.", "top_p": 0.5, "stop_sequences": ["x"], "metadata": {"user_id": "one"}},
}
# What clients of a vLLM fleet may send, and no worker gets.
OURS = {"kv_transfer_params": {"do_remote_decode": True}, "bootstrap_room": "9", "data_parallel_rank": 7}
TIE = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
# What must be seen if it were sent, by what of the reading shows it.
SPOILED: dict[str, Body] = {
    "unknown": {"bootstrap_rooms": [9]},
    "refused": {"bootstrap_room": "nine"},
    "tie": {"bootstrap_room": "9"},
}


async def sent() -> dict[tuple[str, bool, str], Body]:
    """Ask on each route, whole and streamed, and return what each role was sent."""
    legs = {}
    async with SimFleet(settings=Settings(kv="sglang")) as fleet, AsyncExitStack() as stack:
        at = await listening(stack, Config.model_validate(config_tree(fleet, "pair", {}, {})))
        for path, fields in ASKED.items():
            for stream in (False, True):
                body = question(path, "Say hello.", tool=path != COMPLETIONS, stream=stream, **fields, **OURS)
                if path == MESSAGES:
                    del body["chat_template_kwargs"]  # vLLM's own
                if stream and path in (CHAT, COMPLETIONS):
                    body["stream_options"] = {"include_usage": True}
                got = await at.post(path, body)
                assert got.status == 200, got.raw
                for role, worker in (("prefill", fleet.prefill), ("decode", fleet.decode)):
                    [leg] = [one for one in worker.received if one.path == path]
                    legs[path, stream, role] = leg.body
                    worker.received.clear()
    return legs


@pytest.fixture(scope="module")
def readings(vllm_python: Path) -> dict[Any, tuple[Body, Body]]:
    """Each leg's body and what SGLang's models made of it; and the same of a leg that was spoiled, by how."""
    try:
        packages = sglang_env.ensure(VLLM_VERSION)
    except RuntimeError as error:
        pytest.skip(str(error))
    legs: dict[Any, Body] = dict(asyncio.run(sent()))
    asked = {key: (key[0], body) for key, body in legs.items()}
    asked |= {name: (CHAT, legs[CHAT, False, "decode"] | change) for name, change in SPOILED.items()}
    done = subprocess.run(
        [str(vllm_python), "-P", str(Path(__file__).with_name("sglang_models.py"))],
        input=json.dumps(list(asked.values())),
        env={**os.environ, **ON_CPU, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=BOOT_S,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    return {key: (body, reading) for (key, (_, body)), reading in zip(asked.items(), made, strict=True)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
def test_sglang_knows_every_field_of_both_legs(readings, path, stream):
    """They meet in the room that was written, and only decode streams."""
    prefill, _ = readings[path, stream, "prefill"]
    tie = {name: prefill[name] for name in TIE}
    for role, streams in (("prefill", False), ("decode", stream)):
        body, reading = readings[path, stream, role]
        assert ASKED[path].items() <= body.items()
        assert reading == {"refused": [], "unknown": [], "tie": tie, "stream": streams}


def test_what_sglang_does_not_know_or_take_would_be_seen(readings):
    """It skips a field of another name, refuses a room that is no number, and makes a number of a string."""
    assert readings["unknown"][1]["unknown"] == ["bootstrap_rooms"]
    assert readings["refused"][1]["refused"] == ["bootstrap_room"]
    body, reading = readings["tie"]
    assert reading["tie"] == {name: body[name] for name in TIE} | {"bootstrap_room": 9}

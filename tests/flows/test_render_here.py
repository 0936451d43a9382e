"""Prompts that the coordinator renders itself: no client can tell, but for what it refuses."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.settings.problems import ConfigError
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SETUPS, comparable, question

COUNT_TOKENS = f"{MESSAGES}/count_tokens"
MODEL = str(Path(__file__).resolve().parents[1] / "data" / "tiny-model")
HERE = {"tokenizer": MODEL, "max_model_len": 4096, "tool_parser": "hermes", "reasoning_parser": "qwen3"}

ASKED: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "Say hello in Japanese.", {}),
    (CHAT, "What is 2 + 2?", {"thinking": True}),
    (CHAT, "What is the weather in Oslo?", {"tool": True}),
    (CHAT, "What is the weather in Oslo?", {"tool": True, "tool_choice": "required"}),
    (CHAT, "Just say OK.", {"logprobs": True, "top_logprobs": 2}),
    (CHAT, "Count to one hundred.", {"max_completion_tokens": 16}),
    (MESSAGES, "Say hello in Japanese.", {}),
    (MESSAGES, "What is the weather in Oslo?", {"tool": True, "thinking": True}),
    (COMPLETIONS, "Just say OK.", {"logprobs": 2}),
    (COMPLETIONS, "Count to one hundred.", {}),
]


def legs(fleet: Any) -> list[str]:
    """Return what a prefill worker was asked to do; health and route probes ask nothing of it."""
    return [received.path for received in fleet.prefills[0].received if len(received.raw) > len(b"{}")]


async def rendering(coordinator: Any, fleet: Any, setup: str) -> Any:
    shape, steps = SETUPS[setup]
    return await coordinator(fleet, shape, steps={**steps, "render": HERE})


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_answers_are_those_with_a_render_service(coordinator: Any, fleet: Any, setup: str, stream: bool) -> None:
    here = await rendering(coordinator, fleet, setup)
    served = await coordinator(fleet, SETUPS[setup][0], steps={"render": {}, **SETUPS[setup][1]})
    for path, text, fields in ASKED:
        body = question(path, text, **fields, temperature=0, stream=stream)
        ours, theirs = await here.post(path, body), await served.post(path, body)
        assert (ours.status, theirs.status) == (200, 200), ours.raw
        if stream:
            assert comparable(ours.events, "usage") == comparable(theirs.events, "usage")
        else:
            assert comparable(ours.body, "prompt_tokens_details") == comparable(theirs.body, "prompt_tokens_details")


async def test_no_render_service_is_asked_and_the_tokens_are_the_same(coordinator: Any, fleet: Any) -> None:
    here = await rendering(coordinator, fleet, "text")
    assert (await here.chat("Say hello in French.")).status == 200
    assert fleet.render.received == []
    sent = fleet.prefills[0].received[-1].body
    served = await coordinator(fleet, "text")
    assert (await served.chat("Say hello in French.")).status == 200
    assert sent["token_ids"] == fleet.prefills[0].received[-1].body["token_ids"]
    assert await here.count("coordinator_leg_seconds_count", step="render", outcome="ok") == 1


async def test_media_is_refused_before_any_worker_is_asked(coordinator: Any, fleet: Any) -> None:
    here = await rendering(coordinator, fleet, "text")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    got = await here.post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [part]}]})
    assert (got.status, got.error["param"]) == (400, "messages[0].content[0]")
    assert "media needs a render service" in got.error["message"]
    assert legs(fleet) == []


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"system": "Be brief.", "tools": [{"name": "t", "input_schema": {"type": "object"}}]},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        {"thinking": {"type": "disabled"}},
    ],
    ids=["plain", "tools", "thinking", "no thinking"],
)
async def test_a_token_count_is_that_of_the_prompt_that_is_rendered_here(
    coordinator: Any, fleet: Any, own: Any
) -> None:
    """As the answer's usage says; a worker may have no tokenizer to count with, and none is asked."""
    here = await rendering(coordinator, fleet, "text")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 2?"}], **own}
    counted = await here.post(COUNT_TOKENS, body)
    assert COUNT_TOKENS not in [received.path for received in fleet.decodes[0].received]
    answered = await here.post(MESSAGES, {**body, "max_tokens": 4000})
    tokens = answered.body["usage"]["input_tokens"]
    assert counted.body == {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


async def test_a_token_count_that_is_refused_is_told_as_anthropic_does(coordinator: Any, fleet: Any) -> None:
    here = await rendering(coordinator, fleet, "text")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for body in (b"[]", b"{", {"model": "tiny"}, {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}):
        got = await here.post(COUNT_TOKENS, body)
        assert (got.status, got.body["type"], got.error["type"]) == (400, "error", "invalid_request_error")


async def test_an_api_that_is_not_rendered_here_is_refused(coordinator: Any, fleet: Any) -> None:
    here = await rendering(coordinator, fleet, "text")
    got = await here.post(RESPONSES, question(RESPONSES, "Say hello."))
    assert got.status == 400
    assert "API needs a render service" in got.error["message"]
    assert legs(fleet) == []


async def test_all_else_works_as_with_a_render_service(coordinator: Any, fleet: Any) -> None:
    here = await rendering(coordinator, fleet, "text")
    ready, models = await here.get("/readyz"), await here.get("/v1/models")
    assert (ready.status, models.status, models.body["data"][0]["id"]) == (200, 200, "tiny")
    unknown = await here.post(CHAT, {"model": "other", "messages": [{"role": "user", "content": "hi"}]})
    assert (unknown.status, unknown.error["type"]) == (404, "NotFoundError")
    ids = await here.post(COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2})
    generate = await here.post("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}})
    assert (ids.status, generate.status) == (200, 200)


async def test_a_prompt_of_token_ids_gets_the_model_s_defaults_too(coordinator: Any, fleet: Any, legs: Any) -> None:
    """As on the worker's own route; the generate route itself has none."""
    here = await rendering(coordinator, fleet, "text")
    got = await here.post(COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 3], "top_k": 5})
    assert got.status == 200
    [leg] = legs(fleet.decode)
    params = leg.body["sampling_params"]
    assert leg.body["token_ids"] == [1, 2, 3]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.6, 0.95, 5)


async def test_the_log_says_which_tokenizer_was_loaded(
    coordinator: Any, fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await rendering(coordinator, fleet, "text")
    (told,) = [record.fields for record in caplog.records if record.message == "prompts are rendered here"]
    digest = hashlib.sha256((Path(MODEL) / "tokenizer.json").read_bytes()).hexdigest()
    assert told == {"tokenizer": MODEL, "tokenizer_sha": digest, "tokens": 1021, "content_format": "openai"}


async def test_limits_on_tokens_hold(coordinator: Any, fleet: Any) -> None:
    here = await coordinator(fleet, "text", steps={"render": {**HERE, "max_total_tokens": 4}})
    got = await here.chat("Say hello in French.")
    assert (got.status, got.error["param"]) == (400, "messages")


async def test_another_tokenizer_where_answers_are_parsed_is_told_before_the_port_is_bound(
    coordinator: Any, fleet: Any, tmp_path: Path
) -> None:
    shutil.copy(Path(MODEL) / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes() + b"\n")
    parsed = {"derender": "coordinator", "tokenizer": str(tmp_path), "tool_parser": "hermes"}
    decode = {**parsed, "reasoning_parser": "qwen3", "output_mode": "text"}
    with pytest.raises(ConfigError) as told:
        await coordinator(fleet, "text", steps={"render": HERE, "decode": decode})
    (problem,) = told.value.problems
    assert problem.endswith(
        f"params.tokenizer: {tmp_path} has another tokenizer.json than {MODEL}, which render makes the prompts with: "
        "write the same folder in both"
    )


async def test_a_model_that_is_not_there_is_told_before_the_port_is_bound(coordinator: Any, fleet: Any) -> None:
    with pytest.raises(ConfigError) as told:
        await coordinator(fleet, "text", steps={"render": {**HERE, "tokenizer": "/nowhere"}})
    (problem,) = told.value.problems
    assert problem.endswith(
        "pipeline.steps[0].params.tokenizer: /nowhere is no folder, write the model's: with tokenizer.json and "
        "tokenizer_config.json"
    )


FILE = f"""
pools:
  prefill: {{endpoints: ["http://127.0.0.1:1"]}}
  decode: {{endpoints: ["http://127.0.0.1:2"]}}
pipeline:
  kv_connector: kv-nixl
  use_openai_format: false
  steps:
    - {{type: render, params: {{tokenizer: {MODEL}, max_model_len: 4096}}}}
    - {{type: prefill}}
    - {{type: decode, params: {{output_mode: text, wrap: [chat]}}}}
"""


def test_the_command_line_shows_what_is_rendered_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` opens no tokenizer; ``explain`` does, and shows the real token ids."""
    file, request = tmp_path / "c.yaml", tmp_path / "r.json"
    file.write_text(FILE)
    request.write_text('{"messages": [{"role": "user", "content": "Say hello in French."}]}')
    with pytest.raises(SystemExit) as ended:
        main(["check", "--config", str(file)])
    shown = capsys.readouterr().out
    assert (ended.value.code, shown.count("(rendered here)"), shown.count("needs a render service")) == (0, 3, 1)
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--config", str(file), "--request", str(request)])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert '"token_ids": [\n        1,\n        411,' in shown

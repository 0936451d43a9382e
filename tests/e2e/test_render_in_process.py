"""The coordinator's own rendering against vLLM's render service, on every conversation and every field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.rendering.renderer import Model, Renderer
from envelope.errors import ApiError
from envelope.formats import Format
from tests.coordinator.rendering.compare import normal
from tests.coordinator.rendering.requests import REFUSED, REQUESTS
from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.conversations import CONVERSATIONS, joined, said
from tests.e2e.record_rendered import FILE, ask
from tests.e2e.servers import MAX_MODEL_LEN, MODEL, MODEL_NAME
from tests.e2e.wire import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Workers

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION != "0.33", reason="what is rendered here is what vLLM 0.33 renders"),
]

HERE = {
    "tokenizer": str(MODEL),
    "max_model_len": MAX_MODEL_LEN,
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
}


@pytest.fixture(scope="module")
def rendered() -> Callable[[str, dict[str, Any]], tuple[int, Any]]:
    model = Model(str(MODEL), MAX_MODEL_LEN, tool_parser="hermes", reasoning_parser="qwen3")
    renderer = Renderer(model, threads=1)

    def render(api: str, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            return 200, json.loads(json.dumps(renderer.render_now(Format(api), body, "id")))
        except ApiError as error:
            return error.status, error.message

    return render


def test_every_conversation_becomes_the_same_tokens_and_params(workers: Workers, rendered: Any) -> None:
    """All 89 conversations that the model knows, whole and streamed, with the fields that they are asked with."""
    conversations = json.loads((MODEL / "conversations.json").read_text())
    assert len(conversations) == 89
    for at, conversation in enumerate(conversations):
        body = {**conversation["request"], "model": MODEL_NAME, "temperature": 0, "max_tokens": 600}
        body["stream"] = at % 2 == 1
        status, theirs = ask(workers.render.url, "chat", body)
        assert (status, rendered("chat", body)[0]) == (200, 200)
        assert normal(rendered("chat", body)[1]) == normal(theirs), body


def test_every_field_is_resolved_as_the_service_does(workers: Workers, rendered: Any) -> None:
    """And the recorded answers, which the quick tests compare with, are still what this release answers."""
    recorded = json.loads(FILE.read_text())
    for name, (api, body) in REQUESTS.items():
        status, theirs = ask(workers.render.url, api, body)
        assert (name, status, rendered(api, body)[0]) == (name, 200, 200)
        assert normal(rendered(api, body)[1]) == normal(theirs) == normal(recorded[name]["body"]), name
    for name, (api, body) in REFUSED.items():
        assert (name, ask(workers.render.url, api, body)[0], rendered(api, body)[0]) == (name, 400, 400)


def test_a_prompt_has_as_many_tokens_as_the_worker_and_the_service_count(
    coordinator: Callable[[dict], Coordinator], workers: Workers
) -> None:
    asked: list[dict[str, Any]] = [
        {"messages": talk.request["messages"]} for talk in CONVERSATIONS.values() if "tools" not in talk.request
    ]
    asked += [
        {**asked[0], "system": "Be brief.", "tools": [{"name": "t", "input_schema": {"type": "object"}}]},
        {**asked[0], "thinking": {"type": "enabled", "budget_tokens": 2048}},
        {**asked[0], "thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "long " * 900}]}]},
    ]
    pools = {"decode": {"endpoints": [workers.decode.url]}}
    here, served = (
        coordinator({"pools": pools, "pipeline": {"steps": [{"type": "render", "params": render}, {"type": "decode"}]}})
        for render in (HERE, {"address": workers.render.url})
    )
    for own in asked:
        body = {"model": MODEL_NAME, **own}
        counts = [post(f"{url}/v1/messages/count_tokens", body) for url in (here.url, served.url, workers.decode.url)]
        assert {reply.status for reply in counts} == {200}
        assert counts[0].body == counts[1].body == counts[2].body, own
        assert counts[0].body["input_tokens"] > 5


@pytest.mark.parametrize("mode", ["text", "derender"])
@pytest.mark.parametrize("name", ["plain", "japanese", "reasoning", "tool call", "tool result"])
def test_the_model_answers_as_it_was_trained(
    coordinator: Callable[[dict], Coordinator], workers: Workers, name: str, mode: str
) -> None:
    at = coordinator(
        {
            "pools": {
                "prefill": {"endpoints": [workers.prefill.url]},
                "decode": {"endpoints": [workers.decode.url]},
            },
            "pipeline": {
                "kv_connector": "kv-nixl",
                "use_openai_format": False,
                "steps": [
                    {"type": "render", "params": HERE},
                    {"type": "prefill"},
                    {"type": "decode", "params": {"output_mode": mode, "wrap": ["chat"]}},
                ],
            },
        }
    )
    asked, expected = CONVERSATIONS[name].ask(), CONVERSATIONS[name].answer(parsed=mode == "derender")
    if mode == "text":
        streamed = joined(at.sdk.chat.completions.create(**asked, stream=True))[0]
        # Raw text: the template has opened no thought, so the whole answer is content.
        assert (streamed.content, streamed.finish_reason) == (expected.content, "stop")
    else:
        choice = at.sdk.chat.completions.create(**asked).choices[0]
        assert said(choice.message, choice.finish_reason) == expected

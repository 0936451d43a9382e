"""The simulated workers answer recorded requests as the real servers did.

The recorded model has another vocabulary and says other things, so values that depend on tokens are left out; keys,
their order, nulls, ids, refusals and everything that the client sent are compared as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from coordinator.sim import Settings, SimFleet, SimWorker
from coordinator.sim.tokenizer import load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FOLDER = Path(__file__).parents[2] / "data" / "recordings" / "vllm-0.33.0"
SETTINGS = Settings(max_model_len=2048, connector=False)
# Requests whose point depends on the words that the recorded model happened to say.
SAME_POINT: dict[str, dict[str, Any]] = {
    "chat/chat_prefill_leg_no_connector": {"max_tokens": 2},
    "chat/chat_tokens_field_ignored": {"max_tokens": 2},
    "chat/chat_tool_call_truncated": {"max_tokens": 14},
    "generate/generate_derender_tool_call_truncated": {"max_tokens": 14},
    "generate/generate_text_stop_token_id": {"stop_token_ids": [1017]},
    "completions/completion_stop_string": {"stop": ["mulat"]},
    "messages/messages_stop_sequence": {"stop_sequences": ["I"]},
}
OTHER_VOCABULARY = {"chat/chat_reuse_prompt_token_ids"}


def names(folder: str, pattern: str = "*") -> list[str]:
    return sorted(f"{folder}/{path.stem}" for path in (FOLDER / folder).glob(f"{pattern}.json"))


@pytest.fixture
async def servers() -> AsyncIterator[dict[str, SimWorker]]:
    """Servers with the recorded ones' context."""
    async with SimFleet(settings=SETTINGS) as fleet:
        yield {"render": fleet.render, "decode": fleet.decode}


def fit(name: str, body: Any) -> Any:
    """Take out of a recorded request what only the recorded vocabulary has."""
    body = body | SAME_POINT.get(name.removesuffix("_usage").removesuffix("_stream"), {})
    if isinstance(body, dict) and "999999" not in (body.get("logit_bias") or {}):
        body = {key: value for key, value in body.items() if key != "logit_bias"}
    return body


def shape(value: Any) -> Any:
    """Return keys in order, and null or not null; a list is its first element."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict | list) else "list"
    return None if value is None else "value"


# --- refusals -----------------------------------------------------------------------------------------------


def same_refusal(body: Any) -> Any:
    """Make a recorded refusal comparable: the other vocabulary's size is not the point."""
    return re.sub(r"Vocabulary size: \d+", "Vocabulary size: N", str(body))


@pytest.mark.parametrize("name", names("errors"))
async def test_every_recorded_refusal_is_given_in_the_same_words(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    request, response = recording["request"], recording["response"]
    raw = request.get("raw_body")
    headers = {"Content-Type": "application/json", **request["headers"]}
    worker = servers["render" if request["path"].endswith("/render") else "decode"]
    if request["method"] == "GET":
        got = await client.get(worker, request["path"])
    elif raw is not None:
        got = await client.post(worker, request["path"], raw.encode(), headers=headers)
    elif response.get("truncated"):
        url = worker.url + request["path"]
        assert await until_cut(client, url, request["body"]) == response["names"]
        return
    else:
        got = await client.post(worker, request["path"], request["body"], headers=request["headers"])
    assert got.status == response["status"], got.text
    if "_ok_" in name:
        assert [shape(event) for event in got.events[-2:]] == [shape(e) for e in response.get("events", [])[-2:]]
    elif "events" in response:
        assert same_refusal(got.events) == same_refusal(response["events"])
    else:
        assert same_refusal(got.body) == same_refusal(response["body"])


async def until_cut(client: Any, url: str, body: Any) -> list[str | None]:
    """Return the names of the events that come before the connection breaks."""
    raw = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.session.post(url, json=body) as response:
            async for chunk in response.content.iter_any():
                raw += chunk
    return [line.removeprefix("event: ") for line in raw.decode().split("\n") if line.startswith("event: ")]


# --- render -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("render"))
async def test_a_rendered_request_has_what_was_recorded(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    body = recording["request"]["body"]
    # The recorded model has no generation config; ours has one, and it shows where the client says nothing.
    unset = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    got = await client.post(
        servers["render"], recording["request"]["path"], unset | body, headers=recording["request"]["headers"]
    )
    want = recording["response"]["body"]
    assert rendered(got.body) == rendered(want)


def rendered(answer: Any) -> Any:
    """Return a render's answer as ordered pairs, without tokens, random ids and the rest of the context."""
    if isinstance(answer, list):
        return [rendered(one) for one in answer]
    pairs = dict(answer)
    pairs["token_ids"] = bool(pairs["token_ids"])
    pairs["token_offsets"] = pairs["token_offsets"] is None
    pairs["request_id"] = re.sub(r"[0-9a-f]{16}", "RANDOM", pairs["request_id"])
    params = dict(pairs["sampling_params"])
    if params.get("max_tokens", 0) > 1000:
        params["max_tokens"] = "the rest of the context"
    pairs["sampling_params"] = list(params.items())
    return list(pairs.items())


# --- whole answers ------------------------------------------------------------------------------------------


def whole(folder: str) -> Iterator[Any]:
    for name in names(folder):
        if "stream" not in name and "error" not in name and "count_tokens" not in name and name not in OTHER_VOCABULARY:
            yield pytest.param(name, id=name)


@pytest.mark.parametrize("name", [*whole("chat"), *whole("completions"), *whole("responses"), *whole("messages")])
async def test_a_whole_answer_has_the_recorded_keys_in_order(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    request = recording["request"]
    body = fit(name, request["body"])
    got = await client.post(servers["decode"], request["path"], body, headers=request["headers"])
    want = recording["response"]["body"]
    assert got.status == 200
    if name.startswith("messages"):
        assert [key for key, _ in shape(got.body)] == [key for key, _ in shape(want)]
    else:
        assert shape(without_logprobs(got.body)) == shape(without_logprobs(want))
        assert logprob_shapes(got.body) == logprob_shapes(want)
    if "choice" in (body.get("structured_outputs") or {}):
        assert said(got.body) == said(want)


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """Leave out the dicts whose keys are tokens."""
    choices = [
        {key: item if key not in ("logprobs", "prompt_logprobs") else None for key, item in choice.items()}
        for choice in answer.get("choices", [])
    ]
    return {**answer, "prompt_logprobs": None, **({"choices": choices} if choices else {})}


def logprob_shapes(answer: dict[str, Any]) -> Any:
    """Return each choice's logprobs as keys; those of completions as the names of its lists."""
    shapes = []
    for choice in answer.get("choices", []):
        logprobs = choice.get("logprobs")
        if logprobs is None:
            shapes.append(None)
        elif "content" in logprobs:
            shapes.append([(list(entry), len(entry["top_logprobs"]) > 0) for entry in logprobs["content"][:1]])
        else:
            shapes.append(list(logprobs))
    return shapes


def said(answer: dict[str, Any]) -> Any:
    """Return what the model said, where a grammar made both models say the same; thoughts differ."""
    if "choices" in answer:
        return [
            (
                choice["message"]["content"],
                [call["function"] for call in choice["message"].get("tool_calls", [])],
                choice["finish_reason"] if choice["finish_reason"] != "length" else None,
                choice["stop_reason"],
            )
            for choice in answer["choices"]
            if choice["finish_reason"] != "length"
        ]
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in answer["output"]
        if item["type"] != "reasoning"
    ]


# --- generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in names("generate") if "_stream" not in name])
async def test_a_generate_answer_has_the_recorded_keys_in_order(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    request = recording["request"]
    got = await client.post(servers["decode"], request["path"], generated(name, request), headers=request["headers"])
    want = recording["response"]["body"]
    assert got.status == 200, got.text
    assert shape(without_logprobs(got.body)) == shape(without_logprobs(want))
    assert token_logprobs(got.body) == token_logprobs(want)
    if "choice" in (request["body"]["sampling_params"].get("structured_outputs") or {}) and "message" in got.text:
        assert said(got.body) == said(want)


@pytest.mark.parametrize("name", [name for name in names("generate") if "_stream" in name])
async def test_a_generate_stream_has_the_recorded_kinds_of_chunks(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    request = recording["request"]
    got = await client.post(servers["decode"], request["path"], generated(name, request), headers=request["headers"])
    assert kinds(got.events, got.names) == kinds(recording["response"]["events"], recording["response"]["names"])


def generated(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded generate request with a prompt of our own vocabulary."""
    body: dict[str, Any] = request["body"]
    chat = body["token_ids"][0] == 1
    messages = [{"role": "user", "content": "Hello there"}]
    kwargs = (body.get("parse_context") or {}).get("chat_template_kwargs") or {"add_generation_prompt": True}
    prompt = load().apply_template(messages, None, kwargs) if chat else "Hello there"
    return {
        **body,
        "token_ids": load().encode(prompt),
        "sampling_params": fit("", body["sampling_params"]) | SAME_POINT.get(name, {}),
    }


def token_logprobs(answer: dict[str, Any]) -> Any:
    """Return each choice's logprobs as the keys of its first position, and whether it has rivals."""
    return [
        (list(logprobs["content"][0]), [list(top) for top in logprobs["content"][0]["top_logprobs"][:1]])
        if (logprobs := choice["logprobs"])
        else None
        for choice in answer["choices"]
    ]


# --- 0.32 ---------------------------------------------------------------------------------------------------

V032 = FOLDER.parent / "vllm-0.32.0"


@pytest.fixture
async def older() -> AsyncIterator[SimWorker]:
    worker = SimWorker("decode", settings=Settings(max_model_len=2048, connector=False, version="0.32.0"))
    await worker.start()
    yield worker
    await worker.stop()


@pytest.mark.parametrize("name", sorted(f"../vllm-0.32.0/{path.stem}" for path in V032.glob("*.json")))
async def test_version_0_32_answers_as_recorded(name: str, older: SimWorker, recorded: Any, client: Any) -> None:
    recording = recorded(name)
    request, want = recording["request"], recording["response"]
    if "derender_chat" in name:
        pytest.skip("the derender routes are not simulated")
    body = fit("", request["body"])
    if "token_ids" in body:
        body = generated("", {"body": body})
    if "render" in name and "generate" not in name:
        body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | body
    got = await client.post(older, request["path"], body)
    assert got.status == want["status"], got.text
    if "events" in want:
        assert kinds(got.events, got.names) == kinds(want["events"], want["names"])
    elif got.status != 200:
        assert got.body == want["body"]
    elif "render" in name and "generate" not in name:
        assert rendered(got.body) == rendered(want["body"])
    elif want.get("body") is not None:
        assert shape(without_logprobs(got.body)) == shape(without_logprobs(want["body"]))


# --- streams ------------------------------------------------------------------------------------------------


def streamed(folder: str) -> Iterator[Any]:
    for name in names(folder):
        if "_stream" in name:
            yield pytest.param(name, id=name)


@pytest.mark.parametrize(
    "name", [*streamed("chat"), *streamed("completions"), *streamed("responses"), *streamed("messages")]
)
async def test_a_stream_has_the_recorded_kinds_of_chunks_in_order(
    name: str, servers: dict[str, SimWorker], recorded: Any, client: Any
) -> None:
    recording = recorded(name)
    request = recording["request"]
    got = await client.post(servers["decode"], request["path"], fit(name, request["body"]), headers=request["headers"])
    want = recording["response"]
    assert got.headers["Content-Type"] == want["headers"]["content-type"]
    assert kinds(got.events, got.names) == kinds(want["events"], want["names"])


def kinds(events: list[Any], names: list[str | None]) -> list[Any]:
    """Return the kinds of chunks, each run of one kind once, thoughts left out, choices told apart by index."""
    shapes = []
    for event, name in zip(events, names, strict=True):
        chunk = chunk_shape(event)
        if chunk is None:
            continue
        if "reasoning" in str(chunk) or "thinking" in str(chunk) or "signature" in str(chunk):
            continue
        if (name, chunk) not in shapes:
            shapes.append((name, chunk))
    # In what order the choices of several prompts or of n > 1 take turns is the scheduler's.
    return sorted(shapes, key=str) if "'index', 1" in str(shapes) else shapes


def chunk_shape(event: Any) -> Any:
    """Return a chunk's keys; None for one that says nothing."""
    if isinstance(event, str):
        return event
    for choice in event.get("choices", []):
        choice["logprobs"] = sorted(choice["logprobs"]) if choice.get("logprobs") else None
        if "delta" in choice and (choice["finish_reason"] == "length" or choice.get("stop_reason")):
            choice["delta"] = "any"  # what the last token was is the model's
        if choice.get("delta") == {} and choice["finish_reason"] is None:
            return None  # a tag: the recorded model did not open its thoughts with one
    if "response" in event:
        event["response"]["output"] = []
    return shape(event)

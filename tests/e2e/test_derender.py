"""Who tells reasoning and tool calls from text makes no difference: worker, coordinator and service say the same.

The worker's own ``/v1/chat/completions`` is the measure, case by case, whole and streamed; the parsers of other
families are held against the derender service's code on synthetic tokens, chunk by chunk, in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from tests.bounds import HANG_S
from tests.e2e.conftest import BOOT_S, ROOT, VLLM_VERSION
from tests.e2e.conversations import CONVERSATIONS, conversation
from tests.e2e.servers import MODEL, MODEL_NAME, ON_CPU
from tests.e2e.test_parity import ASKED, comparable, summed
from tests.e2e.wire import Metrics, get, post, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Pair, Workers
    from tests.e2e.servers import Process
    from tests.e2e.wire import Reply

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="vLLM 0.32 has no derender"),
]

PARSERS = {"tokenizer": str(MODEL), "tool_parser": "hermes", "reasoning_parser": "qwen3"}
MODES: dict[str, dict[str, Any]] = {
    "coordinator": {"derender": "coordinator", **PARSERS},
    "coordinator, of tokens": {"derender": "coordinator", "output_mode": "tokens", **PARSERS},
    "service": {"derender": "service"},
}
# What vLLM cannot do, or tell, without a tokenizer on the worker. All else that is asked in tokens goes to workers that
# have none.
CONSTRAINED = {"named tool", "required tool", "json", "json schema", "one of two"}
PROMPTS = {case for case in ASKED if "prompt_logprobs" in ASKED[case]}
# Of the whole answers of parser_matrix.py: ours by text, ours by tokens, the worker's inline, the service's.
INLINE = 2
WITH_TOKENIZER = {"coordinator, of tokens": CONSTRAINED, "service": CONSTRAINED | PROMPTS}
# Streams are cut into chunks as the engine's clock has it, so it is their sums that are compared. A cut call is no
# JSON to be summed up; and prompt_logprobs are refused in a stream.
STREAMED = [case for case in ASKED if case != "cut in a tool call" and "prompt_logprobs" not in ASKED[case]]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def started(
    request: pytest.FixtureRequest, workers: Workers, coordinator: Callable[..., Coordinator], vllm_python: Path
) -> Callable[..., Coordinator]:
    """Start a coordinator that decodes with NIXL hand-overs and derenders in one of the ways."""

    def start(mode: str, case: str = "") -> Coordinator:
        bare = mode in WITH_TOKENIZER and case not in WITH_TOKENIZER[mode]
        pair: Pair | Workers = request.getfixturevalue("bare") if bare else workers
        return coordinator(config(MODES[mode], workers.render, pair), None if mode == "service" else vllm_python)

    return start


@pytest.fixture
def front(request: pytest.FixtureRequest, mode: str, started: Callable[..., Coordinator]) -> Coordinator:
    return started(mode, request.node.callspec.params.get("case", ""))


def config(decode: dict[str, Any], renderer: Process, pair: Pair | Workers) -> dict[str, Any]:
    render = {"address": renderer.url}
    steps = [
        {"type": "render", "params": render},
        {"type": "prefill"},
        {"type": "decode", "params": decode},
        *([{"type": "derender", "params": render}] if decode["derender"] == "service" else []),
    ]
    pools = {"prefill": {"endpoints": [pair.prefill.url]}, "decode": {"endpoints": [pair.decode.url]}}
    pipeline = {"kv_connector": "kv-nixl", "use_openai_format": False, "steps": steps}
    return {"pools": pools, "pipeline": pipeline}


@pytest.fixture(scope="module")
def own(workers: Workers) -> Callable[..., Reply]:
    """Return the worker's own answer to a case: it is asked once, for all that are compared with it."""

    @cache
    def ask(case: str, stream: bool) -> Reply:
        return post(f"{workers.decode.url}/v1/chat/completions", asked_for(case, stream))

    return ask


def asked_for(case: str, stream: bool) -> dict[str, Any]:
    """Return a case's request, with a salt of its own."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return ASKED[case] | streamed | {"cache_salt": uuid.uuid4().hex}


@pytest.mark.parametrize("case", ASKED)
def test_a_whole_answer_equals_the_worker_s_own(front: Coordinator, own: Callable[..., Reply], case: str) -> None:
    ours, alone = post(f"{front.url}/v1/chat/completions", asked_for(case, False)), own(case, False)
    assert ours.status == alone.status == 200
    mine, own = comparable(ours.body), comparable(alone.body)
    if "stop string" in case:  # one that we have seen: how much of the prompt was cached, the worker tells at its end
        for answer in (mine, own):
            answer["usage"].pop("prompt_tokens_details")
    assert mine == own


@pytest.mark.parametrize("case", STREAMED)
def test_a_stream_adds_up_to_the_worker_s_own(front: Coordinator, own: Callable[..., Reply], case: str) -> None:
    ours, alone = post(f"{front.url}/v1/chat/completions", asked_for(case, True)), own(case, True)
    assert summed(ours.events) == summed(alone.events)
    counts = [reply.events[-1]["usage"] for reply in (ours, alone)]
    for usage in counts:
        usage.pop("prompt_tokens_details", None)
        usage.pop("completion_tokens_details", None)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("include", [True, False])
def test_hidden_reasoning_is_told_by_nothing(front: Coordinator, include: bool) -> None:
    """S28: neither by logprobs nor by token ids, of which a parser that hides reasoning shows none."""
    asked = CONVERSATIONS["reasoning"].body(logprobs=True, return_token_ids=True, include_reasoning=include)
    for stream in (False, True):
        ours = post(f"{front.url}/v1/chat/completions", asked | {"stream": stream})
        thought = summed(ours.events)[0]["reasoning"] if stream else ours.body["choices"][0]["message"]["reasoning"]
        assert bool(thought) is include
        choices = [choice for event in ours.events for choice in event["choices"]] if stream else ours.body["choices"]
        assert any(choice.get("logprobs") for choice in choices) is include
        assert any(choice.get("token_ids") for choice in choices) is include


@pytest.mark.parametrize("case", sorted(CONSTRAINED))
@pytest.mark.parametrize("mode", WITH_TOKENIZER)
def test_what_workers_without_a_tokenizer_cannot_do_is_refused(
    started: Callable[..., Coordinator], mode: str, case: str
) -> None:
    front = started(mode)
    for stream in (False, True):
        refused = post(f"{front.url}/v1/chat/completions", asked_for(case, stream))
        assert (refused.status, refused.body["error"]["type"]) == (400, "BadRequestError")
        assert "Structured outputs requires a tokenizer" in refused.body["error"]["message"]
    asked = CONVERSATIONS["plain"].body(bad_words=["Paris"])
    refused = post(f"{front.url}/v1/chat/completions", asked)
    assert (refused.status, refused.body["error"]["param"]) == (400, "bad_words")


@pytest.mark.timeout(BOOT_S)  # the coordinators are its own, one of them with parser processes
@pytest.mark.parametrize(
    ("decode", "misses"),
    [
        ({"derender": "worker", "output_mode": "derender"}, "output_mode derender"),
        ({"derender": "coordinator", "output_mode": "text", **PARSERS}, "output_mode text"),
        ({"derender": "worker", "use_openai_format": True}, "/v1/chat/completions"),
    ],
)
def test_workers_without_a_tokenizer_are_named_where_one_is_needed(
    bare: Pair, workers: Workers, coordinator: Callable[..., Coordinator], vllm_python: Path, decode: Any, misses: str
) -> None:
    """At the start, in the log and on /readyz; and nobody is sent there."""
    here = coordinator(config(decode, workers.render, bare), vllm_python, ready=False)
    said = f"decode: {bare.decode.url} has no tokenizer, which {misses} needs: start it without --tokens-only"
    wait_until(lambda: said in get(f"{here.url}/readyz").raw.decode(), 60, "the worker is named")
    assert get(f"{here.url}/readyz").status == 503
    assert f"not ready: {said}" in here.process.log_tail()
    refused = post(f"{here.url}/v1/chat/completions", CONVERSATIONS["plain"].body())
    assert refused.status == 502 and "has no tokenizer" in refused.body["error"]["message"]


def test_a_render_server_without_a_tokenizer_is_named(
    bare: Pair, workers: Workers, coordinator: Callable[..., Coordinator]
) -> None:
    here = coordinator(config({"derender": "worker", "wrap": "all"}, bare.prefill, workers), ready=False)
    said = f"render: {bare.prefill.url} has no tokenizer, which "
    wait_until(lambda: said in get(f"{here.url}/readyz").raw.decode(), 60, "the server is named")


WEATHER = CONVERSATIONS["tool call after reasoning"]


def test_a_responses_stream_has_the_items_of_the_worker_s_own(front: Coordinator, workers: Workers) -> None:
    tool = {"type": "function", **WEATHER.request["tools"][0]["function"]}
    asked = {"model": MODEL_NAME, "input": WEATHER.request["messages"], "temperature": 0, "store": False,
             "stream": True, "tools": [tool], "max_output_tokens": 200,
             "chat_template_kwargs": {"enable_thinking": True}}  # fmt: skip
    found = []
    for url in (front.url, workers.decode.url):
        frames = post(f"{url}/v1/responses", asked).raw.decode().strip().split("\n\n")
        events = [json.loads(frame.split("\ndata: ", 1)[1]) for frame in frames]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        output = json.loads(json.dumps(events[-1]["response"]["output"]))
        for item in output:
            item.pop("id")
            item.pop("call_id", None)
        found.append((once, output))
    assert found[0] == found[1]
    assert [item["type"] for item in found[0][1]] == ["reasoning", "message", "function_call"]


def test_a_messages_stream_has_the_blocks_of_the_worker_s_own(front: Coordinator, workers: Workers) -> None:
    function = WEATHER.request["tools"][0]["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    said = []
    for url in (front.url, workers.decode.url):
        with (
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=HANG_S) as sdk,
            sdk.messages.stream(
                model=MODEL_NAME, max_tokens=200, messages=WEATHER.request["messages"], tools=[tool],
                extra_body={"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}},
            ) as live,
        ):  # fmt: skip
            message = live.get_final_message()
        blocks = [block.model_dump(exclude={"id", "signature"}) for block in message.content]
        said.append((blocks, message.stop_reason))
    assert said[0] == said[1]
    assert [block["type"] for block in said[0][0]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("mode", WITH_TOKENIZER)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_only_we_see_stops_the_worker(
    bare: Pair, started: Callable[..., Coordinator], mode: str, stream: bool
) -> None:
    """S29: the worker would go on to the end of its context, so the leg is closed, which aborts it there."""
    front = started(mode)
    asked = conversation("Count to twenty.").body(stop=["12"], ignore_eos=True, max_tokens=3000, stream=stream)
    made = Metrics(bare.decode.url).total("vllm:generation_tokens_total")
    ours = post(f"{front.url}/v1/chat/completions", asked)
    choice = ours.body["choices"][0] if not stream else summed(ours.events)[0]
    text = choice["content"] if stream else choice["message"]["content"]
    assert text.strip().endswith("11,")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "12")
    wait_until(lambda: not Metrics(bare.decode.url).running, 30, "the worker has nothing to do")
    assert Metrics(bare.decode.url).total("vllm:generation_tokens_total") - made < 2000


@pytest.mark.parametrize("mode", WITH_TOKENIZER)
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_of_tokens_equals_the_worker_s_own(
    workers: Workers, started: Callable[..., Coordinator], mode: str, stream: bool
) -> None:
    """Nothing is parsed there: tokens become text, with logprobs, and stop strings are cut off."""
    front = started(mode)
    prompt = "<|im_start|>user\nCount to twenty.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 30, "logprobs": 1, "stop": ["9"]}
    texts = []
    for url in (front.url, workers.decode.url):
        reply = post(f"{url}/v1/completions", asked | {"stream": stream})
        choices = [e["choices"][0] for e in reply.events if e["choices"]] if stream else reply.body["choices"]
        scores = [score for choice in choices if choice["logprobs"] for score in choice["logprobs"]["token_logprobs"]]
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        text, last = "".join(choice["text"] for choice in choices), choices[-1]
        texts.append((text, tokens, last["finish_reason"], last["stop_reason"]))
        assert len(scores) == len(tokens)
    assert texts[0] == texts[1]


# --- parsers of other families -------------------------------------------------------------------------------------


FAMILIES = [
    *("hermes", "llama3_json", "pythonic", "deepseek", "granite", "granite4"),
    *("mistral v3", "mistral v13"),  # by Mistral's own tokenizers
]


@pytest.fixture(scope="module")
def matrix(vllm_python: Path) -> dict[str, Any]:
    """Both sides of every family, option and chunking, from one process that has vLLM."""
    script = Path(__file__).with_name("parser_matrix.py")
    env = os.environ | ON_CPU | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    command = [str(vllm_python), str(script), str(MODEL)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BOOT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_delta_of_a_family_is_the_worker_s_and_the_service_s(matrix: dict[str, Any], family: str) -> None:
    """At one token, three tokens and all of them in a chunk, from text and from tokens, and whole."""
    differ = {
        (case, how): sides
        for case, ways in matrix[family].items()
        for how, sides in ways.items()
        if any(side != sides[-1] for side in sides)
    }
    assert differ == {}
    assert len(matrix[family]) == 15
    # What is cut at once has three tokens at most, and is all there in a chunk of three.
    assert all({"text by 1", "tokens by all"} <= ways.keys() for ways in matrix[family].values())
    assert [case for case, ways in matrix[family].items() if "whole" not in ways] == ["two choices"]
    assert len(matrix[family]["auto"]) == 7


# At which chunkings vLLM's parser, fed a stream, says what it says of the whole: some older ones lose parts at others.
ADDS_UP = {
    "hermes": ("1", "3", "all"),
    "granite4": ("1", "3", "all"),
    "pythonic": ("1", "3", "all"),
    "llama3_json": ("1", "3"),
    "deepseek": ("1",),
    "mistral v13": (
        "1",
        "3",
        "all",
    ),  # before v11, its stream drops calls that tool_choice forbids, and its whole has them
}


@pytest.mark.parametrize("family", ADDS_UP)
def test_a_stream_adds_up_to_what_a_worker_makes_of_the_whole_inline(matrix: dict[str, Any], family: str) -> None:
    """Whole answers are the worker's own in ``output_mode: derender``; a call that is cut, its whole leaves as text."""
    for case in ("auto", "none", "no parallel calls", "reasoning left out", "no thinking"):
        ways = matrix[family][case]
        message, finish, *_ = ways["whole"][INLINE]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        whole = (message.get("content") or "", message.get("reasoning") or "", calls, finish)
        for sent in ("text", "tokens"):
            for size in ADDS_UP[family]:
                assert stripped(added(ways[f"{sent} by {size}"][0])) == stripped(whole), (case, sent, size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_string_ends_every_family_s_answer(matrix: dict[str, Any], family: str) -> None:
    """So that sides which all run on to the end are not taken for equal."""
    every = len(matrix[family]["auto"]["whole"][0][3])
    for case, why in {
        "stop string": "Oslo",
        "stop string kept": "Oslo",
        "stop strings, one too early": "slo",
        "stop string that never comes": None,
    }.items():
        ways = matrix[family][case]
        assert {sides[0][-1][2] for how, sides in ways.items() if how != "whole"} == {why}
        for _, _, reason, token_ids in ways["whole"]:
            assert reason == why
            assert (len(token_ids) < every) is (why is not None)


def added(steps: list[Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Put a stream's deltas together: content, reasoning, calls, and why it ended."""
    deltas, calls = [step[0] for step in steps if step], dict[int, list[str]]()
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        name, arguments = calls.setdefault(call["index"], ["", ""])
        function = call.get("function") or {}
        calls[call["index"]] = [name + (function.get("name") or ""), arguments + (function.get("arguments") or "")]
    content, reasoning = ("".join(delta.get(part) or "" for delta in deltas) for part in ("content", "reasoning"))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()], steps[-1][1]


def stripped(said: tuple[str, str, list[tuple[str, str]], str]) -> Any:
    """Without the blanks around text, which a stream gives as they come, and those inside of JSON."""
    content, reasoning, calls, finish = said
    return content.strip(), reasoning.strip(), [(name, json.loads(arguments)) for name, arguments in calls], finish


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "granite"])
def test_what_a_family_says_token_by_token_is_what_was_put_in(matrix: dict[str, Any], family: str) -> None:
    """So that two sides that both find nothing are not taken for equal."""
    _, reasoning, calls, _ = stripped(added(matrix[family]["auto"]["text by 1"][0]))
    assert calls == [("get_weather", {"city": "Rome", "days": 2}), ("get_time", {"city": "Oslo"})]
    assert reasoning == ("hm" if family in ("hermes", "deepseek", "mistral v13") else "")


FIRST_OF_ITS_KIND = """
import json, sys
from coordinator.derender.vllm_parsers import Parsers

parsers, context = Parsers(**json.loads(sys.argv[1])), {"tool_choice": "none"}
before = set(sys.modules)
score = {"token": "token_id:85", "token_id": 85, "logprob": -1.0, "bytes": None, "top_logprobs": []}
choice = {"index": 0, "token_ids": [85], "text": "r", "finish_reason": None, "stop_reason": None}
for decoding in (None, {"skip_special_tokens": False, "stop": ["x"], "min_tokens": 99}):
    job = {"id": "x", "prompt": [1, 85], "n": 1, "context": context, "decoding": decoding}
    parsers.stream(job).chunk({"choices": [{**choice, "logprobs": {"content": [score]}}]})
    rows = [None, {"85": {"logprob": -1.0, "rank": 1, "decoded_token": None}}]
    parsers.whole(job, {"choices": [{**choice, "finish_reason": "stop"}], "prompt_logprobs": rows})
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "vllm")))
"""


def test_the_first_request_of_a_kind_finds_all_of_vllm_loaded(vllm_python: Path) -> None:
    """Else it, and all that are parsed beside it, would wait for seconds."""
    done = subprocess.run(
        [str(vllm_python), "-c", FIRST_OF_ITS_KIND, json.dumps(PARSERS)],
        env=os.environ | ON_CPU | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "CRITICAL"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == []


def test_a_parser_that_there_is_not_is_named_at_the_start(tmp_path: Path, vllm_python: Path) -> None:
    file = tmp_path / "pd.yaml"
    params = {**MODES["coordinator"], "tool_parser": "hermez"}
    steps = [{"type": "render", "params": {"address": "http://127.0.0.1:9"}}, {"type": "decode", "params": params}]
    pipeline = {"use_openai_format": False, "steps": steps}
    pools = {"decode": {"endpoints": ["http://127.0.0.1:9"]}}
    file.write_text(json.dumps({"server": {"listen_addr": "127.0.0.1:0"}, "pools": pools, "pipeline": pipeline}))
    done = subprocess.run(
        [str(vllm_python), "-m", "coordinator", "serve", "--config", str(file)],
        env=os.environ | ON_CPU | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BOOT_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"{file}: pipeline.steps[1].params.tool_parser: vLLM has no 'hermez', did you mean hermes?" in done.stderr

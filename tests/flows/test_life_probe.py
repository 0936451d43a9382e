"""conditional-decode: decode is asked first, whether it has the prompt's KV; a miss is no error."""

import json

import pytest

from coordinator.sim import ABSENT, Canned, Fault
from coordinator.sim.faults import echo

HELLO = "Hello! How can I help you today?"
CHAT = "/v1/chat/completions"


@pytest.fixture
def probing(coordinator, fleet):
    async def start(shape="openai", rule="always_hit", **changes):
        fleet.decode.behave.cache_rule = rule
        steps = {"conditional-decode": {}, **changes.pop("steps", {})}
        return await coordinator(fleet, shape, steps=steps, **changes)

    return start


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_miss_goes_on_and_leaves_no_trace(probing, fleet, legs, shape, stream):
    """L21: one 200, from the second decode leg; the probe is the client's own body on the client's own route."""
    at = await probing(shape, "always_miss")
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text) == (200, True, HELLO)
    assert b'"code":412' not in got.raw
    probe, decode = legs(fleet.decode)
    assert (probe.path, probe.header("prefer"), decode.header("prefer")) == (CHAT, "if-available", None)
    assert "kv_transfer_params" not in probe.body
    assert (len(legs(fleet.prefill)), len(fleet.store.read)) == (1, 1)
    assert await at.count("coordinator_leg_seconds_count", step="conditional-decode", outcome="miss") == 1
    assert await at.count("coordinator_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hit_answers_the_client_without_prefill(probing, fleet, legs, shape, stream):
    """The prompt is in the decode worker's cache: its answer is the client's."""
    at = await probing(shape, "always_hit")
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text) == (200, True, HELLO)
    assert (len(legs(fleet.prefill)), len(legs(fleet.decode))) == (0, 1)
    assert await at.count("coordinator_leg_seconds_count", step="conditional-decode", outcome="hit") == 1


async def test_a_prompt_that_decode_has_seen_is_a_hit_from_then_on(probing, fleet, legs):
    """D8: the first request goes all the way, the second is answered by its probe."""
    at = await probing(rule="seen_before")
    assert [(await at.chat()).text for _ in "12"] == [HELLO, HELLO]
    assert (len(legs(fleet.prefill)), len(legs(fleet.decode))) == (1, 3)


FAILURES = {
    "500": Fault(canned=Canned(500, "secret")),
    "502": Fault(canned=Canned(502, "secret")),
    "503": Fault(canned=Canned(503, "secret")),
    "504": Fault(canned=Canned(504, "secret")),
    "not JSON": Fault(canned=Canned(200, "<secret>")),
    "hangs": Fault(hang=True),
    "error event": Fault(error_after=0),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAILURES.values(), ids=FAILURES)
async def test_a_probe_that_fails_on_the_workers_side_goes_on_with_the_pipeline(probing, fleet, legs, stream, fault):
    """D8: the full pipeline may still answer, and the client never hears of the probe."""
    at = await probing("openai", None, steps={"conditional-decode": {"first_byte_timeout": "150ms"}})
    if fault.error_after == 0 and not stream:
        fault = Fault(truncate="cut")
    fleet.decode.behave.next(fault)
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text) == (200, True, HELLO)
    assert len(legs(fleet.prefill)) == 1
    assert await at.count("coordinator_leg_seconds_count", step="conditional-decode", outcome="probe_failed") == 1


async def test_a_probe_that_reaches_nobody_goes_on_with_the_pipeline(coordinator, fleet_of, legs):
    """D8: one of two decode workers is gone; the other answers."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, steps={"conditional-decode": {}})
    await fleet.decodes[0].refuse_connections()
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_probe_that_is_refused_is_final(probing, fleet, legs, status, stream):
    """D8: any other 4xx than 412 is the client's mistake, and the pipeline would only repeat it."""
    refused = {"error": {"message": "no", "type": "NotFoundError", "param": "model", "code": status}}
    at = await probing()
    fleet.decode.behave.next(Fault(canned=Canned(status, json.dumps(refused))))
    got = await at.chat(stream=stream)
    assert (got.status, got.body) == (status, refused)
    assert legs(fleet.prefill) == []


async def test_a_refusal_as_the_probes_first_event_is_final_too(probing, scripted, fleet, legs):
    """D8, S07: the engine refuses late, with the status in the event."""
    refused = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    decode = await scripted(scripted.sse(b"data: " + json.dumps(refused).encode() + b"\n\n", b"data: [DONE]\n\n"))
    at = await probing(pools={"decode": {"endpoints": [decode.url]}})
    got = await at.chat(stream=True)
    assert (got.status, got.body, legs(fleet.prefill)) == (400, refused, [])


@pytest.mark.parametrize("shape", ["openai", "text", "alone"])
async def test_a_clients_own_prefer_reaches_no_worker(coordinator, fleet, legs, shape):
    """L22: only our probe may ask for a 412; without one, nobody can answer it."""
    fleet.decode.behave.cache_rule = "always_miss"
    at = await coordinator(fleet, shape)
    got = await at.chat("Say hello.", ("Prefer", "if-available"))
    assert (got.status, got.text) == (200, HELLO)
    assert {leg.header("prefer") for worker in fleet.workers for leg in legs(worker)} == {None}


async def test_a_412_that_nobody_asked_for_is_our_fault_and_not_the_clients(coordinator, fleet, excuse):
    """L22: something on the way adds the header; the error says so."""
    excuse("unread", "decode refused, and the simulated worker frees blocks on refusals of its own alone")
    at = await coordinator(fleet)
    fleet.decode.behave.next(Fault(canned=Canned(412, "")))
    got = await at.chat()
    assert (got.status, "Prefer" in got.error["message"]) == (502, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rewrite", [echo(ABSENT), echo("tokens")], ids=["no echo", "tokens"])
async def test_a_hit_in_another_output_mode_is_not_taken(probing, fleet, legs, stream, rewrite):
    """V19: for a generate client the probe is checked as any leg is; the pipeline goes on."""
    at = await probing("text", "always_hit")
    fleet.decode.behave.next(Fault(rewrite=rewrite))
    body = {
        "token_ids": list(range(70, 120)),
        "output_mode": "text",
        "stream": stream,
        "sampling_params": {"max_tokens": 4},
    }
    got = await at.post("/inference/v1/generate", body)
    assert (got.status, len(legs(fleet.prefill))) == (200, 1)
    assert (got.chunks[0] if stream else got.body)["output_mode"] == "text"


async def test_a_client_that_leaves_during_the_probe_stops_it(probing, fleet, legs, ask, eventually):
    """L03: and prefill is never asked."""
    fleet.decode.behave.itl_s = 0.05
    at = await probing(rule="always_hit")
    async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=200)) as live:
        await live.head()
        await live.event()
        live.cut()
    await eventually(lambda: fleet.decode.aborted)
    await eventually(lambda: not at.in_flight())
    assert legs(fleet.prefill) == []

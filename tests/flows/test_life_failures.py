"""A leg that fails: which status the client gets, what it is told, and what it never sees."""

import json
import socket

import pytest

from coordinator.sim import ABSENT, Canned, Fault, Settings
from coordinator.sim.faults import echo

NO_OTHER = "the only decode worker fails the leg that would release what prefill left, too"
SECRET = "Traceback: host 10.1.2.3"
HTML = "<html><body>busy</body></html>"


@pytest.fixture
def worker(fleet):
    return {"render": fleet.render, "prefill": fleet.prefill, "decode": fleet.decode}


def excuse_decode(excuse, leg):
    if leg == "decode":
        excuse("unread", NO_OTHER)


UNUSABLE = {
    "cut": Fault(truncate="cut"),
    "half of it": Fault(truncate="clean"),
    "null": Fault(canned=Canned(200, "null")),
    "a number": Fault(canned=Canned(200, "3")),
    "empty": Fault(canned=Canned(200, "")),
    "HTML": Fault(canned=Canned(200, HTML, content_type="text/html")),
    "no bytes": Fault(drop=True),
    "500": Fault(canned=Canned(500, SECRET)),
    "500 in JSON": Fault(canned=Canned(500, json.dumps({"error": {"message": SECRET}}))),
    "502 HTML": Fault(canned=Canned(502, HTML + SECRET, content_type="text/html")),
    "a redirect": Fault(canned=Canned(307, "", (("Location", "http://10.1.2.3/"),))),
}

UNREADABLE = [UNUSABLE[name] for name in ("half of it", "null", "a number", "empty", "HTML")]


@pytest.mark.parametrize("leg", ["render", "prefill", "decode"])
@pytest.mark.parametrize("fault", UNUSABLE.values(), ids=UNUSABLE)
async def test_an_answer_that_is_of_no_use_is_a_502_that_names_the_leg(
    coordinator, fleet, worker, legs, excuse, leg, fault
):
    """Cut, truncated, no JSON, null, HTML, or a 5xx: the worker's words stay here, and later legs are not made."""
    excuse("unread", NO_OTHER if leg == "decode" else "prefill's answer was lost on its way")
    at = await coordinator(fleet, "text")
    worker[leg].behave.fault = fault
    got = await at.chat()
    assert (got.status, got.error["code"], got.error["type"]) == (502, 502, "BadGatewayError")
    assert got.error["message"].startswith(f"{leg}: ")
    assert got.headers["X-Request-Id"] in got.error["message"]
    assert SECRET not in str(got) and "html" not in str(got)
    assert bool(legs(fleet.decode)) == (leg == "decode")
    assert await at.count("coordinator_requests_total", outcome="leg_failed") == 1
    unreadable = fault in UNREADABLE
    outcome = "LegUnreadable" if unreadable else "LegFailed"
    assert await at.count("coordinator_leg_seconds_count", step=leg, outcome=outcome) == 1
    assert await at.count("coordinator_answers_unusable_total", step=leg, reason="unreadable") == unreadable


# A stream has no length to be true to, so half of one is a case of test_stream_endings.
UNUSABLE_STREAMS = {**UNUSABLE, "cut": Fault(die_after=0), "half of it": Fault(half_event_after=0)}
CASES = [("derender", name, fault) for name, fault in UNUSABLE.items()]
CASES += [(shape, name, fault) for shape in ("openai", "text") for name, fault in UNUSABLE_STREAMS.items()]


@pytest.mark.parametrize(
    ("shape", "fault"), [(shape, fault) for shape, _, fault in CASES], ids=[f"{s}-{n}" for s, n, _ in CASES]
)
async def test_the_same_for_a_client_that_asked_for_a_stream(coordinator, fleet, excuse, shape, fault):
    """Nothing has been written yet, so the status is the true one and the body is JSON."""
    excuse("unread", NO_OTHER)
    at = await coordinator(fleet, shape)
    fleet.decode.behave.fault = fault
    got = await at.chat(stream=True)
    assert (got.status, got.headers["Content-Type"], got.error["code"]) == (502, "application/json", 502)
    assert SECRET not in str(got) and "html" not in str(got)


@pytest.mark.parametrize("leg", ["render", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "sent", "told"),
    [(429, "2", "2"), (429, None, None), (503, "2", "2"), (503, None, "1")],
)
async def test_a_worker_that_is_busy_keeps_its_status_and_its_retry_after(
    coordinator, fleet, worker, excuse, leg, stream, status, sent, told
):
    """V15: SDKs wait as long as they are told, so the header passes; the body is JSON whatever the worker wrote."""
    excuse_decode(excuse, leg)
    at = await coordinator(fleet, "text")
    headers = (("Retry-After", sent),) if sent else ()
    worker[leg].behave.next(Fault(canned=Canned(status, HTML, headers, "text/html")))
    got = await at.chat(stream=stream)
    assert (got.status, got.headers.get("Retry-After"), got.error["code"]) == (status, told, status)
    assert "html" not in str(got)


async def test_a_worker_that_says_504_is_a_timeout(coordinator, fleet):
    """A gateway between may have lost patience before we did."""
    at = await coordinator(fleet)
    fleet.prefill.behave.next(Fault(canned=Canned(504, HTML)))
    assert (await at.chat()).status == 504


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_role_that_refuses_connections_is_a_503_that_names_it(coordinator, fleet, worker, excuse, role):
    """R04: an overloaded or starting fleet is worth another try, and the client is told when."""
    excuse_decode(excuse, role)
    at = await coordinator(fleet)
    await worker[role].refuse_connections()
    got = await at.chat()
    assert (got.status, got.headers["Retry-After"]) == (503, "1")
    assert f"no {role} worker could be reached" in got.error["message"]
    assert await at.count("coordinator_requests_total", outcome="unavailable") == 1
    await worker[role].accept_connections()
    assert (await at.chat()).status == 200


@pytest.fixture
def full_port():
    """A port that is listening and accepts nobody: a connection to it neither stands nor fails."""
    with socket.socket() as listening, socket.socket() as one, socket.socket() as two:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (one, two):
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


async def test_a_worker_to_which_no_connection_comes_about_is_a_503(coordinator, fleet, full_port):
    """``connect_timeout``: nothing was sent, so this is nobody to ask, and no late answer."""
    pools = {"prefill": {"endpoints": [f"http://127.0.0.1:{full_port}"]}}
    at = await coordinator(fleet, pools=pools, steps={"prefill": {"connect_timeout": "100ms"}}, ready=False)
    got = await at.chat()
    assert (got.status, got.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize("limit", ["first_byte_timeout", "request_timeout"])
async def test_a_prefill_that_never_answers_is_a_504_and_is_let_go(coordinator, fleet, legs, eventually, limit):
    """L18: its connection is closed; decode is not asked; the worker is asked again by the next request."""
    at = await coordinator(fleet, steps={"prefill": {limit: "300ms"}})
    fleet.prefill.behave.next(Fault(hang=True))
    got = await at.chat()
    assert (got.status, got.error["type"]) == (504, "GatewayTimeoutError")
    assert got.error["message"].startswith("prefill: ")
    await eventually(lambda: fleet.prefill.aborted)
    assert legs(fleet.decode) == []
    assert await at.count("coordinator_requests_total", outcome="timeout") == 1
    assert (await at.chat()).status == 200


@pytest.mark.parametrize(
    ("stream", "fault"),
    [(False, Fault(hang=True)), (True, Fault(hang=True)), (True, Fault(first_event_s=5.0))],
    ids=["whole", "stream", "the head of a stream alone"],
)
async def test_a_decode_that_never_begins_is_a_504_for_streams_too(
    coordinator, fleet, excuse, eventually, stream, fault
):
    """L19: a stream's head is held back until its first event, so the status is still to be had."""
    excuse("unread", NO_OTHER)
    at = await coordinator(fleet, steps={"decode": {"first_byte_timeout": "100ms"}})
    fleet.decode.behave.next(fault)
    got = await at.chat(stream=stream)
    assert (got.status, got.error["message"].partition(":")[0]) == (504, "decode")
    await eventually(lambda: fleet.decode.aborted)


async def test_render_has_a_limit_of_its_own(coordinator, fleet, legs):
    """``timeout`` of the render step: 504, and no worker is bothered."""
    at = await coordinator(fleet, "text", steps={"render": {"timeout": "100ms"}})
    fleet.render.behave.next(Fault(hang=True))
    got = await at.chat()
    assert (got.status, got.error["message"].partition(":")[0]) == (504, "render")
    assert legs(fleet.prefill) == []


@pytest.mark.parametrize("limit", ["idle_timeout", "request_timeout"])
async def test_a_whole_answer_that_stalls_half_way_is_a_504(coordinator, fleet, scripted, eventually, limit):
    """Nothing has been written to the client, so it gets the true status."""
    decode = await scripted([*scripted.json({"choices": []}, head="X-More: y\r\n")[0].split(b"[", 1)[:1], 5.0])
    at = await coordinator(
        fleet, "alone", pools={"decode": {"endpoints": [decode.url]}}, steps={"decode": {limit: "100ms"}}
    )
    assert (await at.chat()).status == 504
    await eventually(lambda: decode.open == 0)


@pytest.mark.parametrize("limit", ["idle_timeout", "request_timeout"])
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_stream_that_stalls_ends_with_an_error_event_and_a_broken_connection(
    coordinator, fleet, eventually, shape, limit
):
    """The status is spent: what came stays, then the event says 504, and no SDK takes the end for a finished answer."""
    at = await coordinator(fleet, shape, steps={"decode": {limit: "200ms"}})
    fleet.decode.behave.next(Fault(hang_after=3))
    got = await at.chat("Count to 20.", stream=True)
    assert (got.status, got.whole) == (200, False)
    assert got.text
    assert (got.events[-1]["error"]["code"], "[DONE]" in got.events) == (504, False)
    await eventually(lambda: fleet.decode.aborted)
    await eventually(lambda: not at.in_flight())
    assert await at.count("coordinator_requests_total", outcome="stream_broken") == 1


async def test_a_stream_outlives_its_first_byte_limit(coordinator, fleet, scripted):
    """The limit ends with the first event; a stream as such has none."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    decode = await scripted(scripted.sse(event, 0.3, event, 0.3, event + b"data: [DONE]\n\n"))
    pools = {"decode": {"endpoints": [decode.url]}}
    at = await coordinator(fleet, "alone", pools=pools, steps={"decode": {"first_byte_timeout": "500ms"}})
    got = await at.chat(stream=True)
    assert (got.status, got.whole, got.text, got.events[-1]) == (200, True, "aaa", "[DONE]")


WRONG_MODES = {"no echo": ABSENT, "null": None, "tokens": "tokens", "another": "verbose"}


@pytest.mark.parametrize("shape", ["text", "derender", "unwrapped"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", WRONG_MODES.values(), ids=WRONG_MODES)
async def test_an_answer_in_another_output_mode_is_a_502_before_the_client_gets_a_byte(
    coordinator, fleet, eventually, shape, stream, mode
):
    """V19: whole answer or first chunk; the error says which mode was asked for and which vLLM knows it."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(rewrite=echo(mode)))
    got = await at.chat(stream=stream)
    assert (got.status, got.headers["Content-Type"]) == (502, "application/json")
    asked = "derender" if shape == "derender" else "text"
    assert f"output_mode '{asked}'" in got.error["message"]
    assert ("vLLM 0.33" if asked == "derender" else "vLLM 0.32") in got.error["message"]
    assert "Hello" not in got.raw.decode()
    await eventually(lambda: not fleet.decode.in_flight)


@pytest.mark.parametrize(("shape", "version"), [("text", "0.31.0"), ("derender", "0.31.0")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_is_older_than_output_mode_is_found_out(coordinator, fleet_of, shape, version, stream):
    """V19: it answers 200 with token ids alone, which a client would read as an empty answer."""
    fleet = await fleet_of(decode_settings=Settings(version=version))
    at = await coordinator(fleet, shape, ready=False)
    got = await at.chat(stream=stream)
    assert (got.status, "vLLM 0.3" in got.error["message"]) == (502, True)


async def test_a_worker_that_hides_that_it_is_older_than_derender_refuses_in_its_own_words(coordinator, fleet_of):
    """0.32 knows the field and not the mode: its 400 says so, and goes on to the client."""
    fleet = await fleet_of(decode_settings=Settings(version="0.32.0"))
    fleet.decode.behave.fault = Fault(path="/version", canned=Canned(404, "{}"))
    at = await coordinator(fleet, "derender")
    got = await at.chat()
    assert (got.status, "output_mode" in got.error["message"]) == (400, True)


async def test_a_later_chunk_in_another_mode_is_no_concern(coordinator, fleet):
    """V19: only the first chunk is checked; a usage chunk need not repeat the mode."""
    at = await coordinator(fleet, "text")
    seen = []

    def rewrite(body):
        seen.append(body)
        return body if len(seen) == 1 else {key: value for key, value in body.items() if key != "output_mode"}

    fleet.decode.behave.next(Fault(rewrite=rewrite))
    got = await at.chat(stream=True)
    assert (got.status, got.text) == (200, "Hello! How can I help you today?")

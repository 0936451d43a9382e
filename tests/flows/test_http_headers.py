"""Which headers travel: the client's to every leg, a worker's to the client, and what neither may steer."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.flows.wire import connect, head, post

if TYPE_CHECKING:
    from coordinator.sim import Received, SimFleet

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Say hello."}]}).encode()
SHAPES = ["openai", "text", "derender"]


def legs(fleet: SimFleet) -> list[Received]:
    """Return every leg of all requests; probes of health carry no request id."""
    return [leg for worker in fleet.workers for leg in worker.received if leg.header("x-request-id")]


def values(leg: Received, name: str) -> list[str]:
    return [value for key, value in leg.headers if key.lower() == name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_clients_key_and_trace_reach_every_leg(coordinator, fleet, shape, stream):
    """R10: while nothing is exported, the trace context is passed on as it came."""
    at = await coordinator(fleet, shape)
    sent = {
        "Authorization": "Bearer key-1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "vendor=a,other=b",
        "baggage": "k=v",
        "X-Session-ID": "s-1",
        "X-Vllm-Priority": "3",
        "User-Agent": "someone/1.0",
    }
    got = await at.chat("Say hello.", *sent.items(), stream=stream)
    assert got.status == 200
    assert len(legs(fleet)) == (2 if shape == "openai" else 3)
    for leg in legs(fleet):
        assert {name: values(leg, name.lower()) for name in sent} == {name: [value] for name, value in sent.items()}


async def test_the_side_questions_carry_the_clients_headers_too(coordinator, fleet):
    at = await coordinator(fleet, "text")
    key = ("Authorization", "Bearer key-1")
    await at.get("/v1/models", key)
    await at.post("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}, key)
    assert [(leg.path, leg.header("authorization")) for leg in legs(fleet)] == [
        ("/v1/messages/render", "Bearer key-1"),
        ("/v1/models", "Bearer key-1"),
    ]


async def test_a_worker_that_wants_a_key_gets_the_clients(coordinator, fleet_of):
    """The key is the workers' to judge."""
    from coordinator.sim import Settings

    fleet = await fleet_of(settings=Settings(api_key="key-1"))
    at = await coordinator(fleet, "text", ready=False)
    assert (await at.chat("Say hello.", ("Authorization", "Bearer key-1"))).status == 200
    got = await at.chat("Say hello.", ("Authorization", "Bearer key-2"))
    assert got.status == 401
    assert got.error == {"message": "Unauthorized", "type": "AuthenticationError", "param": None, "code": 401}
    assert (await at.get("/v1/models")).status == 401


async def test_repeated_headers_stay_apart_and_in_their_order(coordinator, fleet):
    """H5: a set of values that is cut to its first or last one is another header."""
    at = await coordinator(fleet)
    sent = [
        ("X-Tag", "b"),
        ("x-tag", "a"),
        ("X-TAG", "c"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "a=1"),
        ("tracestate", "b=2"),
        ("X-Empty", ""),
    ]
    assert (await at.chat("Say hello.", *sent)).status == 200
    for leg in legs(fleet):
        assert values(leg, "x-tag") == ["b", "a", "c"]
        assert values(leg, "tracestate") == ["a=1", "b=2"]
        assert values(leg, "x-empty") == [""]


async def test_a_header_value_beyond_ascii_travels_byte_for_byte(coordinator, fleet):
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, "Content-Type: application/json", f"Content-Length: {len(BODY)}")[:-2])
        await wire.send("X-Name: café 漢\r\n\r\n".encode(), BODY)
        assert (await wire.answer()).status == 200
    for leg in legs(fleet):
        assert values(leg, "x-name") == ["café 漢".encode().decode("latin-1")]


HOP_BY_HOP = [
    "Connection: keep-alive, X-Hop , x-other-hop",
    "X-Hop: 1",
    "X-Other-Hop: 2",
    "Keep-Alive: timeout=5",
    "Proxy-Connection: keep-alive",
    "Proxy-Authorization: Basic canary",
    "TE: trailers",
    "Trailer: X-Checksum",
    "Accept-Encoding: gzip, br",
    "Content-MD5: canary",
    "Digest: sha-256=canary",
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_what_belongs_to_one_connection_or_one_body_is_not_passed_on(coordinator, fleet, shape):
    """H09, H1: nor what the Connection header names; a leg has a body of its own."""
    at = await coordinator(fleet, shape)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, *HOP_BY_HOP))
        assert (await wire.answer()).status == 200
    for leg in legs(fleet):
        names = [name.lower() for name, _ in leg.headers]
        assert len(set(names)) == len(names)
        assert set(names) == {
            "host",
            "content-type",
            "content-length",
            "accept",
            "accept-encoding",
            "x-request-id",
            "traceparent",
        }
        assert leg.header("accept-encoding") == "identity"
        assert leg.header("host") == next(w for w in fleet.workers if leg in w.received).url.removeprefix("http://")


async def test_a_leg_asks_for_what_it_can_read_whatever_the_client_accepts(coordinator, fleet):
    """S36, H1: a worker's gzip would be relayed with the wrong headers."""
    at = await coordinator(fleet)
    sent = [("Accept", "application/xml"), ("Accept-Encoding", "gzip"), ("Accept-Encoding", "zstd")]
    for stream in (False, True):
        await at.chat("Say hello.", *sent, stream=stream)
        decode = fleet.decode.received[-1]
        assert values(decode, "accept") == ["text/event-stream" if stream else "application/json"]
        assert values(decode, "accept-encoding") == ["identity"]
        assert values(fleet.prefill.received[-1], "accept") == ["application/json"]


ROUTING = {
    "x-prefiller-host-port": "192.0.2.1:8000",
    "x-prefill-pin-host-port": "192.0.2.1:8000",
    "x-encoder-hosts-ports": "192.0.2.1:8000",
    "x-data-parallel-rank": "1",
    "x-data-parallel-host-port": "192.0.2.1:8000",
    "x-gateway-destination-endpoint": "192.0.2.1:8000",
    "x-kv-cache-source-host-port": "192.0.2.1:8000",
    "EPP-Profile": "decode",
    "Prefer": "if-available",
    "x-llm-d-disagg-revision": "canary",
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_client_cannot_route_its_legs(coordinator, fleet, shape):
    """H22, E6, L22: whoever could set these would choose other people's workers, ranks and caches."""
    at = await coordinator(fleet, shape)
    assert (await at.chat("Say hello.", *ROUTING.items())).status == 200
    for leg in legs(fleet):
        assert {name.lower() for name, _ in leg.headers}.isdisjoint(name.lower() for name in ROUTING)
    assert (await at.get("/v1/models", *ROUTING.items())).status == 200
    assert {name.lower() for name, _ in fleet.decode.received[-1].headers}.isdisjoint(map(str.lower, ROUTING))


async def test_a_gateway_gets_the_coordinators_profile_and_not_the_clients(coordinator, fleet, scripted):
    """H22."""
    gateway = await scripted(scripted.json({"choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]}))
    at = await coordinator(
        fleet,
        gateway={"address": gateway.url},
        pools={"prefill": None, "decode": None},
        pipeline={"kv_connector": "kv-shared-storage"},
    )
    assert (await at.chat("Say hello.", ("EPP-Profile", "encode"), ("epp-profile", "decode"))).status == 200
    assert [leg.getall("EPP-Profile") for leg, _ in gateway.received] == [["prefill"], ["decode"]]


async def test_a_routing_header_that_is_sent_twice_is_a_400(coordinator, fleet):
    """H5: it would be a guess which worker was meant."""
    header = {"header": "x-prefiller-host-port", "allow": ["127.0.0.0/8"], "endpoints": None}
    at = await coordinator(fleet, pools={"prefill": header})
    where = fleet.prefill.url.removeprefix("http://")
    got = await at.chat("Say hello.", ("x-prefiller-host-port", where), ("X-Prefiller-Host-Port", where))
    assert (got.status, got.error["param"]) == (400, "x-prefiller-host-port")
    assert (await at.chat("Say hello.", ("x-prefiller-host-port", where))).status == 200
    assert [leg.header("x-prefiller-host-port") for leg in legs(fleet)] == [None, None]


async def test_what_a_worker_says_of_its_connection_and_framing_is_not_the_clients(coordinator, fleet, scripted):
    """H17: two framings of one body cut it; two Server or Date headers are two answers to some clients."""
    said = "".join(
        f"{line}\r\n"
        for line in (
            "Connection: close, X-Hop",
            "X-Hop: 1",
            "Keep-Alive: timeout=5",
            "Server: uvicorn",
            "Date: Thu, 01 Jan 1970 00:00:00 GMT",
            "Trailer: X-Checksum",
            "Upgrade: h2c",
            "Proxy-Authenticate: Basic",
            'Alt-Svc: h2=":443"',
            "Set-Cookie: canary=1",
            "X-Request-Id: worker-1",
            "Content-MD5: canary",
            "X-Kept: a",
            "X-Kept: b",
            "x-llm-d-disagg-revision: 7",
        )
    )
    whole = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]}).encode()
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    in_chunks = [
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n{said}\r\n".encode(),
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole),
    ]
    worker = await scripted(in_chunks, scripted.sse(chunk, b"data: [DONE]\n\n", head=said))
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    for stream in (False, True):
        got = await at.chat("Say hello.", ("X-Request-Id", "ask-1"), stream=stream)
        assert (got.status, got.text, got.whole) == (200, "Hi", True)
        names = [name.lower() for name in got.headers]
        assert got.headers.getall("X-Request-Id") == ["ask-1"]
        assert got.headers.getall("X-Kept") == ["a", "b"]
        (date,) = got.headers.getall("Date")
        assert "1970" not in date
        framing = {"transfer-encoding"} if stream else {"content-length"}
        stream_only = {"cache-control", "x-accel-buffering"} if stream else set()
        assert set(names) - stream_only == {
            "x-request-id", "x-kept", "x-llm-d-disagg-revision", "date", "content-type", "connection",
            *framing,
        }  # fmt: skip
        assert got.headers.getall("Connection") == ["close"]  # the client asked for that


async def test_the_headers_of_a_leg_that_is_not_the_answer_stay_inside(coordinator, fleet, scripted):
    handover = {"remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h"}
    reply = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": {**handover, "remote_port": 1}}
    prefill = await scripted(scripted.json(reply, head="X-Inside: 1\r\nx-llm-d-disagg-revision: 7\r\n"))
    decode = await scripted(scripted.json({"choices": []}, head="X-Outside: 1\r\n"))
    at = await coordinator(
        fleet, pools={"prefill": {"endpoints": [prefill.url]}, "decode": {"endpoints": [decode.url]}}
    )
    got = await at.chat()
    assert ("X-Inside" in got.headers, "X-Outside" in got.headers) == (False, True)
    assert decode.received[0][0].getall("x-llm-d-disagg-revision") == ["7"]


KEPT_IDS = ["a", "A.b_c-9", "0" * 128, "4bf92f3577b34da6a3ce929d0e0e4736"]
REPLACED_IDS = ["", " ", "a b", "a\tb", "é", "a" * 129, "a;b", 'a"b', "a/b", "../x", "<script>", "a%0d%0ab"]


@pytest.mark.parametrize("sent", KEPT_IDS)
async def test_a_request_id_that_is_safe_is_kept_and_begins_the_workers_own(coordinator, fleet, sent):
    """J4, L20: two clients may send the same one, and workers mix up or refuse what they see twice."""
    at = await coordinator(fleet, "text")
    for _ in range(2):
        got = await at.chat("Say hello.", ("X-Request-Id", sent))
        assert (got.status, got.headers.getall("X-Request-Id")) == (200, [sent])
    ids = {leg.header("x-request-id") for leg in legs(fleet)}
    assert len(ids) == 2
    assert all(re.fullmatch(re.escape(sent) + r"-[0-9a-f]+", one) for one in ids)
    assert all(len(values(leg, "x-request-id")) == 1 for leg in legs(fleet))


@pytest.mark.parametrize("sent", REPLACED_IDS)
async def test_a_request_id_that_is_not_safe_is_replaced(coordinator, fleet, sent):
    """J4: it goes into logs, bodies and the workers' own tables."""
    at = await coordinator(fleet)
    for body in (BODY, b"[]"):
        async with connect(at.url) as wire:
            await wire.send(post(CHAT, body, f"X-Request-Id: {sent}"))
            got = await wire.answer()
        assert re.fullmatch("[0-9a-f]{32}", got.headers["X-Request-Id"])
    assert all(leg.header("x-request-id").startswith(leg.header("x-request-id")[:32]) for leg in legs(fleet))


async def test_without_a_request_id_every_answer_has_a_new_one(coordinator, fleet):
    """H19."""
    at = await coordinator(fleet)
    answers: list[Any] = [
        await at.chat(),
        await at.chat(stream=True),
        await at.get("/v1/models"),
        await at.get("/nope"),
    ]
    ids = [got.headers["X-Request-Id"] for got in answers]
    assert len(set(ids)) == 4


async def test_an_answer_that_a_worker_refused_keeps_the_request_id(coordinator, fleet):
    """H19, H17."""
    from coordinator.sim import Canned, Fault

    at = await coordinator(fleet, "alone")
    refusal = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
    for stream in (False, True):
        fleet.decode.behave.next(
            Fault(canned=Canned(400, refusal, (("X-Request-Id", "worker"), ("Server", "uvicorn"))))
        )
        got = await at.chat("Say hello.", ("X-Request-Id", "ask-1"), stream=stream)
        assert (got.status, got.headers.getall("X-Request-Id")) == (400, ["ask-1"])
        assert "Server" not in got.headers

"""Every way to misbehave does what it says, once or until it is switched off."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from coordinator.sim import ABSENT, Canned, Fault
from coordinator.sim.faults import aborted, echo, half_handover, handover
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from coordinator.sim import SimFleet

GENERATE = "/inference/v1/generate"
BODY = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 6, "ignore_eos": True}, "output_mode": "text"}
STREAM = {**BODY, "stream": True}
PREFILL = {"token_ids": [3], "sampling_params": {"max_tokens": 1}, "kv_transfer_params": {"do_remote_decode": True}}


async def cut_stream(fleet: SimFleet, client: Any) -> bytes:
    """Return what came of a stream before its connection broke."""
    got = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.session.post(fleet.decode.url + GENERATE, json=STREAM) as response:
            async for chunk in response.content.iter_any():
                got += chunk
    return got


async def test_a_fault_is_for_the_next_requests_only(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(canned=Canned(503)), times=2)
    statuses = [(await client.post(fleet.decode, GENERATE, BODY)).status for _ in range(3)]
    assert statuses == [503, 503, 200]


async def test_a_fault_may_stay_until_it_is_cleared(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.fault = Fault(canned=Canned(500))
    assert [(await client.post(fleet.decode, GENERATE, BODY)).status for _ in range(2)] == [500, 500]
    fleet.decode.behave.clear()
    assert (await client.post(fleet.decode, GENERATE, BODY)).status == 200


async def test_a_fault_is_not_spent_on_another_path_or_on_a_probe(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(path=GENERATE, canned=Canned(503)))
    assert (await client.get(fleet.decode, "/health")).status == 200
    assert (await client.post(fleet.decode, "/v1/completions", {"prompt": "a"})).status == 200
    assert (await client.post(fleet.decode, GENERATE, BODY)).status == 503
    fleet.decode.behave.next(Fault(path="/health", canned=Canned(503)))
    assert (await client.get(fleet.decode, "/health")).status == 503


async def test_a_status_body_and_headers_of_choice(fleet: SimFleet, client: Any) -> None:
    headers = (("Retry-After", "3"), ("X-A", "1"), ("X-A", "2"))
    fleet.decode.behave.next(Fault(canned=Canned(429, "<html>", headers, content_type="text/html")))
    got = await client.post(fleet.decode, GENERATE, BODY)
    assert (got.status, got.raw) == (429, b"<html>")
    assert got.headers["Retry-After"] == "3"
    assert got.headers.getall("X-A") == ["1", "2"]
    assert got.headers["Content-Type"] == "text/html"


@pytest.mark.parametrize("body", ["null", "<html>", '{"a":', ""])
async def test_a_body_that_is_no_answer(body: str, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(canned=Canned(200, body, content_type="application/octet-stream")))
    assert (await client.post(fleet.decode, GENERATE, BODY)).raw == body.encode()


async def test_die_after_events_breaks_the_connection(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(die_after=2))
    got = await cut_stream(fleet, client)
    assert got.count(b"data: ") == 2
    assert got.endswith(b"\n\n")


async def test_half_an_event_then_a_broken_connection(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(half_event_after=1))
    got = await cut_stream(fleet, client)
    assert got.count(b"data: ") == 2
    assert not got.endswith(b"\n\n")


@pytest.mark.parametrize("fault", [Fault(end_after=2), Fault(end_after=0)])
async def test_a_clean_early_end_has_no_finish_and_no_done(fault: Fault, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(fault)
    got = await client.post(fleet.decode, GENERATE, STREAM)
    assert len(got.events) == fault.end_after
    assert "[DONE]" not in got.events


@pytest.mark.parametrize("count", [0, 3])
async def test_an_error_event_after_some_events_then_done(count: int, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(error_after=count))
    got = await client.post(fleet.decode, GENERATE, STREAM)
    assert len(got.events) == count + 2
    assert got.events[count]["error"]["code"] == 500
    assert got.events[-1] == "[DONE]"


async def test_only_done(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(only_done=True))
    assert (await client.post(fleet.decode, GENERATE, STREAM)).events == ["[DONE]"]


async def test_a_truncated_whole_answer_clean_and_cut(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(truncate="clean", content_type="text/plain"))
    got = await client.post(fleet.decode, GENERATE, BODY)
    with pytest.raises(json.JSONDecodeError):
        json.loads(got.raw)
    fleet.decode.behave.next(Fault(truncate="cut"))
    with pytest.raises(aiohttp.ClientPayloadError):
        await client.post(fleet.decode, GENERATE, BODY)


async def test_drop_closes_without_a_byte(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(drop=True))
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await client.post(fleet.decode, GENERATE, BODY)
    assert len(fleet.decode.received) == 1
    assert fleet.decode.aborted == []


@pytest.mark.parametrize(("mode", "shown"), [("tokens", "tokens"), (None, None), (ABSENT, "absent")])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_echo(mode: Any, shown: Any, stream: bool, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(rewrite=echo(mode)))
    got = await client.post(fleet.decode, GENERATE, {**BODY, "stream": stream})
    for body in got.events[:-1] or [got.body]:
        assert body.get("output_mode", "absent") == shown


@pytest.mark.parametrize("params", [None, ABSENT, {}, [], "x"])
async def test_another_hand_over(params: Any, fleet: SimFleet, client: Any) -> None:
    fleet.prefill.behave.next(Fault(rewrite=handover(params)))
    got = await client.post(fleet.prefill, GENERATE, PREFILL)
    assert got.body.get("kv_transfer_params", ABSENT) == params or params is ABSENT
    assert ("kv_transfer_params" in got.body) is (params is not ABSENT)


async def test_half_a_hand_over(fleet: SimFleet, client: Any) -> None:
    fleet.prefill.behave.next(Fault(rewrite=half_handover))
    params = (await client.post(fleet.prefill, GENERATE, PREFILL)).body["kv_transfer_params"]
    assert params["remote_block_ids"] is None
    assert params["do_remote_prefill"] is True


async def test_a_prefill_that_was_aborted(fleet: SimFleet, client: Any) -> None:
    fleet.prefill.behave.next(Fault(rewrite=aborted))
    got = await client.post(fleet.prefill, GENERATE, PREFILL)
    assert got.body["choices"][0]["finish_reason"] == "abort"
    assert got.body["kv_transfer_params"] is None


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_gzip_whatever_was_accepted(body: dict[str, Any], fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(gzip=True))
    plain = (await client.post(fleet.decode, GENERATE, {**body, "request_id": "a"})).raw
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        fleet.decode.behave.next(Fault(gzip=True))
        headers = {"Accept-Encoding": "identity"}
        url = fleet.decode.url + GENERATE
        async with session.post(url, json={**body, "request_id": "a"}, headers=headers) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            packed = gzip.decompress(await response.read())
    assert len(packed) == len(plain)


async def test_comments_come_between_the_events(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(comments=True))
    got = await client.post(fleet.decode, GENERATE, STREAM)
    assert got.raw.startswith(b": keep-alive\n\ndata: ")
    assert got.raw.count(b": keep-alive\n\n") == len(got.events)


async def test_events_may_come_in_slices(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(slice_bytes=7))
    sizes = []
    async with client.session.post(fleet.decode.url + GENERATE, json=STREAM) as response:
        async for chunk, _ in response.content.iter_chunks():
            sizes.append(len(chunk))
    assert max(sizes) == 7


async def test_another_content_type(fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(Fault(content_type="text/plain"))
    got = await client.post(fleet.decode, GENERATE, STREAM)
    assert got.headers["Content-Type"] == "text/plain"
    assert got.raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(hang_after=2), Fault(hang_after=0)])
async def test_a_hanging_request_ends_with_its_client(fault: Fault, fleet: SimFleet, client: Any) -> None:
    fleet.decode.behave.next(fault)
    with pytest.raises(TimeoutError):
        await client.post(fleet.decode, GENERATE, STREAM, timeout=aiohttp.ClientTimeout(total=0.2))
    await until(lambda: not fleet.decode.in_flight)
    assert len(fleet.decode.aborted) == 1


async def until(condition: Any) -> None:
    """Wait for something that is to happen soon."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_delays_are_waited(fleet: SimFleet, client: Any) -> None:
    loop = asyncio.get_running_loop()
    fleet.decode.behave.next(Fault(first_byte_s=0.05, first_event_s=0.05, itl_s=0.01))
    start = loop.time()
    await client.post(fleet.decode, GENERATE, STREAM)
    assert loop.time() - start >= 0.15


async def test_connections_are_refused_and_taken_again_on_the_same_port(fleet: SimFleet, client: Any) -> None:
    url = fleet.decode.url
    await fleet.decode.refuse_connections()
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get(fleet.decode, "/health")
    await fleet.decode.accept_connections()
    assert fleet.decode.url == url
    assert (await client.get(fleet.decode, "/health")).status == 200

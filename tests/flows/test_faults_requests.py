"""Requests that break off or cannot be read: told to their client, and to nobody's log as a fault of ours."""

import pytest

from tests.flows.wire import connect, head

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"
BROKEN = {
    "a body that is no gzip": head(CHAT, JSON, "Content-Encoding: gzip", "Content-Length: 20")
    + b"not gzip at all.....",
    "chunks that are none": head(CHAT, JSON, "Transfer-Encoding: chunked") + b"5\r\n{}\r\nzz\r\n\r\n",
    "a body that ends early": head(CHAT, JSON, "Content-Length: 50") + b'{"model"',
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_body_that_cannot_be_read_leaves_no_traceback(coordinator, fleet, caplog, eventually, what):
    """Any client can send any number of them."""
    at = await coordinator(fleet, server={"read_timeout": "100ms"})
    async with connect(at.url) as wire:
        await wire.send(BROKEN[what])
        got = await wire.answer()
        assert (got.status // 100, got.headers["Content-Type"]) == (4, "application/json")
    await eventually(lambda: not at.front.in_flight)
    assert [record.message for record in caplog.records if record.exc_info] == []

"""A request that is cancelled at any of its awaits gives everything back (R06): places, permits of workers, gauges."""

import asyncio
import contextlib

import pytest

CHAT = "/v1/chat/completions"
CANCELS = 1000
AT_ONCE = 8


class Stepped:
    """A coroutine that is cancelled, as its task would be, when it waits for the nth time."""

    def __init__(self, coroutine, cancel_at):
        self.coroutine = coroutine
        self.cancel_at = cancel_at
        self.waits = 0

    def __await__(self):
        steps, sent = self.coroutine.__await__(), None
        while True:
            try:
                future = steps.send(None) if sent is None else steps.throw(sent)
            except StopIteration as done:
                return done.value
            sent = None
            self.waits += 1
            if self.waits == self.cancel_at:
                asyncio.current_task().cancel()
            try:
                yield future
            except BaseException as error:  # whatever a task throws goes on to the coroutine
                sent = error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancel_at_each_await_a_thousand_times_leaves_nothing_behind(
    coordinator, fleet, scripted, ask, eventually, stream
):
    """Some run, some wait for the coordinator's place, some for decode's, and each is cancelled one await later."""
    whole = scripted.json({"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]})
    events = scripted.sse(b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n', b"data: [DONE]\n\n")
    prefill, decode = await scripted(whole), await scripted(events if stream else whole)
    at = await coordinator(
        fleet,
        server={"max_concurrency": 6, "queue_size": 3, "queue_timeout": "20ms"},
        pools={
            "prefill": {"endpoints": [prefill.url], "max_inflight": 2},
            "decode": {"endpoints": [decode.url], "max_inflight": 3},
        },
        pipeline={"kv_connector": "kv-shared-storage"},
    )
    answer, waits, cancelled, most = at.app.server.answer, 0, 0, {"server": 6, "prefill": 2, "decode": 3}
    at_await = 1

    async def stepped(request):
        nonlocal at_await, waits, cancelled
        if request.method != "POST":
            return await answer(request)
        assert all(0 < count <= most[key] for key, count in at.front.plan.admission.held.items())
        run = Stepped(answer(request), at_await)
        at_await = at_await % (waits + 1) + 1  # 1 to the most that any has waited, and once beyond it
        try:
            return await run
        except asyncio.CancelledError:
            cancelled += 1
            raise
        finally:
            waits = max(waits, run.waits)

    at.app.server.answer = stepped

    async def ask_and_ask():
        while cancelled < CANCELS / 2:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await at.chat(stream=stream)

    await asyncio.gather(*(ask_and_ask() for _ in range(AT_ONCE)))
    at.app.server.answer = answer
    await eventually(lambda: not at.in_flight())
    assert waits > 3
    assert (at.front.plan.admission.held, at.front.plan.admission.waiting) == ({}, 0)
    assert await at.metrics("coordinator_requests_queued") == {"coordinator_requests_queued": 0}
    assert not any((await at.metrics("coordinator_requests_in_flight")).values())
    assert await at.count("coordinator_requests_total", outcome="client_gone") >= CANCELS / 2
    for _ in range(AT_ONCE):
        assert (await at.chat(stream=stream)).status == 200

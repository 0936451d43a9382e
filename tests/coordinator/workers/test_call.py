"""One leg under way: what breaks it becomes one error, and its permit and connection come back whatever happens."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from multidict import CIMultiDict

from coordinator.routing.router import Worker
from coordinator.step import Leg, LegLimits
from coordinator.workers import call as call_module
from coordinator.workers import wire
from coordinator.workers.call import WIRE_FAULTS, Call, earliest, wire_error
from coordinator.workers.wire import Broken, ConnectFailed
from envelope.errors import BadRequest, LegBusy, LegError, LegFailed, LegRejected, LegTimeout, NoWorker
from envelope.sse import EventTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

ERROR = b'data: {"error":{"message":"bad","type":"BadRequestError","param":null,"code":%s}}\n\n'


class FakeConnection:
    """An exchange that gives these parts, then ends or fails. Stands for ``coordinator.workers.wire.Connection``."""

    def __init__(self, *parts: bytes, error: Exception | None = None, **attributes: Any) -> None:
        self.headers = CIMultiDict([("Retry-After", "2"), ("Server", "uvicorn"), ("Content-Length", "9")])
        self.parts, self.error = list(parts), error
        self.reused = attributes.get("reused", False)
        self.answered = attributes.get("answered", False)
        self.sent: list[tuple[bytes, bytes]] = []
        self.closed = self.complete = False

    def send(self, head: bytes, *body: bytes) -> None:
        self.sent.append((head, b"".join(body)))

    async def head(self, ends_at: float | None = None) -> None:
        if not self.parts and self.error is not None:
            raise self.error

    async def read(self, ends_at: float | None = None) -> bytes:
        if not self.parts and self.error is not None:
            raise self.error
        return self.parts.pop(0) if self.parts else b""

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while part := await self.read():
            if not take(part):
                return False
        return True

    def close(self) -> None:
        self.closed = True


class FakePool:
    """Gives these connections in turn. Stands for ``coordinator.workers.wire.Pool``."""

    def __init__(self, *connections: FakeConnection | Exception) -> None:
        self._connections = list(connections)
        self.asked: list[tuple[str, float | None, bool]] = []
        self.released: list[tuple[str, FakeConnection]] = []

    def kept(self, origin: str, now: float) -> None:
        return None

    async def acquire(
        self, origin: str, connect_s: float | None, *, fresh: bool = False, ends_at: float | None = None
    ) -> Any:
        self.asked.append((origin, connect_s, fresh))
        connection = self._connections.pop(0)
        if isinstance(connection, Exception):
            raise connection
        return connection

    def release(self, origin: str, connection: Any) -> None:
        self.released.append((origin, connection))


def leg(**limits: Any) -> Leg:
    return Leg("decode", "decode", "/v1/chat/completions", {}, LegLimits(**limits))


async def opened(*parts: bytes, error: Exception | None = None, **limits: Any) -> Call:
    """Return a call whose answer has begun and has these parts."""
    call = Call(leg(**limits), Worker("http://a"), FakePool(FakeConnection(*parts, error=error)))  # type: ignore[arg-type]
    await call.open(b"head", [b"body"])
    return call


async def read(call: Call) -> list[bytes]:
    parts: list[bytes] = []

    def keep(data: bytes) -> bool:
        parts.append(data)
        return True

    assert await call.push(keep)
    return parts


# --- what a failure on the wire means ------------------------------------------------------------------------------

# (what went wrong, the client's error, its status, whether another worker may do, whether this one may have begun)
FAILURES: list[tuple[Exception, type[LegError], int, bool, bool]] = [
    (ConnectFailed("refused"), NoWorker, 503, True, False),
    (Broken("the connection ended"), LegFailed, 502, True, True),
    (TimeoutError(), LegTimeout, 504, False, True),
    (EventTooLarge("17 MB"), LegFailed, 502, False, True),
]


@pytest.mark.parametrize(("error", "kind", "status", "again", "reached"), FAILURES)
def test_every_failure_is_one_error(
    error: Exception, kind: type[LegError], status: int, again: bool, reached: bool
) -> None:
    made = wire_error(leg(), error)
    assert (type(made), made.status, made.retryable) == (kind, status, again)
    if again:
        assert made.reached is reached
    assert made.message.startswith("decode: ")
    assert str(error) not in made.message or not str(error), "what workers and systems say stays here"
    assert isinstance(error, WIRE_FAULTS)


def test_no_exception_of_the_wire_is_missed() -> None:
    """A new one must be given an error, or a client gets a 500 for what a worker did."""
    own = {
        kind
        for _, kind in inspect.getmembers(wire, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == wire.__name__
    }
    assert own == {type(error) for error, *_ in FAILURES} & own
    assert own <= set(WIRE_FAULTS)


def test_nobody_there_says_when_to_ask_again_and_names_the_role() -> None:
    made = wire_error(leg(), ConnectFailed("x"))
    assert (made.message, made.headers) == ("decode: no decode worker could be reached", {"Retry-After": "1"})


@pytest.mark.parametrize("error", [LegRejected("decode", 400, {}), BadRequest("x"), ZeroDivisionError()])
def test_what_is_an_error_of_ours_already_is_no_fault_of_the_wire(error: Exception) -> None:
    assert not isinstance(error, WIRE_FAULTS)


@pytest.mark.parametrize("connected", [False, True])
def test_a_worker_that_was_not_connected_to_cannot_have_begun(connected: bool) -> None:
    assert wire_error(leg(), Broken("x"), reached=connected).reached is connected


def test_the_first_of_several_ends_counts_and_none_is_never() -> None:
    assert earliest(3.0, None, 2.0) == 2.0
    assert earliest(None, None) is None
    assert earliest() is None


# --- opening -------------------------------------------------------------------------------------------------------


async def test_a_call_sends_its_request_on_a_connection_to_its_worker() -> None:
    connection = FakeConnection(b"x")
    pool = FakePool(connection)
    call = Call(leg(connect_s=2.5), Worker("http://a"), pool)  # type: ignore[arg-type]
    await call.open(b"head", [b"body"])
    assert (pool.asked, connection.sent) == ([("http://a", 2.5, False)], [(b"head", b"body")])
    assert (call.connected, call.stale) == (True, False)
    assert call.headers == (("Retry-After", "2"),)


async def test_a_second_try_closes_the_first_connection_and_may_want_a_fresh_one() -> None:
    first, second = FakeConnection(b"x"), FakeConnection(b"y")
    pool = FakePool(first, second)
    call = Call(leg(), Worker("http://a"), pool)  # type: ignore[arg-type]
    await call.open(b"", [])
    await call.open(b"", [], fresh=True)
    assert (first.closed, second.closed, pool.asked[1][2]) == (True, False, True)
    assert call.connection is second


# (how the connection was before it broke, whether it had been kept for too long)
STALE = [
    ({"reused": True, "answered": False}, True),
    ({"reused": True, "answered": True}, False),
    ({"reused": False, "answered": False}, False),
]


@pytest.mark.parametrize(("attributes", "stale"), STALE)
async def test_a_kept_connection_that_was_dead_is_told_apart(attributes: dict[str, bool], stale: bool) -> None:
    """Only then may the request be sent again without a doubt."""
    pool = FakePool(FakeConnection(error=Broken("x"), **attributes))
    call = Call(leg(), Worker("http://a"), pool)  # type: ignore[arg-type]
    with pytest.raises(Broken):
        await call.open(b"", [])
    assert (call.connected, call.stale) == (True, stale)


async def test_without_a_connection_nothing_was_sent() -> None:
    call = Call(leg(), Worker("http://a"), FakePool(ConnectFailed("x")))  # type: ignore[arg-type]
    with pytest.raises(ConnectFailed):
        await call.open(b"", [])
    assert (call.connected, call.stale) == (False, False)


@pytest.mark.parametrize(("begun", "ends"), [(None, 5.0), (-2.0, 3.0)])
async def test_all_attempts_of_a_leg_share_its_time(begun: float | None, ends: float) -> None:
    now = asyncio.get_running_loop().time()
    call = Call(leg(request_s=5.0), Worker("http://a"), FakePool(), 1, None if begun is None else now + begun)  # type: ignore[arg-type]
    assert call.ends_at == pytest.approx(now + ends, abs=1.0)
    assert Call(leg(), Worker("http://a"), FakePool()).ends_at is None  # type: ignore[arg-type]


# --- the first event -----------------------------------------------------------------------------------------------

EVENT = b'data: {"choices":[{"index":0}]}\n\n'

# (the parts of the stream, the data of its first event)
FIRST = [
    ((EVENT,), b'{"choices":[{"index":0}]}'),
    ((EVENT[:9], EVENT[9:]), b'{"choices":[{"index":0}]}'),
    ((b": keep-alive\n\n", EVENT), b'{"choices":[{"index":0}]}'),
    ((b"event: response.created\n" + EVENT,), b'{"choices":[{"index":0}]}'),
    ((EVENT + b"data: more\n\n",), b'{"choices":[{"index":0}]}'),
    ((b'data: {"response":{"error":null}}\n\n',), b'{"response":{"error":null}}'),
    ((b'data: {"text":"\\"error\\""}\n\n',), b'{"text":"\\"error\\""}'),
    ((b'data: ["error"]\n\n',), b'["error"]'),
    ((b'data: {"error":\n\n',), b'{"error":'),
    ((b"event: no error\n" + EVENT,), b'{"choices":[{"index":0}]}'),
    ((b'data: {"type":"error report"}\n\n',), b'{"type":"error report"}'),
]


@pytest.mark.parametrize(("parts", "first"), FIRST)
async def test_a_stream_has_begun_with_its_first_event_and_its_bytes_are_kept(
    parts: tuple[bytes, ...], first: bytes
) -> None:
    call = await opened(*parts, b"tail")
    await call.read_first_event()
    assert call.first_event == first
    assert (call.leg.body, call.streamed) == ({"stream": True}, True)
    assert b"".join(await read(call)) == b"".join(parts) + b"tail"


# (the parts, the error, its status): no status has been sent to the client yet
REFUSED: list[tuple[tuple[bytes, ...], type[LegError], int]] = [
    ((ERROR % b"400", b"data: [DONE]\n\n"), LegRejected, 400),
    ((ERROR % b"404",), LegRejected, 404),
    ((ERROR % b"503",), LegBusy, 503),
    ((ERROR % b"500",), LegFailed, 502),
    ((b'event: error\ndata: {"code":"server_error","message":"bad"}\n\n',), LegFailed, 502),
    ((b'event: error\ndata: {"code":429,"message":"bad"}\n\n',), LegRejected, 429),
    ((b'data: {"type":"error","code":400,"message":"bad"}\n\n',), LegRejected, 400),
    ((b"event: error\ndata: out of memory\n\n",), LegFailed, 502),
    ((b"event: error\ndata: {}\n\n",), LegFailed, 502),
    ((b"event: error\ndata: null\n\n",), LegFailed, 502),
    ((b"data: [DONE]\n\n",), LegFailed, 502),
    ((b": keep-alive\n\n",), LegFailed, 502),
    ((b"data: {}",), LegFailed, 502),
    ((), LegFailed, 502),
]


@pytest.mark.parametrize(("parts", "kind", "status"), REFUSED)
async def test_a_stream_that_begins_with_an_error_or_the_end_has_not_begun(
    parts: tuple[bytes, ...], kind: type[LegError], status: int
) -> None:
    """Cases S07 and S08."""
    call = await opened(*parts)
    with pytest.raises(kind) as caught:
        await call.read_first_event()
    assert caught.value.status == status


async def test_a_first_event_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envelope.sse.Events.feed", raising(EventTooLarge("x")))
    call = await opened(b"data: x")
    with pytest.raises(EventTooLarge):
        await call.read_first_event()


async def test_what_comes_before_the_first_event_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "MAX_EVENT_BYTES", 100)
    call = await opened(*[b": keep-alive\n\n"] * 5, EVENT)
    await call.read_first_event()
    call = await opened(*[b": keep-alive\n\n"] * 20, EVENT)
    with pytest.raises(EventTooLarge):
        await call.read_first_event()


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


# --- the body ------------------------------------------------------------------------------------------------------


async def test_a_whole_body_is_joined() -> None:
    assert await (await opened(b"a", b"b")).read_all() == b"ab"
    assert await (await opened(b"a")).read_all() == b"a"
    assert await (await opened()).read_all() == b""


async def test_a_whole_body_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_MOST_BYTES", 3)
    assert await (await opened(b"ab", b"c")).read_all() == b"abc"
    with pytest.raises(LegFailed, match="too large"):
        await (await opened(b"ab", b"c", b"d")).read_all()


async def test_whoever_takes_may_stop_and_go_on() -> None:
    call = await opened(EVENT, b"b", b"c")
    await call.read_first_event()
    taken: list[bytes] = []

    def one(data: bytes) -> bool:
        taken.append(data)
        return False

    assert not await call.push(one)
    assert not await call.push(one)
    assert taken == [EVENT, b"b"]
    assert await read(call) == [b"c"]


@pytest.mark.parametrize("limits", [{}, {"idle_s": 60.0}, {"request_s": 60.0}])
async def test_a_body_that_breaks_off_is_the_leg_s_failure(limits: dict[str, float]) -> None:
    call = await opened(b"a", error=Broken("x"), **limits)
    taken: list[bytes] = []
    with pytest.raises(LegFailed, match="broke before its answer was whole"):
        await call.push(lambda data: taken.append(data) is None)
    assert taken == [b"a"]


class Silent(FakeConnection):
    """Gives nothing the first time it is read, though it may tell of some bytes meanwhile."""

    def __init__(self, after_s: float | None = None) -> None:
        super().__init__(b"last")
        self._after_s, self.pushes = after_s, 0

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        self.pushes += 1
        if self.pushes > 1:
            return await super().push(take)
        if self._after_s is not None:
            asyncio.get_running_loop().call_later(self._after_s, take, b"some")
        await asyncio.Event().wait()
        return True


async def silent(connection: Silent, **limits: Any) -> Call:
    call = Call(leg(**limits), Worker("http://a"), FakePool(connection))  # type: ignore[arg-type]
    await call.open(b"", [])
    return call


@pytest.mark.parametrize("limits", [{"idle_s": 0.02}, {"request_s": 0.02}, {"request_s": 0.02, "idle_s": 60.0},
                                    {"request_s": 60.0, "idle_s": 0.02}])  # fmt: skip
async def test_silence_beyond_a_limit_is_a_timeout(limits: dict[str, float]) -> None:
    call = await silent(Silent(), **limits)
    with pytest.raises(LegTimeout):
        await read(call)


async def test_what_comes_in_time_sets_the_idle_limit_anew() -> None:
    call = await silent(Silent(after_s=0.03), idle_s=0.05)
    assert await read(call) == [b"some", b"last"]


# --- the end -------------------------------------------------------------------------------------------------------


async def test_the_permit_is_taken_at_once_and_given_back_once() -> None:
    worker, connection = Worker("http://a"), FakeConnection(b"x")
    pool = FakePool(connection)
    call = Call(leg(), worker, pool)  # type: ignore[arg-type]
    assert worker.in_flight == 1
    await call.open(b"", [])
    for _ in range(2):
        await call.aclose()
    assert (worker.in_flight, pool.released) == (0, [("http://a", connection)])


async def test_a_call_that_was_never_opened_gives_its_permit_back_too() -> None:
    worker, pool = Worker("http://a"), FakePool()
    await Call(leg(), worker, pool).aclose()  # type: ignore[arg-type]
    assert (worker.in_flight, pool.released) == (0, [])

"""Decode's stream beside a prefill whose answer is still out: either may be over first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from envelope.errors import LegFailed
from steps import joined
from steps.joined import Joined, settle
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Source:
    """A stream that gives what it is told to, when it is told to. Implements ``coordinator.context.LiveStream``."""

    headers = (("x-worker", "1"),)
    first_event = b"1"

    def __init__(self) -> None:
        self.items: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = 0
        self.endings: list[Exception | None] = []

    def ended(self, error: Exception | None) -> None:
        self.endings.append(error)

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while (item := await self.items.get()) is not None:
            if not take(item):
                return False
        return True

    async def aclose(self) -> None:
        self.closed += 1


class Prefilling:
    """A prefill leg under way."""

    def __init__(self) -> None:
        self.ends: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> str:
        try:
            return await asyncio.shield(self.ends)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.fixture
async def prefill() -> AsyncIterator[Prefilling]:
    leg = Prefilling()
    yield leg
    leg.task.cancel()
    await asyncio.gather(leg.task, return_exceptions=True)


@pytest.fixture
def took() -> list[bytes]:
    return []


def keep(took: list[bytes]) -> Callable[[bytes], bool]:
    def take(data: bytes) -> bool:
        took.append(data)
        return True

    return take


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_stream_is_given_whole_whichever_leg_ends_first(
    prefill: Prefilling, took: list[bytes], first: str
) -> None:
    source = Source()
    stream = Joined(source, prefill.task)
    if first == "prefill":
        prefill.ends.set_result("ok")
        await prefill.task
    for item in (b"a", b"b", None):
        source.items.put_nowait(item)
    assert await stream.push(keep(took)) is True
    assert (took, stream.first_event, stream.headers) == ([b"a", b"b"], b"1", (("x-worker", "1"),))


async def test_how_decode_ended_is_told_of_its_worker_but_not_that_prefill_failed(
    prefill: Prefilling, took: list[bytes]
) -> None:
    source, cut, failed = Source(), LegFailed("decode", "cut"), LegFailed("prefill", "the worker answered 500")
    stream = Joined(source, prefill.task)
    stream.ended(cut)
    prefill.ends.set_exception(failed)
    with pytest.raises(LegFailed) as caught:
        await stream.push(keep(took))
    for error in (caught.value, cut, None):
        stream.ended(error)
    assert source.endings == [cut, cut, None]


async def test_a_prefill_that_ends_in_between_changes_nothing(prefill: Prefilling, took: list[bytes]) -> None:
    source = Source()
    pushing = asyncio.create_task(Joined(source, prefill.task).push(keep(took)))
    source.items.put_nowait(b"a")
    prefill.ends.set_result("ok")
    await asyncio.wait((prefill.task,), timeout=HANG_S)
    source.items.put_nowait(b"b")
    source.items.put_nowait(None)
    assert await asyncio.wait_for(pushing, HANG_S) is True
    assert took == [b"a", b"b"]


@pytest.mark.parametrize("when", ["meanwhile", "between two pushes"])
async def test_a_prefill_that_fails_ends_the_stream_with_its_error(
    prefill: Prefilling, took: list[bytes], when: str
) -> None:
    """What decode reads may be no whole prompt's; what was sent is out, and the rest is not."""
    source = Source()
    stream = Joined(source, prefill.task)
    source.items.put_nowait(b"a")
    failure = LegFailed("prefill", "gone")
    if when == "meanwhile":
        pushing = asyncio.create_task(stream.push(keep(took)))
        while not took:
            await asyncio.sleep(0)
        prefill.ends.set_exception(failure)
    else:
        assert await stream.push(lambda data: took.append(data) is not None) is False
        prefill.ends.set_exception(failure)
        await asyncio.wait((prefill.task,), timeout=HANG_S)
        pushing = asyncio.create_task(stream.push(keep(took)))
    with pytest.raises(LegFailed, match="prefill: gone"):
        await asyncio.wait_for(pushing, HANG_S)
    assert took == [b"a"]


async def test_a_client_that_is_behind_stops_the_reading_and_it_goes_on(prefill: Prefilling, took: list[bytes]) -> None:
    source = Source()
    stream = Joined(source, prefill.task)
    for item in (b"a", b"b", None):
        source.items.put_nowait(item)
    assert await stream.push(lambda data: took.append(data) is not None) is False
    assert await stream.push(keep(took)) is True
    assert took == [b"a", b"b"]


async def test_a_failure_of_what_takes_is_its_own(prefill: Prefilling) -> None:
    source = Source()
    source.items.put_nowait(b"a")

    def gone(data: bytes) -> bool:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await Joined(source, prefill.task).push(gone)


async def test_whoever_closes_early_ends_both_legs(prefill: Prefilling) -> None:
    """The client has left: nobody waits for prefill either. Closing twice is allowed."""
    source = Source()
    stream = Joined(source, prefill.task)
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    assert (source.closed, prefill.cancelled) == (2, True)


async def test_a_push_that_is_cancelled_leaves_nothing_running(prefill: Prefilling, took: list[bytes]) -> None:
    source = Source()
    stream = Joined(source, prefill.task)
    pushing = asyncio.create_task(stream.push(keep(took)))
    await asyncio.sleep(0)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    source.items.put_nowait(b"a")
    await asyncio.sleep(0)
    assert took == []
    assert not prefill.task.done()


@pytest.mark.parametrize("ends", ["in time", "never", "badly"])
async def test_after_the_whole_answer_prefill_gets_a_moment_and_is_no_concern(
    prefill: Prefilling, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(joined, "_GRACE_S", 0.01 if ends == "never" else 5.0)
    if ends == "in time":
        prefill.ends.set_result("ok")
    if ends == "badly":
        prefill.ends.set_exception(LegFailed("prefill", "gone"))
    source = Source()
    source.items.put_nowait(None)
    stream = Joined(source, prefill.task)
    assert await stream.push(lambda data: True) is True
    await stream.aclose()
    assert prefill.cancelled is (ends == "never")
    await settle(prefill.task)


def test_it_is_a_live_stream() -> None:
    """Whoever relays knows no difference."""
    from coordinator.context import LiveStream

    needed = {name for name in vars(LiveStream) if not name.startswith("_")}
    assert needed <= set(dir(Joined))

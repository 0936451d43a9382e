"""Parser processes: what goes through them comes back in order, and whatever one does hurts only who is with it.

The processes are real; what parses in them is a double, as vLLM is not installed where these tests run.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.derender import pool as pools
from coordinator.derender.held import HeldParsers, ParserPools
from coordinator.derender.pool import VLLM, ParserPool, ParserSettings, Unusable
from coordinator.derender.process import ParserProcess
from coordinator.settings.problems import ConfigError
from envelope.errors import BadRequest, LegFailed, NoWorker
from envelope.json_codec import dumps
from tests.background import FaultsTold
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DOUBLE = "parser_double:Parsers"
DONE = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def _the_double_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root.parents[1])]))


def settings(parser: str | None = None, processes: int = 1, silence_s: float = 30.0) -> ParserSettings:
    return ParserSettings(str(Path(__file__).parent), parser, None, processes, silence_s)


def nobody(end: str) -> None:
    """Is told why a process ended, where that is not the question."""


@pytest.fixture
async def started() -> AsyncIterator[Callable[..., Any]]:
    made: list[ParserPool] = []

    async def start(ended: Callable[[str], None] = nobody, **options: Any) -> ParserPool:
        pool = ParserPool(settings(**options), FaultsTold(), ended, DOUBLE)
        async with asyncio.timeout(HANG_S):
            await pool.start()
        made.append(pool)
        return pool

    yield start
    for pool in made:
        await pool.release()


class Live:
    """A worker's stream. Implements ``coordinator.context.LiveStream``; after its pieces it ends, or stays silent."""

    headers = (("x-worker", "1"),)
    first_event = b"{}"

    def __init__(self, *texts: str, ends: bool = True) -> None:
        self.pieces = [event(text) for text in texts] + ([DONE] if ends else [])
        self._ends = ends
        self.given = 0
        self.closed = False
        self.told: list[Any] = []

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while self.pieces:
            self.given += 1
            if not take(self.pieces.pop(0)):
                return False
        if not self._ends:
            await asyncio.Event().wait()
        return True

    def ended(self, error: Any) -> None:
        self.told.append(error)

    async def aclose(self) -> None:
        self.closed = True


def event(text: str) -> bytes:
    return b"data: " + dumps({"text": text}) + b"\n\n"


def texts(took: list[bytes]) -> list[str]:
    return [json.loads(one[6:])["text"] for one in took if b'"text"' in one]


async def relayed(stream: Any, took: list[bytes]) -> None:
    """Take a stream to its end, as a client that never falls behind."""

    def take(data: bytes) -> bool:
        took.append(data)
        return True

    async with asyncio.timeout(HANG_S):
        assert await stream.push(take)


async def test_events_come_back_in_order_and_what_holds_no_chunk_as_it_was(started: Any) -> None:
    pool, took = await started(), list[bytes]()
    live = Live("a", "nothing", "b")
    live.pieces = [b": hello\n\n", live.pieces[0][:9], live.pieces[0][9:] + live.pieces[1], *live.pieces[2:]]
    await relayed(pool.open({}).attach(live), took)
    assert took == [b": hello\n\n", event("A"), event("B"), DONE]


async def test_an_event_of_several_lines_is_still_one_chunk(started: Any) -> None:
    pool, took = await started(), list[bytes]()
    live = Live()
    live.pieces = [b'data: {"text":\ndata: "a"}\n\n', DONE]
    await relayed(pool.open({}).attach(live), took)
    assert texts(took) == ["A"]


async def test_what_a_process_knows_of_the_model_is_known_here(started: Any) -> None:
    assert (await started()).eos_token_id == 7
    assert ParserPool(settings(), FaultsTold(), nobody, DOUBLE).eos_token_id is None


async def test_a_whole_answer_is_parsed_in_one_call(started: Any) -> None:
    pool = await started()
    assert (await pool.whole({}, {"text": "hello " * 100_000}))["text"] == "HELLO " * 100_000


async def test_requests_are_spread_over_processes_and_each_stays_with_its_own(started: Any) -> None:
    pool = await started(processes=2)
    held = pool.open({})
    one = (await pool.whole({}, {"text": "a"}))["parsed by"]
    assert (await pool.whole({}, {"text": "a"}))["parsed by"] == one, "the other one has a stream to parse"
    held.close()
    assert pool.open({}) is not held


async def test_a_parser_that_raises_ends_its_request_and_no_other_and_tells_nothing_of_the_text(started: Any) -> None:
    """S28: of a stream that fails in its middle, everything before it has been given."""
    pool, took, other = await started(), list[bytes](), list[bytes]()
    with pytest.raises(LegFailed, match=r"derender: the parser failed: ValueError at parser_double\.py:\d+$"):
        await relayed(pool.open({}).attach(Live("a", "raise", "b")), took)
    assert texts(took) == ["A"]
    await relayed(pool.open({}).attach(Live("c")), other)
    assert texts(other) == ["C"]
    with pytest.raises(LegFailed, match="ValueError"):
        await pool.whole({}, {"text": "raise"})
    assert pool.problems() == []


async def test_a_parser_that_raises_while_the_worker_is_silent_is_heard_at_once(started: Any) -> None:
    pool, live = await started(), Live("a", "raise", ends=False)
    with pytest.raises(LegFailed, match="ValueError"):
        await relayed(pool.open({}).attach(live), [])


async def test_a_worker_is_not_blamed_for_its_parser(started: Any) -> None:
    pool, live, own = await started(), Live("raise"), LegFailed("decode", "broke off")
    stream = pool.open({}).attach(live)
    with pytest.raises(LegFailed) as caught:
        await relayed(stream, [])
    for error in (caught.value, own, None):
        stream.ended(error)
    assert live.told == [own, None]


async def test_what_cannot_be_parsed_as_asked_is_the_client_s_mistake(started: Any) -> None:
    pool = await started()
    parsing = pool.open({"refuse": True})
    assert (await pool.whole({}, {"text": "a"}))["text"] == "A"  # the refusal has come by now, and nobody listened
    with pytest.raises(BadRequest, match="no such tool"):
        await relayed(parsing.attach(Live("a")), [])


async def test_a_process_that_dies_fails_who_is_with_it_and_another_takes_its_place(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "_BACK_OFF_S", (0.0,))
    ends: list[str] = []
    pool, silent = await started(ends.append), Live("a", ends=False)
    with_it = asyncio.create_task(relayed(pool.open({}).attach(silent), []))
    await asyncio.sleep(0)
    with pytest.raises(LegFailed, match="the parser process ended"):
        await relayed(pool.open({}).attach(Live("die")), [])
    with pytest.raises(LegFailed, match="the parser process ended"):
        await with_it
    async with asyncio.timeout(HANG_S):
        while pool.problems():
            with pytest.raises(NoWorker):
                pool.open({})
            await asyncio.sleep(0.01)
    assert (await pool.whole({}, {"text": "a"}))["text"] == "A"
    assert ends == ["died"]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), ZeroDivisionError()], ids=repr)
async def test_a_process_that_cannot_be_started_again_is_tried_until_it_can(
    started: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where the fault is ours."""
    monkeypatch.setattr(pools, "_BACK_OFF_S", (0.0,))
    monkeypatch.setattr("coordinator.background._FIRST_WAIT_S", 0.001)
    ends: list[str] = []
    pool, real, refused = await started(ends.append), ParserProcess.start, 0

    async def start(process: ParserProcess) -> None:
        nonlocal refused
        refused += 1
        if refused < 3:
            raise error
        if refused == 3:
            monkeypatch.setitem(process._settings, "tool_parser", "unknown")
        await real(process)

    monkeypatch.setattr(ParserProcess, "start", start)
    with pytest.raises(LegFailed):
        await pool.whole({}, {"text": "die"})
    async with asyncio.timeout(HANG_S):
        while pool.problems():
            await asyncio.sleep(0.01)
    assert refused == 4 and len(pool._processes) == 1
    told = ["not_started"] * 2 if isinstance(error, OSError) else []  # a fault of ours is told as one
    assert ends == ["died", *told, "unusable"]


@pytest.mark.parametrize(("text", "why"), [("hang", "hung"), ("garble", "garbled")])
async def test_a_process_that_hangs_or_talks_nonsense_is_ended(started: Any, text: str, why: str) -> None:
    ends: list[str] = []
    pool = await started(ends.append, silence_s=0.3 if text == "hang" else 30.0)
    with pytest.raises(LegFailed, match="the parser process ended"):
        await relayed(pool.open({}).attach(Live("a", text)), [])
    async with asyncio.timeout(HANG_S):
        while not ends:
            await asyncio.sleep(0.01)
    assert ends == [why]


async def test_what_comes_behind_nonsense_in_the_same_read_is_not_heard() -> None:
    process, heard = ParserProcess(DOUBLE, {}, 30.0), list[bytes]()
    number = process.listen(lambda kind, _: heard.append(kind))
    process.data_received(b"more %b {}\n?!\ndone %b {}\n" % (number, number))
    assert heard == [b"more", b"error"]
    assert process.gone.done() and process.end == "garbled"


async def test_a_slow_parser_stops_the_worker_from_being_read(started: Any) -> None:
    """S27: what waits for a parser is bounded, however fast the worker is."""
    pool, live = await started(), Live(*["slow"] * 5, *["a"] * 500)
    task = asyncio.create_task(relayed(pool.open({}).attach(live), took := list[bytes]()))
    await asyncio.sleep(0.01)
    assert live.given < 100
    await task
    assert len(texts(took)) == 505


async def test_a_client_that_is_behind_stops_the_worker_from_being_read_and_loses_nothing(started: Any) -> None:
    pool, live, took = await started(), Live(*["a"] * 300), list[bytes]()
    stream, pushes = pool.open({}).attach(live), 0
    async with asyncio.timeout(HANG_S):
        while not await stream.push(lambda data: bool(took.append(data))):
            pushes += 1
    assert pushes > 2
    assert texts(took) == ["A"] * 300 and took[-1] == DONE


async def test_a_stream_that_the_parser_ends_closes_the_worker_s(started: Any) -> None:
    """S29: a stop string that only we see; the worker goes on and is silent, or talks on."""
    for ends in (True, False):
        pool, live, took = await started(), Live("a", "enough", "b", ends=ends), list[bytes]()
        await relayed(pool.open({}).attach(live), took)
        assert took == [event("A"), event("ENOUGH"), b'data: {"usage":2}\n\n', DONE]
        assert live.closed or ends, "a worker that goes on is stopped"


async def test_a_client_that_has_gone_is_told_to_whoever_pushes(started: Any) -> None:
    pool, live = await started(), Live("a", ends=False)

    def gone(data: bytes) -> bool:
        raise ConnectionResetError("gone")

    stream = pool.open({}).attach(live)
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(HANG_S):
            await stream.push(gone)


async def test_a_request_that_is_cancelled_leaves_nothing_behind(started: Any) -> None:
    pool, live = await started(), Live("a", ends=False)
    stream = pool.open({}).attach(live)
    task = asyncio.create_task(relayed(stream, took := list[bytes]()))
    async with asyncio.timeout(HANG_S):
        while not took:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stream.aclose()
    await stream.aclose()
    assert live.closed
    assert [process.load for process in pool._processes] == [0]
    assert (await pool.whole({}, {"text": "a"}))["text"] == "A"


@pytest.mark.parametrize(
    ("parser", "why"),
    [
        ("unknown", "^tool_parser: there is no 'unknown', did you mean upper[?]$"),
        ("broken", r"^RuntimeError at parser_double\.py:\d+$"),
        ("dead", "^it ended before it was ready"),
    ],
)
async def test_a_process_that_cannot_be_used_says_why(parser: str, why: str) -> None:
    pool = ParserPool(settings(parser, processes=2), FaultsTold(), nobody, DOUBLE)
    async with asyncio.timeout(HANG_S):
        with pytest.raises(Unusable, match=why):
            await pool.start()
    assert pool._processes == []


# --- as the file has it --------------------------------------------------------------------------------------------


def fault(key: str, sentence: str) -> ConfigError:
    return ConfigError([f"{key}: {sentence}"])


async def test_plans_with_the_same_parsers_share_them_and_the_last_one_ends_them() -> None:
    made = ParserPools(FaultsTold(), nobody, DOUBLE)
    before, after = HeldParsers(made.of(settings()), fault), HeldParsers(made.of(settings()), fault)
    assert made.of(settings(processes=2)) is not before.pool
    async with asyncio.timeout(HANG_S):
        await before.start()
        await after.start()
        await before.release()
        assert before.pool is after.pool and after.pool.problems() == []
        await after.release()
        await after.release()
    assert after.pool.problems() == ["derender: no parser process is ready"]


async def test_what_a_process_cannot_use_is_told_of_the_key_at_fault() -> None:
    held = HeldParsers(ParserPools(FaultsTold(), nobody, DOUBLE).of(settings("unknown")), fault)
    with pytest.raises(ConfigError) as caught:
        await held.start()
    assert caught.value.problems == ["tool_parser: there is no 'unknown', did you mean upper?"]
    await held.release()


def test_without_vllm_it_is_said_what_to_install() -> None:
    held = HeldParsers(ParserPool(settings("hermes"), FaultsTold(), nobody, VLLM), fault)
    with pytest.raises(ConfigError) as caught:
        held.check()
    assert caught.value.problems == [
        "derender: coordinator parses with vLLM's own parsers, and vllm is not installed here: "
        "pip install 'pd-coordinator[vllm]'"
    ]


def test_a_tokenizer_that_is_no_folder_is_refused_before_anything_is_started() -> None:
    held = HeldParsers(ParserPool(ParserSettings("/no/such", "x", None, 1, 1.0), FaultsTold(), nobody, DOUBLE), fault)
    with pytest.raises(ConfigError, match="tokenizer: /no/such is no folder here"):
        held.check()

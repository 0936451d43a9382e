"""prefill-decode: both legs out at once, the first failure decides, and no pair is ever used twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.step import Reply
from envelope.connectors import KV_CONNECTORS
from envelope.errors import BadRequest, LegBusy, LegError, LegFailed, LegRejected, NotSupported, NoWorker
from envelope.formats import Format
from envelope.json_codec import dumps
from steps.prefill_decode import Params, PrefillDecode
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import RequestContext
    from coordinator.step import Leg, PipelineSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
PREFILLED = {"choices": [{"index": 0, "finish_reason": "length"}]}
ANSWER = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "a"}}]}


@dataclass
class Peer:
    url: str


@dataclass
class Bootstrap:
    """Implements ``coordinator.step.Bootstrap``."""

    told: Any = field(default_factory=lambda: {0: "engine"})
    asked: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def engines(self, ctx: RequestContext, address: str) -> Any:
        self.asked.append(address)
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


class Workers:
    """An upstream whose legs are answered when a test says so. Implements ``coordinator.step.Upstream``."""

    media: Any = None

    def __init__(self, *, serves: bool = True) -> None:
        self.bootstrap = Bootstrap()
        self.legs: list[Leg] = []
        self.cancelled: list[str] = []
        self.peers = [Peer("http://10.0.0.1:8000"), Peer("http://10.0.0.2:8000")]
        self._serves = serves
        self._waiting: dict[str, list[asyncio.Future[Any]]] = {"prefill": [], "decode": []}

    def serves(self, ctx: RequestContext, role: str) -> bool:
        return self._serves

    def choose(self, ctx: RequestContext, role: str, needs: str = "") -> Peer:
        self.needs = needs
        return next(peer for peer in (*self.peers, self.peers[0]) if peer not in ctx.failed)

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Any:
        answer = await self._answered(leg)
        return answer if not isinstance(answer, dict) else Reply(200, dumps(answer), answer)

    async def stream(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Any:
        return await self._answered(leg)

    async def _answered(self, leg: Leg) -> Any:
        self.legs.append(leg)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[leg.role].append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            self.cancelled.append(leg.role)
            raise

    def answer(self, role: str, answer: Any) -> None:
        waiting = self._waiting[role][-1]
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def leg(self, role: str, nth: int = -1) -> Leg:
        return [leg for leg in self.legs if leg.role == role][nth]


def elsewhere(error: LegError) -> LegError:
    """Return a failure on the worker's side, with another worker to be tried."""
    error.retryable = error.elsewhere = True
    return error


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def pair(settings: Callable[..., PipelineSettings]) -> Callable[..., PrefillDecode]:
    def made(kind: str = "kv-mooncake", params: dict[str, Any] | None = None, **changes: Any) -> PrefillDecode:
        return PrefillDecode(Params(**(params or {})), settings(kv=KV_CONNECTORS[kind], **changes))

    return made


@dataclass
class Running:
    """A step under way."""

    task: asyncio.Task[str]
    ctx: RequestContext

    async def turns(self, count: int = 20) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def result(self) -> str:
        return await asyncio.wait_for(asyncio.shield(self.task), HANG_S)


@pytest.fixture
async def run(context: Callable[..., RequestContext], workers: Workers) -> Any:
    started: list[Running] = []

    async def start(step: PrefillDecode, body: dict[str, Any] | None = None, **slots: Any) -> Running:
        ctx = context("chat", CHAT if body is None else body, **slots)
        running = Running(asyncio.create_task(step.run(ctx, workers)), ctx)
        started.append(running)
        await running.turns()
        return running

    yield start
    for running in started:
        running.task.cancel()
    await asyncio.gather(*(running.task for running in started), return_exceptions=True)


KINDS = [name for name, kind in KV_CONNECTORS.items() if kind.concurrent]


@pytest.mark.parametrize("kind", KINDS)
async def test_both_legs_are_out_before_either_has_answered(pair: Any, run: Any, workers: Workers, kind: str) -> None:
    under_way = await run(pair(kind))
    assert sorted(leg.role for leg in workers.legs) == ["decode", "prefill"]
    workers.answer("prefill", PREFILLED)
    await under_way.turns()
    assert not under_way.task.done()
    workers.answer("decode", ANSWER)
    assert await under_way.result() == "ok"
    assert under_way.ctx.answer.body == ANSWER
    assert workers.cancelled == []
    assert [(leg.step, leg.outcome) for leg in under_way.ctx.legs] == [("prefill", "ok")]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_legs_carry_what_the_contract_says_and_no_more(
    pair: Any, run: Any, workers: Workers, kind: str
) -> None:
    """The table in the docs is what is sent."""
    contract = KV_CONNECTORS[kind]
    await run(pair(kind))
    plain_prefill = set(CHAT) | {"stream"} | (set() if contract.own_body else {"ignore_eos"})
    for role, plain, adds in (
        ("prefill", plain_prefill, {*contract.prefill, *contract.prefill_adds}),
        ("decode", set(CHAT), set(contract.decode_adds)),
    ):
        body = workers.leg(role).body
        if contract.own_body:
            assert set(body) == plain | adds
        else:
            assert set(body) == plain | {"kv_transfer_params"}
            assert set(body["kv_transfer_params"]) == adds


async def test_offloading_s_decode_is_told_where_the_tier_of_prefill_is(pair: Any, run: Any, workers: Workers) -> None:
    await run(pair("kv-offloading", bootstrap_port=lambda url: 7000))
    prefill, decode = (workers.leg(role).body["kv_transfer_params"] for role in ("prefill", "decode"))
    id = prefill["remote_decoder"]["kv_request_id"]
    assert prefill == {"remote_decoder": {"kv_request_id": id}}
    assert decode == {"remote_prefiller": {"kv_request_id": id, "remote_host": "10.0.0.1", "remote_port": 7000}}


@pytest.mark.parametrize(("url", "host", "address"), [
    ("http://10.0.0.1:8000", "10.0.0.1", "http://10.0.0.1:8998"),
    ("https://p.example/base", "p.example", "http://p.example:8998"),
    ("http://[fd00::1]:8000", "fd00::1", "http://[fd00::1]:8998"),
])  # fmt: skip
async def test_prefill_s_host_is_where_its_bootstrap_server_is(
    pair: Any, run: Any, workers: Workers, url: str, host: str, address: str
) -> None:
    workers.peers = [Peer(url)]
    await run(pair("kv-sglang"))
    assert workers.leg("decode").body["bootstrap_host"] == host
    await run(pair("kv-mooncake"))
    assert workers.bootstrap.asked == [address]


async def test_prefill_goes_to_the_worker_that_decode_is_told_of(pair: Any, run: Any, workers: Workers) -> None:
    await run(pair())
    assert workers.leg("prefill").to is workers.peers[0]
    assert workers.needs == workers.leg("prefill").needs == "/v1/chat/completions"
    assert workers.leg("decode").to is None
    assert all(leg.tied for leg in workers.legs)


async def test_only_a_prefill_that_decode_waits_for_in_vain_runs_on(pair: Any, run: Any, workers: Workers) -> None:
    runs_on = {}
    for kind in KINDS:
        await run(pair(kind))
        runs_on[kind] = workers.leg("prefill").runs_on_s > 0
        assert workers.leg("decode").runs_on_s == 0
    assert runs_on == {kind: KV_CONNECTORS[kind].prefill_runs_on for kind in KINDS}
    assert runs_on["kv-mooncake"] is True


@pytest.mark.parametrize("other", ["prefill", "decode"])
@pytest.mark.parametrize(
    "error", [LegFailed("x", "no"), LegRejected("x", 400, {"message": "no"}), NoWorker("x", "none")], ids=repr
)
async def test_the_first_leg_to_fail_ends_the_other_and_decides(
    pair: Any, run: Any, workers: Workers, other: str, error: LegError
) -> None:
    """L30, D7."""
    failing = "decode" if other == "prefill" else "prefill"
    under_way = await run(pair())
    workers.answer(failing, error)
    with pytest.raises(type(error)) as caught:
        await under_way.result()
    assert caught.value is error
    assert workers.cancelled == [other]
    assert under_way.ctx.answer is None
    assert len(workers.bootstrap.forgotten) == 1


async def test_of_two_failures_at_once_prefill_s_is_told(pair: Any, run: Any, workers: Workers) -> None:
    """Decode's is often but an echo of it."""
    under_way = await run(pair())
    workers.answer("decode", LegFailed("decode", "its peer failed"))
    workers.answer("prefill", LegFailed("prefill", "no memory"))
    with pytest.raises(LegFailed, match="no memory"):
        await under_way.result()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_ends_both(pair: Any, run: Any, workers: Workers, kind: str) -> None:
    under_way = await run(pair(kind))
    under_way.task.cancel()
    await asyncio.wait((under_way.task,), timeout=HANG_S)
    assert sorted(workers.cancelled) == ["decode", "prefill"]


async def test_a_stream_has_begun_while_prefill_s_answer_is_out(
    pair: Any, run: Any, workers: Workers, stream: Any
) -> None:
    """And a prefill that fails then is the stream's failure."""
    under_way = await run(pair(), {**CHAT, "stream": True})
    workers.answer("decode", stream(b'{"choices": []}'))
    assert await under_way.result() == "ok"
    source = under_way.ctx.answer.source
    assert source.first_event == b'{"choices": []}'
    workers.answer("prefill", LegFailed("prefill", "died"))
    await under_way.turns()
    with pytest.raises(LegFailed, match="prefill: died"):
        await source.push(lambda data: True)
    await source.aclose()


async def test_a_failure_that_another_worker_may_not_have_is_a_failure_once_the_stream_has_begun(
    pair: Any, run: Any, workers: Workers, stream: Any
) -> None:
    """Nothing begins again then, and what the client is told is prefill's own error."""
    under_way = await run(pair(), {**CHAT, "stream": True})
    workers.answer("decode", stream(b"{}"))
    await under_way.result()
    workers.answer("prefill", elsewhere(LegBusy("prefill", "full")))
    await under_way.turns()
    source = under_way.ctx.answer.source
    with pytest.raises(LegBusy, match="prefill: full"):
        await source.push(lambda data: True)
    await source.aclose()
    assert len(workers.legs) == 2


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_what_begins_again_has_new_ids_and_another_worker(
    pair: Any, run: Any, workers: Workers, counted: Any, failing: str
) -> None:
    under_way = await run(pair())
    first = [leg.body["kv_transfer_params"] for leg in workers.legs]
    under_way.ctx.failed.append(workers.peers[0])
    workers.answer(failing, elsewhere(LegBusy(failing, "full")))
    await under_way.turns()
    assert len(workers.legs) == 4
    assert len(workers.cancelled) == 1
    second = [leg.body["kv_transfer_params"] for leg in workers.legs[2:]]
    assert {params["transfer_id"] for params in first}.isdisjoint(params["transfer_id"] for params in second)
    assert workers.leg("prefill").to is workers.peers[1]
    assert under_way.ctx.leg_id == "req-1234-2"
    workers.answer("prefill", PREFILLED)
    workers.answer("decode", ANSWER)
    assert await under_way.result() == "ok"
    assert ("begun_again",) in counted.all


@pytest.mark.parametrize(("attempts", "error"), [
    (2, LegBusy("prefill", "full")),
    (1, elsewhere(LegBusy("prefill", "full"))),
], ids=["nobody else is there", "one attempt is all"])  # fmt: skip
async def test_what_cannot_begin_again_is_told(
    pair: Any, run: Any, workers: Workers, attempts: int, error: LegError
) -> None:
    under_way = await run(pair(params={"max_attempts": attempts}))
    workers.answer("prefill", error)
    with pytest.raises(LegBusy):
        await under_way.result()
    assert len(workers.legs) == 2


async def test_a_bootstrap_server_that_fails_makes_way_for_another_worker(
    pair: Any, run: Any, workers: Workers
) -> None:
    workers.bootstrap.told = LegFailed("prefill", "no engine")
    under_way = await run(pair())
    with pytest.raises(LegFailed, match="no engine"):
        await under_way.result()
    assert workers.bootstrap.asked == ["http://10.0.0.1:8998", "http://10.0.0.2:8998"]
    assert workers.legs == []


async def test_what_prefill_holds_and_decode_has_not_read_is_left_to_be_released(
    pair: Any, run: Any, workers: Workers
) -> None:
    """Prefill is done: the hand-over is there."""
    under_way = await run(pair())
    workers.answer("prefill", PREFILLED)
    await under_way.turns()
    workers.answer("decode", NoWorker("decode", "none"))
    with pytest.raises(NoWorker):
        await under_way.result()
    assert under_way.ctx.unfetched() == [workers.leg("decode").body["kv_transfer_params"]]


@pytest.mark.parametrize("fetched", [False, True])
async def test_what_prefill_leaves_later_is_released_when_it_comes(
    pair: Any, run: Any, workers: Workers, fetched: bool
) -> None:
    """It runs on: until then nothing is there to be fetched, and what decode may have read is left alone."""
    under_way = await run(pair())
    ctx, told = under_way.ctx, []
    ctx.on_late_handover = lambda late: told.append(late.unfetched())
    ctx.handover_fetched = fetched
    workers.answer("decode", LegFailed("decode", "gone"))
    with pytest.raises(LegFailed):
        await under_way.result()
    assert ctx.unfetched() == []
    late = workers.leg("prefill").late
    assert late is not None
    late(Reply(200, b"", PREFILLED))
    assert told == ([] if fetched else [[workers.leg("decode").body["kv_transfer_params"]]])


async def test_a_prefill_that_failed_holds_nothing(pair: Any, run: Any, workers: Workers) -> None:
    """Nor does one that runs on to a bad end."""
    under_way = await run(pair())
    workers.answer("prefill", LegFailed("prefill", "no"))
    with pytest.raises(LegFailed):
        await under_way.result()
    late = workers.leg("prefill").late
    assert late is not None
    late(Reply(200, b"", {"choices": [{"finish_reason": "abort"}]}))
    assert under_way.ctx.unfetched() == []


@pytest.mark.parametrize("kind", ["kv-sglang", "kv-offloading"])
async def test_where_the_engine_frees_by_itself_nothing_is_released(
    pair: Any, run: Any, workers: Workers, kind: str
) -> None:
    under_way = await run(pair(kind))
    workers.answer("prefill", PREFILLED)
    await under_way.turns()
    workers.answer("decode", NoWorker("decode", "none"))
    with pytest.raises(NoWorker):
        await under_way.result()
    assert under_way.ctx.unfetched() == []


@pytest.mark.parametrize("kind", ["kv-mooncake", "kv-offloading"])
async def test_decode_goes_on_alone_where_the_file_says_so(
    pair: Any, run: Any, workers: Workers, counted: Any, kind: str
) -> None:
    under_way = await run(pair(kind, on_prefill_failure="decode_alone"))
    workers.answer("prefill", LegFailed("prefill", "no"))
    await under_way.turns()
    assert workers.cancelled == ["decode"]
    assert workers.leg("decode").body == CHAT
    workers.answer("decode", ANSWER)
    assert await under_way.result() == "failed_over"
    assert under_way.ctx.unfetched() == []
    assert ("prefill_failed_over", "LegFailed") in counted.all


@pytest.mark.parametrize(("body", "reason"), [
    ({**CHAT, "n": 2}, "n"),
    ({**CHAT, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({**CHAT, "use_beam_search": True}, "beam_search"),
])  # fmt: skip
async def test_what_only_decode_can_compute_is_sent_to_it_alone(
    pair: Any, run: Any, workers: Workers, counted: Any, body: dict[str, Any], reason: str
) -> None:
    under_way = await run(pair(), body)
    [leg] = workers.legs
    assert (leg.role, leg.body) == ("decode", body)
    workers.answer("decode", ANSWER)
    assert await under_way.result() == "skipped"
    assert counted.all == [("prefill_skipped", reason)]


async def test_an_sglang_request_must_name_a_prefill_worker(pair: Any, context: Callable[..., RequestContext]) -> None:
    with pytest.raises(BadRequest, match="names no prefill worker"):
        await pair("kv-sglang").run(context("chat", CHAT), Workers(serves=False))


def test_what_sglang_cannot_do_is_refused_before_anything_is_sent(
    pair: Any, context: Callable[..., RequestContext]
) -> None:
    step = pair("kv-sglang")
    step.admit(context("chat", CHAT))
    with pytest.raises(BadRequest, match="n must be 1"):
        step.admit(context("chat", {**CHAT, "n": 2}))
    with pytest.raises(NotSupported, match="no generate route"):
        step.admit(context("generate", {"token_ids": [1], "sampling_params": {}}))


async def test_prefill_gives_its_place_back_when_it_is_over(pair: Any, run: Any, workers: Workers) -> None:
    """Decode takes far longer, and others can be computed meanwhile."""

    freed: list[str] = []

    class Places:
        def free(self, role: str) -> None:
            freed.append(role)

    under_way = await run(pair(), places=Places())
    assert freed == []
    workers.answer("prefill", PREFILLED)
    await under_way.turns()
    assert freed == ["prefill"]


async def test_embeddings_go_to_the_worker_that_computes_the_prompt(pair: Any, run: Any, workers: Workers) -> None:
    await run(pair(), ec_params={"h": {"peer_host": "e"}})
    assert workers.leg("prefill").body["ec_transfer_params"] == {"h": {"peer_host": "e"}}
    assert "ec_transfer_params" not in workers.leg("decode").body


def test_the_plan_names_both_roles(pair: Any) -> None:
    row = pair().plan(Format.CHAT)
    assert (row.step, row.role, row.also) == ("prefill-decode", "decode", ("prefill",))
    assert "beside prefill by kv-mooncake" in row.notes

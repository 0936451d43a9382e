"""One server's engine core: admits requests, paces them, aborts them, hands KV over, and counts.

Everything here is what the routes share; what an answer looks like is theirs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim import engine, tokenizer
from coordinator.sim.encodings import BadEncoding, EncodingStore
from coordinator.sim.engine import Output, Step
from coordinator.sim.handover import BLOCK_SIZE, BadHandover, HandoverStore
from coordinator.sim.refusals import Refusal, failed
from coordinator.sim.sampling import check_engine_limits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from coordinator.sim.media import Media
    from coordinator.sim.pairs import Side
    from coordinator.sim.sampling import Sampling
    from coordinator.sim.settings import Settings
    from coordinator.sim.stream_parser import Delta, StreamParser

# How many tokens are made between two looks at the clients, when no token interval is set.
_BREATH = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One engine request.

    Attributes:
        id: the id by which it can be aborted.
        kv_params: the transfer params that the connector gets to see.
        ec_params: the same for the encoder-cache connector.
        itl_s: seconds between two tokens.
        reasoning_ended: a grammar binds from the first token on; None: the engine looks at the prompt.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    kv_params: Mapping[str, Any] | None = None
    media: tuple[Media, ...] = ()
    ec_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    itl_s: float = 0.0
    tokens_per_step: int = 1
    reasoning_ended: bool | None = None
    dp_rank: str | None = None


@dataclass(slots=True)
class Core:
    settings: Settings
    store: HandoverStore
    encodings: EncodingStore
    engine_id: str
    encoder: bool = False
    port: int = 0
    dead: bool = False
    running: dict[str, list[Generation]] = field(default_factory=dict)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    embedded: Counter[str] = field(default_factory=Counter)
    generated: int = 0
    pair: Side | None = None
    media_seen: set[str] = field(default_factory=set)
    _cached_blocks: set[int] = field(default_factory=set)

    def admit(self, job: Job) -> Generation:
        """Check a job as the engine does and queue it.

        Raises:
            Refusal: late where a stream would already be open.
        """
        if self.dead:
            raise failed("The server had an error while processing your request.")
        size = self.settings.dp_size
        if job.dp_rank is not None and job.dp_rank.isdecimal() and int(job.dp_rank) >= size:
            raise Refusal(f"data_parallel_rank {job.dp_rank} is out of range [0, {size}).", late=True)
        self._check_prompt(job)
        self.resolved(job)
        check_engine_limits(job.sampling, vocab_size=tokenizer.VOCAB_SIZE, max_logprobs=self.settings.max_logprobs)
        return Generation(self, job)

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            for generation in self.running.get(id, []):
                generation.aborted.set()

    @property
    def running_count(self) -> int:
        return sum(map(len, self.running.values()))

    def cached_tokens(self, job: Job) -> tuple[int, int]:
        """Return how many tokens of the prompt's start were in the prefix cache, and how many are new there now."""
        cached = added = 0
        key = hash(job.cache_salt)
        for end in range(BLOCK_SIZE, len(job.prompt_ids) + 1, BLOCK_SIZE):
            inside = tuple(
                item.hash for item in job.media if end - BLOCK_SIZE < item.offset + item.rows and item.offset < end
            )
            key = hash((key, tuple(job.prompt_ids[end - BLOCK_SIZE : end]), inside))
            if key not in self._cached_blocks:
                self._cached_blocks.add(key)
                added += BLOCK_SIZE
            elif end < len(job.prompt_ids):  # the last token is always computed
                cached = end
        return cached, added

    def resolved(self, job: Job) -> tuple[Media, ...]:
        """Return the prompt's media; what came by its hash alone is in the cache of what came before.

        Raises:
            Refusal: 500, when it is not.
        """
        for item in job.media:
            if item.data is None and not item.sized and item.hash not in self.media_seen:
                raise failed()
        self.media_seen.update(item.hash for item in job.media if item.data is not None)
        return job.media

    def _check_prompt(self, job: Job) -> None:
        outside = [id for id in job.prompt_ids if id >= tokenizer.VOCAB_SIZE]
        if outside:
            raise Refusal(f"Token id {max(outside)} is out of vocabulary", late=True)
        limit, length = self.settings.max_model_len, len(job.prompt_ids)
        if length < limit:
            return
        advice = "Make sure that `max_model_len` is no smaller than the number of text tokens"
        if length > limit:
            raise Refusal(
                f"The decoder prompt (length {length}) is longer than the maximum model length of {limit}. {advice}.",
                late=True,
            )
        raise Refusal(
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {limit}. {advice} (prompt + requested output tokens).",
            late=True,
        )


class Generation:
    """An admitted job. Iterate ``rounds`` once; then ``handover`` and ``encodings`` are what the connectors returned.

    Attributes:
        cached: tokens of the prompt that were not computed here.
        newly_cached: tokens of the prompt that are in the prefix cache from now on.
    """

    def __init__(self, core: Core, job: Job) -> None:
        self.job = job
        self.aborted = asyncio.Event()
        self.handover: dict[str, Any] | None = None
        self.encodings: dict[str, Any] | None = None
        self.cached = 0
        self.newly_cached = 0
        self._core = core
        self._reasons: list[str] = []
        self._met = False

    async def rounds(self) -> AsyncGenerator[list[Step], None]:
        """
        Raises:
            Refusal: 500, when the KV cannot be loaded.
        """
        siblings = self._core.running.setdefault(self.job.id, [])
        siblings.append(self)
        try:
            await self.meet()
            wrong = self._load()
            async for steps in self._paced(wrong_kv=wrong):
                for step in steps:
                    self._count(step)
                if self._done:
                    self._hand_over()
                    self._announce()
                yield steps
        finally:
            if self._core.pair is not None:
                self._core.pair.ended(self.job, self._reasons[0] if self._done else "abort")
            siblings.remove(self)
            if not siblings:
                self._core.running.pop(self.job.id, None)

    async def meet(self) -> None:
        """Wait for the leg that is in flight beside this one, if there is one; once.

        Raises:
            Refusal: it was given up, or there is no such leg to wait for.
        """
        if self._core.pair is not None and not self._met:
            self._met = True
            await self._core.pair.meet(self.job)

    async def outputs(self) -> list[Output]:
        """Run to the end and put each choice together."""
        outputs = [Output(index) for index in range(self.job.sampling.n)]
        async for steps in self.rounds():
            for step in steps:
                outputs[step.index].add(step)
        return outputs

    async def parsed(self, parser: StreamParser, output: Output) -> AsyncGenerator[Delta, None]:
        """Run a single choice, put it together in ``output``, and parse it as it comes."""
        async with aclosing(self.rounds()) as rounds:
            async for steps in rounds:
                for step in steps:
                    output.add(step)
                    yield parser.feed(step.text, last=step.finish_reason is not None)

    @property
    def settings(self) -> Settings:
        return self._core.settings

    @property
    def _done(self) -> bool:
        return len(self._reasons) == self.job.sampling.n

    async def _paced(self, *, wrong_kv: bool) -> AsyncGenerator[list[Step], None]:
        job = self.job
        vocabulary = tokenizer.load()
        interval = job.sampling.stream_interval or job.tokens_per_step
        rounds = engine.run(
            vocabulary,
            job.prompt_ids,
            job.sampling,
            seen=[f"{item.modality} {item.hash[:6]}" for item in job.media],
            reasoning_ended=job.reasoning_ended,
            wrong_kv=wrong_kv,
        )
        waiting: dict[int, Step] = {}
        open_choices = set(range(job.sampling.n))
        for count, steps in enumerate(rounds):
            await self._wait(count)
            if self.aborted.is_set():
                yield [
                    _merged(waiting.get(index), Step(index, [], "", finish_reason="abort"))
                    for index in sorted(open_choices)
                ]
                return
            for step in steps:
                waiting[step.index] = _merged(waiting.get(step.index), step)
                if step.finish_reason is not None:
                    open_choices.discard(step.index)
            ready = [
                index
                for index, step in waiting.items()
                if count == 0 or step.finish_reason is not None or len(step.token_ids) >= interval
            ]
            if ready:
                yield [waiting.pop(index) for index in sorted(ready)]

    async def _wait(self, count: int) -> None:
        if self.job.itl_s and count:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.aborted.wait(), self.job.itl_s)
        elif count % _BREATH == _BREATH - 1:
            await asyncio.sleep(0)

    def _load(self) -> bool:
        """Get the prompt's KV, from the connector or by computing; say whether it is another prompt's."""
        core, job = self._core, self.job
        self.cached, self.newly_cached = core.cached_tokens(job)
        params = job.kv_params or {}
        wrong = False
        if core.settings.nixl and params.get("do_remote_prefill"):
            try:
                push = core.settings.kv == "nixl-push"
                places = _places(job)
                core.store.fetch(
                    params, job.prompt_ids, engine_id=core.engine_id, media=places, reader=job.id, push=push
                )
            except BadHandover as error:
                core.dead = error.kills and core.settings.die_of_bad_kv
                if error.kills:
                    raise failed("The server had an error while processing your request.") from error
                if core.settings.strict_kv or error.violation.reason == "own_engine":
                    raise failed() from error
                wrong = True
            core.prompt_tokens["external_kv_transfer"] += len(job.prompt_ids) - self.cached
            core.prompt_tokens["local_cache_hit"] += self.cached
            self.cached = params.get("remote_prefill_cached_tokens") or 0
        else:
            self._embed()
            core.prompt_tokens["local_compute"] += len(job.prompt_ids) - self.cached
            core.prompt_tokens["local_cache_hit"] += self.cached
        return wrong

    def _embed(self) -> None:
        """Get the embedding of each item: from where its descriptor says, or with this worker's own encoder.

        Raises:
            Refusal: 500, when there is neither a descriptor that leads anywhere nor an input.
        """
        core, media = self._core, self.job.media
        kind = core.settings.ec_connector
        params = {} if core.encoder or kind is None else self.job.ec_params or {}
        try:
            core.embedded += core.encodings.take(media, params, addressed=kind != "shared_storage")
        except BadEncoding as error:
            # Of a folder nobody knows what is missing in it, until the model looks for tensors that were not sent.
            core.dead = kind == "shared_storage" and error.violation.reason == "no_input"
            raise failed() from error

    def _announce(self) -> None:
        """Tell where the embeddings are that an encode worker made."""
        core = self._core
        kind, ended = core.settings.ec_connector, self._reasons != ["abort"]
        if not (core.encoder and self.job.media and kind and ended):
            return
        self.encodings = core.encodings.hold(self.job.media, host="127.0.0.1", port=core.port, addressed=kind == "nixl")

    def _hand_over(self) -> None:
        """Keep the blocks for a decode, if that was asked for and every choice ended by itself."""
        core, job = self._core, self.job
        asked = bool(job.kv_params and job.kv_params.get("do_remote_decode"))
        if not (asked and core.settings.nixl and job.sampling.n == 1 and self._reasons != ["abort"]):
            return
        self.handover = core.store.register(
            engine_id=core.engine_id,
            request_id=f"{job.id}-{secrets.token_hex(4)}",
            token_ids=job.prompt_ids,
            host="127.0.0.1",
            port=core.port,
            cached=self.cached,
            media=_places(job),
        )

    def _count(self, step: Step) -> None:
        self._core.generated += len(step.token_ids)
        if step.finish_reason is not None:
            self._reasons.append(step.finish_reason)
            self._core.finished[step.finish_reason] += 1


def _places(job: Job) -> list[tuple[str, int, int]]:
    return [item.place for item in job.media]


def _merged(before: Step | None, step: Step) -> Step:
    if before is None:
        return step
    logprobs = None if before.logprobs is None else before.logprobs + (step.logprobs or [])
    return Step(
        step.index,
        before.token_ids + step.token_ids,
        before.text + step.text,
        logprobs,
        step.finish_reason,
        step.stop_reason,
    )

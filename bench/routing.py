"""What a choice of a worker costs: ``python -m bench.routing``.

Each choice is made as a leg makes it: picked, weighed, counted while it is in flight, and reported as well. There are
always so many legs in flight, which end in the order in which they began. Where uncached tokens are counted, that is
done before. In a mixed pool half of the workers do not serve what legs need, a tenth of all is left out, and every
tenth leg has failed on another worker.

Requests are read a few at a time, and then chosen for one after the other. The first of these is not counted: it finds
its code outside of the processor's caches, which is what reading long prompts costs whatever is done next. Of several
rounds the fastest counts, as other work on the machine can only make one slower.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from coordinator.context import RequestContext
from coordinator.logs import log
from coordinator.routing.choice import pool_router
from coordinator.routing.members import Members
from coordinator.settings.pools import PolicyName, Pool
from envelope.formats import Format
from envelope.written import loads_rendered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from coordinator.routing.pool import PoolRouter
    from coordinator.routing.router import Worker

RATE = 5000  # choices a second, of which the share of a core is told
NEW = 50_000  # and of so many prompts none comes again
CONVERSATIONS = 8000  # more than legs in flight: each comes back when its last leg is over
LENGTHS = (64, 256, 1024, 4096, 32_768)  # of prompts, where that matters
NEEDS = "derender"
SHORT = 512  # uncached tokens that are too few for a prefill
AT_A_TIME = 16  # requests that are read, and then chosen for
# Of 5 digits each, as most ids of a prompt have: what render answers is cut out of this, so that no more than that is
# touched before a choice.
_TEXT = ",".join(map(str, range(10_000, 100_000))).encode()
_CHARACTERS = 6  # of an id, with the comma
_LONGER = 100  # tokens by which prompts differ: they end somewhere in their last block


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    policy: str
    workers: int
    prompt_tokens: int
    max_inflight: int = 0
    counts_uncached: bool = False
    mixed: bool = False
    new: bool = False  # each prompt is one that was never seen

    def __str__(self) -> str:
        with_it = [" with `max_inflight`"] * bool(self.max_inflight)
        with_it += [" with `min_uncached_tokens`"] * self.counts_uncached
        with_it += [", mixed pool"] * self.mixed + [", new prompts"] * self.new
        return "".join((f"`{self.policy}`", *with_it))


def requests(numbers: Iterable[int], case: Case) -> list[RequestContext]:
    """Return requests of some conversations, as they are when render has just answered."""
    found, prompt_tokens = [], case.prompt_tokens
    for number in numbers:
        at = number % (NEW if case.new else CONVERSATIONS)
        text = _TEXT[at * _CHARACTERS : (at + prompt_tokens + at % _LONGER) * _CHARACTERS - 1]
        rendered = loads_rendered(b'{"token_ids":[%b],"model":"m"}' % text)
        found.append(RequestContext("r", "r-1", Format.CHAT, {"model": "m"}, (), {}, True, rendered=rendered))
    return found


class Legs:
    """So many legs that are under way, the oldest of which ends when one begins."""

    def __init__(self, router: PoolRouter, most: int, case: Case) -> None:
        self._router = router
        self._most = most
        self._needs = NEEDS if case.mixed else ""
        self._counts = case.counts_uncached
        self._begun = 0
        self._open: deque[tuple[Worker, int]] = deque()

    def begin(self, ctx: RequestContext) -> None:
        router = self._router
        self._begun += 1
        failed = [self._open[-1][0]] if self._needs and self._open and not self._begun % 10 else ()
        if self._counts:
            router.uncached_tokens(ctx, SHORT)
        worker = router.pick(ctx, failed, self._needs)
        assert worker is not None
        tokens = router.sending(ctx, worker)
        worker.begin(tokens)
        self._open.append((worker, tokens))
        if len(self._open) > self._most:
            done, weight = self._open.popleft()
            done.end(weight)
            router.report(done, None)


def microseconds(case: Case, choices: int, in_flight: int, rounds: int, known: int = CONVERSATIONS) -> float:
    """Return what one choice costs of a processor's time, with all that it has in its wake, in the best round.

    Args:
        known: choices that are made before.
    """
    legs, spent = Legs(made(case), in_flight, case), []
    for number in range(-known, choices * rounds, AT_A_TIME):
        first, *contexts = requests(range(number - 1, number + AT_A_TIME), case)
        legs.begin(first)
        begun = time.thread_time_ns()
        for ctx in contexts:
            legs.begin(ctx)
        spent.append(time.thread_time_ns() - begun)
    at_once = choices // AT_A_TIME
    measured = spent[-at_once * rounds :]
    best = min(sum(measured[at : at + at_once]) for at in range(0, len(measured), at_once))
    return best / (at_once * AT_A_TIME) / 1000


def made(case: Case) -> PoolRouter:
    urls = [f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(case.workers)]
    pool = Pool.model_validate({"endpoints": urls, "policy": case.policy, "max_inflight": case.max_inflight})
    router = pool_router("decode", pool, Members(urls), None, counts_uncached=case.counts_uncached)
    if case.mixed:
        assert router.health is not None
        for number, worker in enumerate(router.known()):
            router.learn(worker, {NEEDS: "it is too old"} if number < case.workers // 2 else {})
            for _ in range(0 if number % 10 else 2):
                router.health.probed(worker, "503")
    return router


def cases(workers: int) -> Iterator[Case]:
    for policy in get_args(PolicyName):
        for prompt_tokens in LENGTHS if policy == "prefix_affinity" else (1024,):
            yield Case(policy, workers, prompt_tokens)
        yield Case(policy, workers, 1024, mixed=True)
    for prompt_tokens in (1024, 32_768):
        yield Case("prefix_affinity", workers, prompt_tokens, counts_uncached=True)
    for prompt_tokens in (1024, 32_768):
        yield Case("prefix_affinity", workers, prompt_tokens, new=True)
    yield Case("least_inflight", workers, 1024, max_inflight=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--choices", type=int, default=800, help="of each round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--in-flight", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    log.setLevel(logging.ERROR)  # of workers that are left out, as some are to be
    print(f"{args.workers} workers, {args.in_flight} legs in flight, best of {args.rounds} rounds of {args.choices}")
    print("| policy | prompt tokens | us per choice | of a core at 5,000/s |")
    print("| :-- | --: | --: | --: |")
    for case in cases(args.workers):
        cost = microseconds(case, args.choices, args.in_flight, args.rounds)
        print(f"| {case} | {case.prompt_tokens} | {cost:.1f} | {cost * RATE / 1e6:.1%} |", flush=True)


if __name__ == "__main__":
    main()

"""What a choice of a worker costs: ``python -m bench.routing``.

Each choice is made as a leg makes it: picked, weighed, counted while it is in flight, and reported as well. There are
always so many legs in flight, which end in the order in which they began.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from coordinator.context import RequestContext
from coordinator.pools import PolicyName, Pool
from coordinator.routing.choice import pool_router
from coordinator.routing.members import Members
from envelope.formats import Format
from envelope.json_codec import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.routing.pool import PoolRouter
    from coordinator.routing.router import Worker

RATE = 5000  # choices a second, of which the share of a core is told
CONVERSATIONS = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    policy: str
    workers: int
    prompt_tokens: int
    max_inflight: int = 0


def prompts(prompt_tokens: int) -> list[bytes]:
    """Return the bodies that render answers for so many conversations, as they come off the wire."""
    return [dumps({"token_ids": list(range(at, at + prompt_tokens)), "model": "m"}) for at in range(CONVERSATIONS)]


def context(raw: bytes) -> RequestContext:
    return RequestContext("r", "r-1", Format.CHAT, {"model": "m"}, (), {}, True, rendered=loads(raw))


def microseconds(case: Case, choices: int, in_flight: int) -> float:
    """Return what one choice costs of a processor's time, with all that it has in its wake.

    The tokens have just been parsed, as they have in a request; that is not counted, nor is looking at the clock.
    """
    router = made(case)
    bodies = prompts(case.prompt_tokens)
    open_legs: deque[tuple[Worker, int]] = deque()
    spent = 0
    for number in range(choices):
        ctx = context(bodies[number % CONVERSATIONS])
        begun = time.thread_time_ns()
        worker = router.pick(ctx)
        assert worker is not None
        tokens = router.sending(ctx, worker)
        worker.begin(tokens)
        open_legs.append((worker, tokens))
        if len(open_legs) > in_flight:
            done, weight = open_legs.popleft()
            done.end(weight)
            router.report(done, None)
        if number >= in_flight:
            spent += time.thread_time_ns() - begun
    return spent / (choices - in_flight) / 1000 - clock_microseconds()


def clock_microseconds() -> float:
    """Return what it costs to look at the clock twice."""
    looks = range(20_000)
    return sum(-(time.thread_time_ns() - time.thread_time_ns()) for _ in looks) / len(looks) / 1000


def made(case: Case) -> PoolRouter:
    urls = [f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(case.workers)]
    pool = Pool.model_validate({"endpoints": urls, "policy": case.policy, "max_inflight": case.max_inflight})
    return pool_router("decode", pool, Members(urls), None)


def cases(workers: int) -> Iterator[Case]:
    for policy in get_args(PolicyName):
        for prompt_tokens in (256, 1024, 4096) if policy == "prefix_affinity" else (1024,):
            yield Case(policy, workers, prompt_tokens)
    yield Case("least_inflight", workers, 1024, max_inflight=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--choices", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    print(f"{args.workers} workers, {args.in_flight} legs in flight, {args.choices} choices of each")
    print("| policy | prompt tokens | max_inflight | us per choice | of a core at 5,000/s |")
    print("| :-- | --: | --: | --: | --: |")
    for case in cases(args.workers):
        cost, limit = microseconds(case, args.choices, args.in_flight), case.max_inflight or "-"
        share = cost * RATE / 1e6
        print(f"| {case.policy} | {case.prompt_tokens} | {limit} | {cost:.1f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()

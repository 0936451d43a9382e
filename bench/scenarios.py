"""What is measured: the loads, who is put under each, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Not a proxy: the load goes to the decode worker, which shows what worker and generator alone make of it.
DIRECT = "direct"

COORDINATOR = "coordinator"
COORDINATOR_INFO = "coordinator, log info"
COORDINATOR_2 = "coordinator, 2 processes"
TOKENS_IN = "coordinator tokens-in"
TOKENS_IN_INFO = "coordinator tokens-in, log info"
PEERS = ("nginx", "vllm-router", "sglang-router", "smg", "xpyd-proxy")

# On each long body: what the least work with JSON costs.
ORJSON = "orjson loads + dumps"


@dataclass(frozen=True)
class Scenario:
    """One load.

    Attributes:
        proxies: who is put under it, in the order of the first round.
        marks: chunks of one stream between which the proxy's CPU time is counted: pairs of begin and end. Whole
            streams also hold what each request costs, so a chunk's price is taken from their middle. Its memory is
            read there as well.
        rounds: in how many of them it is run; None is all.
    """

    name: str
    mode: Literal["unary", "stream", "burst"]
    proxies: tuple[str, ...]
    connections: int
    requests: int
    tokens: int
    pace_us: int = 0
    prompt_bytes: int = 600
    marks: tuple[int, ...] = ()
    rounds: int | None = None

    def args(self, port: int, watch: int | None) -> list[str]:
        """Return the generator's arguments.

        Args:
            watch: leader of the proxy's session.
        """
        words = [self.mode, "--port", str(port), "--tokens", str(self.tokens), "--pace-us", str(self.pace_us)]
        words += ["--connections", str(self.connections), "--requests", str(self.requests)]
        words += ["--prompt-bytes", str(self.prompt_bytes), "--warm", str(self.warm)]
        if watch is not None:
            words += ["--watch", str(watch), "--marks", ",".join(str(mark * self.connections) for mark in self.marks)]
        return words

    @property
    def warm(self) -> int:
        """How many requests come before those that count: they open the proxy's own connections."""
        return min(max(self.requests // 4, self.connections), 64)


@dataclass(frozen=True)
class Plan:
    """A whole run.

    Attributes:
        rounds: of everything but ``idle``.
        idle: numbers of streams that are held open, and in how many of the rounds.
    """

    scenarios: tuple[Scenario, ...]
    rounds: int
    idle: tuple[tuple[int, int], ...]
    proxies: tuple[str, ...] = (COORDINATOR, TOKENS_IN, *PEERS)


EVERYBODY = (COORDINATOR, TOKENS_IN, *PEERS)

FULL = Plan(
    scenarios=(
        Scenario(
            "chunk",
            "stream",
            (DIRECT, *EVERYBODY),
            connections=64,
            requests=64,
            tokens=200,
            pace_us=10_000,
            marks=(20, 180),
        ),
        Scenario(
            "unary",
            "unary",
            (*EVERYBODY, COORDINATOR_INFO, TOKENS_IN_INFO),
            connections=32,
            requests=800,
            tokens=50,
        ),
        Scenario("workers", "unary", (COORDINATOR, COORDINATOR_2), connections=64, requests=3_000, tokens=50),
        Scenario("burst", "burst", (DIRECT, *EVERYBODY), connections=64, requests=192, tokens=10, pace_us=10_000),
        Scenario(
            "streams",
            "stream",
            (COORDINATOR, TOKENS_IN),
            connections=1_000,
            requests=1_000,
            tokens=200,
            pace_us=50_000,
            marks=(20, 180),
            rounds=1,
        ),
        Scenario("prompt-64k", "unary", EVERYBODY, connections=8, requests=160, tokens=50, prompt_bytes=65_536),
        Scenario("prompt-1m", "unary", EVERYBODY, connections=2, requests=32, tokens=50, prompt_bytes=1_000_000),
        Scenario(
            "long",
            "stream",
            (COORDINATOR, TOKENS_IN, "nginx", "vllm-router"),
            connections=4,
            requests=4,
            tokens=9_200,
            pace_us=500,
            marks=(100, 900, 8_000, 8_800),  # all four run on behind the last one
        ),
    ),
    rounds=5,
    idle=((1_000, 3), (5_000, 1)),
)

# Enough to see that every part works; the numbers mean nothing.
SMOKE = Plan(
    scenarios=tuple(
        replace(
            scenario,
            proxies=tuple(name for name in scenario.proxies if name in (DIRECT, COORDINATOR, TOKENS_IN)),
            connections=2,
            requests=2,
            tokens=min(scenario.tokens, 24),
            pace_us=min(scenario.pace_us, 1_000),
            marks=(2, 10, 12, 20)[: len(scenario.marks)],
        )
        for scenario in FULL.scenarios
    ),
    rounds=1,
    idle=((4, 1),),
    proxies=(COORDINATOR, TOKENS_IN),
)

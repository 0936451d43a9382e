"""The workers of a pool, and one of them for each leg: by the policy, of those that are well and have room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.logs import log
from coordinator.routing.affinity import PrefixAffinity
from envelope.prompt import count_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.health import Health
    from coordinator.routing.load import LoadWatch
    from coordinator.routing.members import Members
    from coordinator.routing.policies import Policy, Usable
    from coordinator.routing.router import Worker
    from envelope.errors import ApiError

# What a leg weighs beside its prompt: its place in the worker's batch.
LEG_TOKENS = 256


class PoolRouter:
    """
    Args:
        members: the workers, which may change at any time.
        policy: how one of them is chosen.
        health: which of them may be; None is all.
        name: the policy's, for the log.
        max_inflight: legs that a worker is given at a time, 0 is no limit. ``admission`` lets no more requests in than
            there is room for, so a worker gets one more only where the others have failed.
        by_prompt: a leg weighs as much as the prompt is long; not so where legs carry parts of it.
        watch: keeps up to date what the policy goes by; the owner runs it.
    """

    def __init__(
        self,
        members: Members,
        policy: Policy,
        health: Health | None = None,
        *,
        name: str = "",
        max_inflight: int = 0,
        by_prompt: bool = True,
        watch: LoadWatch | None = None,
    ) -> None:
        self.members = members
        self.health = health
        self.policy = policy
        self._affinity = policy if isinstance(policy, PrefixAffinity) else None
        self.name = name
        self.watch = watch
        self._max_inflight = max_inflight
        self._by_prompt = by_prompt
        self._in_use: Sequence[Worker] | None = None
        self._lacking: frozenset[str] = frozenset()  # what some of the workers do not serve
        self._beside: dict[str, Policy] = {}  # for each of these: the choice among those that do
        self._chose = policy

    def serves(self, ctx: RequestContext) -> bool:
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = (), needs: str = "") -> Worker | None:
        self._follow()
        self._chose = policy = self._among(needs) if needs in self._lacking else self.policy
        again = bool(tried)
        worker = policy.choose(ctx, self._usable(tried, self._max_inflight), again=again)
        if worker is None and self._max_inflight:
            worker = policy.choose(ctx, self._usable(tried, 0), again=again)
        if worker is None:
            return None
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s is picked %s", worker.url, self.why(ctx, worker), extra={"fields": {"leg_id": ctx.leg_id}})
        return worker

    def why(self, ctx: RequestContext, worker: Worker) -> str:
        return f"by {self.name}: {self._chose.why(worker)}" if len(self.members.workers) > 1 else "the only worker"

    def uncached_tokens(self, ctx: RequestContext, most: int, tried: Sequence[Worker] = ()) -> int | None:
        if self._affinity is None:
            return None
        self._follow()
        return self._affinity.uncached_tokens(ctx, most, self._usable(tried, self._max_inflight))

    def sending(self, ctx: RequestContext, worker: Worker) -> int:
        if self.health is not None and worker in self.health.on_trial:
            self.health.tries(worker)
        if self._affinity is not None:
            self._affinity.remember(ctx, worker)
        if not self.policy.weighs:
            return 0
        if not self._by_prompt:
            return LEG_TOKENS
        if ctx.prompt_tokens is None:
            ctx.prompt_tokens = count_tokens(ctx.api, ctx.body, ctx.rendered)
        return LEG_TOKENS + ctx.prompt_tokens

    def report(self, worker: Worker, error: ApiError | None) -> None:
        if self.health is not None and (error is not None or worker.failures):
            self.health.report(worker, error)

    def learn(self, worker: Worker, lacks: Mapping[str, str]) -> None:
        """Take in what a worker does not serve: it gets no legs that need it."""
        if worker.lacks != lacks:
            worker.lacks = lacks
            self._gather_lacks()

    def _gather_lacks(self) -> None:
        self._lacking = frozenset(need for each in self.members.workers for need in each.lacks)
        self._in_use = None

    def why_none(self, needs: str) -> str | None:
        lacking = [why for worker in self.members.workers if (why := worker.lacks.get(needs)) is not None]
        return lacking[0] if lacking and len(lacking) == len(self.members.workers) else None

    def take_over(self, before: PoolRouter) -> None:
        """Go on with what is known of workers that both have: their load, their failures, and what they were sent."""
        if not self.members.take_over(before.members):
            return
        self._gather_lacks()
        if self.health is not None and before.health is not None:
            self.health.take_over(before.health)
        if isinstance(self.policy, PrefixAffinity) and isinstance(before.policy, PrefixAffinity):
            self.policy.take_over(before.policy)
            self._beside.clear()

    def known(self) -> tuple[Worker, ...]:
        return self.members.workers

    def at(self, ctx: RequestContext) -> Mapping[str, Worker]:
        return self.members.by_origin

    def places(self, limit: int) -> int:
        """Return how many legs the workers together may have, if each may have so many.

        Who is left out, leaves, or is on trial adds the legs that it still has, which hold their places, and no more.
        """
        workers, leaving = self.members.workers, self.members.leaving
        used = workers if self.health is None else self.health.used()
        on_trial = () if self.health is None else self.health.on_trial
        if used is workers and not (leaving or on_trial):
            return limit * len(workers)
        # Where no other is left, there is nobody to wait for, and ``pick`` says what becomes of the leg.
        full = {worker for worker in used if worker not in on_trial} or set(used or workers)
        others = sum(worker.in_flight for worker in {*workers, *leaving} - full)
        return limit * len(full) + others

    def _follow(self) -> None:
        """Let the policy choose among the workers of now."""
        used = self.members.workers if self.health is None else self.health.used()
        if used is not self._in_use:
            self._in_use = used
            self.policy.use(used)
            for needs, policy in self._beside.items():
                policy.use(self._serving(needs))

    def _among(self, needs: str) -> Policy:
        """Return what chooses among the workers that serve what others do not: nobody passes over half of a pool."""
        if (policy := self._beside.get(needs)) is None:
            policy = self._beside[needs] = self.policy.beside()
            policy.use(self._serving(needs))
        return policy

    def _serving(self, needs: str) -> Sequence[Worker]:
        """Return the workers in use that serve this; nobody where all do, as then nobody asks."""
        return [w for w in self._in_use or () if needs not in w.lacks] if needs in self._lacking else ()

    def _usable(self, tried: Sequence[Worker], max_inflight: int) -> Usable:
        health = self.health
        on_trial = health.on_trial if health is not None else ()
        if not (tried or max_inflight or on_trial):
            return None

        def usable(worker: Worker) -> bool:
            return (
                worker not in tried
                and (not max_inflight or worker.in_flight < max_inflight)
                and (worker not in on_trial or health is None or health.may_try(worker))
            )

        return usable

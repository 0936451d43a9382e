"""What a pool's section of the file says of choosing a worker, made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from coordinator.routing.affinity import PrefixAffinity
from coordinator.routing.blocks import marks
from coordinator.routing.health import Health, HealthLimits
from coordinator.routing.load import Asking, LoadWatch, Reports
from coordinator.routing.policies import LeastLoaded, PowerOfTwo, Random, RoundRobin
from coordinator.routing.pool import PoolRouter

if TYPE_CHECKING:
    import ssl

    from coordinator.routing.members import Members
    from coordinator.routing.policies import Policy
    from coordinator.settings.pools import HealthParams, Pool


def pool_router(
    role: str, pool: Pool, members: Members, tls: ssl.SSLContext | None, *, counts_uncached: bool = False
) -> PoolRouter:
    """Return the router of a pool.

    Args:
        members: its workers, however they are found.
        counts_uncached: somebody asks how many tokens of a prompt a worker was not sent before.
    """
    watch = None
    if pool.policy == "load_aware":
        policy, watch = _load_aware(pool, members, tls)
    else:
        policy = _policy(pool, members, counts_uncached)
    return PoolRouter(
        members,
        policy,
        Health(role, members, _limits(pool.health), time.monotonic),
        name=pool.policy,
        max_inflight=pool.max_inflight,
        by_prompt=role != "encode",
        watch=watch,
    )


def _policy(pool: Pool, members: Members, counts_uncached: bool) -> Policy:
    params = pool.policy_params
    match pool.policy:
        case "random":
            return Random()
        case "power_of_two":
            return PowerOfTwo()
        case "least_inflight":
            return LeastLoaded(members.load)
        case "prefix_affinity":
            where = marks(params.block_tokens, counts_uncached)
            return PrefixAffinity(members.load, where, params.remembered_blocks, params.max_load, params.free_tokens)
        case _:
            return RoundRobin()


def _load_aware(pool: Pool, members: Members, tls: ssl.SSLContext | None) -> tuple[Policy, LoadWatch]:
    params, reports = pool.policy_params, Reports()
    policy = LeastLoaded(members.load, reports.pressure, reports.told)
    asking = Asking(params.scrape_interval, params.scrape_timeout, params.stale_after, tls)
    return policy, LoadWatch(reports, lambda: members.workers, members.load.changed, asking)


def _limits(params: HealthParams) -> HealthLimits:
    return HealthLimits(params.failures, params.ejection_time, params.max_ejection_time, params.panic_threshold / 100)

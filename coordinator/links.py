"""How each role's workers are reached: by a pool, through the gateway, or at the address that a step gives.

With it come who looks the workers up, and what a request takes a place of at them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from coordinator.background import Background
from coordinator.headers import CREDENTIALS
from coordinator.routing.choice import pool_router
from coordinator.routing.discovery import Finder
from coordinator.routing.gateway import GatewayRouter
from coordinator.routing.header import HeaderRouter
from coordinator.routing.members import Members
from coordinator.routing.policies import RoundRobin
from coordinator.routing.pool import PoolRouter
from coordinator.settings.problems import Path, show_path
from coordinator.settings.rules import ROLES
from coordinator.upstream import RoleLink
from envelope.errors import NoWorker
from steps.derender import Derender
from steps.prefill import Prefill
from steps.prefill_decode import PrefillDecode
from steps.render import Render

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from coordinator.admission import Place
    from coordinator.background import Faults
    from coordinator.config import Config
    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.plan import Plan
    from coordinator.routing.discovery import Source
    from coordinator.routing.health import Health
    from coordinator.routing.router import Router
    from coordinator.security.credentials import Closed, Credentials
    from coordinator.settings.outbound import Outbound
    from coordinator.settings.pools import Pool
    from coordinator.step import Step


def links(config: Config, steps: Sequence[Step], credentials: Credentials | Closed) -> dict[str, RoleLink]:
    """Return how each role that the steps use is reached."""
    found: dict[str, RoleLink] = {}
    counts = any(isinstance(step, (Prefill, PrefillDecode)) and step.params.min_uncached_tokens for step in steps)
    for role in (*ROLES, "render"):
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None:
            at: Path = ("pools", role)
            headers, tls = credentials.headers(pool, at), credentials.verification(pool, at)
            found[role] = RoleLink(
                _pool_router(config, role, pool, headers, tls, counts_uncached=role == "decode" and counts),
                pool.max_idle_conns_per_host,
                pool.idle_conn_timeout,
                tls=tls,
                our_key=_our_key(config, pool, at),
            )
        elif config.gateway is not None and role in ROLES:
            gateway, at = config.gateway, ("gateway",)
            found[role] = RoleLink(
                GatewayRouter(gateway.address, credentials.headers(gateway, at, (gateway.profile_header, role))),
                gateway.max_idle_conns_per_host,
                gateway.idle_conn_timeout,
                gateway.timeout or None,
                tls=credentials.verification(gateway, at),
                our_key=_our_key(config, gateway, at),
            )
    if "prefill" in found and "decode" in found and isinstance(found["prefill"].router, HeaderRouter):
        found["prefill"].router.other = found["decode"].router
    for index, step in enumerate(steps):
        address = step.params.address if isinstance(step, (Render, Derender)) else None
        if isinstance(step, (Render, Derender)) and address is not None and step.role is not None:
            params, at = step.params, ("pipeline", "steps", index, "params")
            found[step.role] = RoleLink(
                PoolRouter(Members((address,), credentials.headers(params, at)), RoundRobin()),
                params.max_idle_conns_per_host,
                params.idle_conn_timeout,
                tls=credentials.verification(params, at),
                our_key=_our_key(config, params, at),
            )
    return found


def _pool_router(
    config: Config,
    role: str,
    pool: Pool,
    headers: Sequence[tuple[str, str]],
    tls: ssl.SSLContext | None,
    *,
    counts_uncached: bool,
) -> PoolRouter | HeaderRouter:
    if pool.header is None:
        return pool_router(role, pool, Members(pool.endpoints or (), headers), tls, counts_uncached=counts_uncached)
    assert pool.allow is not None
    if pool is config.pools.encode:
        return HeaderRouter(pool.header, pool.allow, spread=True, headers=headers)
    return HeaderRouter(pool.header, pool.allow, required=pool is config.pools.decode, headers=headers)


def _our_key(config: Config, of: Outbound, at: Path) -> str | None:
    """Return the name of the key that these servers get from us; None where they get the client's own."""
    ours = of.api_key is not None or not config.server.forwards_authorization
    return show_path((*at, "api_key")) if ours else None


def discarded(config: Config) -> list[str]:
    """Return the names of headers that go no further than here when a client sends them."""
    known_here = () if config.server.forwards_authorization else CREDENTIALS
    return [*config.pipeline.forward_response_headers, *known_here]


def routing_headers(config: Config) -> list[str]:
    pools = (config.pools.encode, config.pools.prefill, config.pools.decode)
    return [pool.header for pool in pools if pool and pool.header]


def finders(
    config: Config, links: Mapping[str, RoleLink], metrics: Metrics, before: Plan | None = None
) -> dict[str, Finder]:
    """Return who looks up the workers of each role that has them looked up.

    Where the plan before looks them up alike, those that it knows are there from the start: a file may be changed while
    nothing can be looked up.
    """
    found: dict[str, Finder] = {}
    for role, link in links.items():
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None and pool.lookup is not None and isinstance(link.router, PoolRouter):
            earlier: Pool | None = getattr(before.config.pools, role) if before is not None else None
            if before is not None and earlier is not None and earlier.lookup == pool.lookup:
                link.router.members.replace([worker.url for worker in before.upstream.links[role].router.known()])
            keep_s = pool.lookup.keep or None
            found[role] = Finder(role, link.router.members, _source(pool), keep_s, metrics, time.monotonic)
    return found


def _source(pool: Pool) -> Source:
    # Each needs a package of its own, which is an extra, and takes a moment to import.
    if pool.dns is not None:
        from coordinator.routing.dns import DnsSource

        return DnsSource(pool.dns)
    from coordinator.routing.kubernetes import KubernetesSource

    assert pool.kubernetes is not None
    return KubernetesSource(pool.kubernetes)


def places(config: Config, links: Mapping[str, RoleLink]) -> dict[str, Place]:
    """Return what a request takes a place of at each role whose pool has a limit: the pool, or the worker it names.

    A decode pool whose workers are looked up has a place too, which only says whether there are any.
    """
    found: dict[str, Place] = {}
    for role, link in links.items():
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None and (pool.max_inflight or (pool.lookup is not None and role == "decode")):
            found[role] = _place(role, link.router, pool.max_inflight)
    return found


def _place(role: str, router: Router, limit: int) -> Place:
    def of(ctx: RequestContext) -> tuple[str, Callable[[], int]] | None:
        if isinstance(router, PoolRouter) and router.known():
            return (role, partial(router.places, limit)) if limit else None
        if role == "decode" and isinstance(router, PoolRouter):
            # Told here and not at its leg: by then the prompt would have been computed for nobody.
            raise NoWorker(role, f"there is no {role} worker", headers={"Retry-After": "1"})
        worker = router.pick(ctx) if router.serves(ctx) else None
        return None if worker is None else (f"{role} {worker.url}", lambda: limit)

    return of


def healths(links: Mapping[str, RoleLink]) -> dict[str, Health]:
    """Return what is known of the workers of each pool."""
    routers = ((role, link.router) for role, link in links.items())
    return {role: router.health for role, router in routers if isinstance(router, PoolRouter) and router.health}


def watches(links: Mapping[str, RoleLink], faults: Faults) -> list[Background]:
    """Return what keeps up to date what policies go by."""
    routers = (link.router for link in links.values() if isinstance(link.router, PoolRouter))
    return [Background("load", partial(router.watch.run, faults)) for router in routers if router.watch is not None]

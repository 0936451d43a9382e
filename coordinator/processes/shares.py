"""One process's share of a configuration: limits that hold for all processes together are divided among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.settings.pools import Pool

if TYPE_CHECKING:
    from coordinator.config import Config


def share(config: Config, index: int) -> Config:
    """Return the configuration of one of ``server.workers`` processes.

    Where a limit is no multiple of their number, the first ones have one more. ``rules`` sees to it that nobody's
    share of a limit is 0, which would be no limit.
    """
    count, server = config.server.workers, config.server
    own = {"max_concurrency": _part(server.max_concurrency, count, index)}
    own["queue_size"] = _part(server.queue_size, count, index)
    pools = {
        role: pool.model_copy(update={"max_inflight": _part(pool.max_inflight, count, index)})
        for role, pool in config.pools
        if isinstance(pool, Pool)
    }
    return config.model_copy(
        update={"server": server.model_copy(update=own), "pools": config.pools.model_copy(update=pools)}
    )


def _part(whole: int, count: int, index: int) -> int:
    return whole // count + (index < whole % count)

"""Another file takes the place of the one that is running: as a whole, or not at all.

The new plan is made and has asked its workers once before a request meets it, so nobody waits for it. Requests that
are under way go on with the plan they began with. What belongs to the listener can only be changed by a restart; a
file that changes any of it is refused, and the keys are named.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from coordinator.logs import LEVELS, log, set_up
from coordinator.security.credentials import Credentials
from coordinator.security.watch import mark
from coordinator.settings.problems import ConfigError, Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.app import App
    from coordinator.config import Config

# Of ``server``: what the listener was made with.
AT_START = (
    *("listen_addr", "workers", "huge_pages", "metrics_port", "status_page", "max_header_size", "proxied_routes"),
    *("read_header_timeout", "idle_timeout", "write_stall_timeout"),
    *("secure_serving", "cert_path", "tls_min_version", "tls_cipher_suites", "metrics_cert_dir"),
)

FAULT = "a fault of the coordinator; its log has the details"

# A worker that does not answer is waited for so long (``health``), and a little longer.
_ASKED_WITHIN_S = 5.0
_LOOK_EVERY_S = 5.0


def check(old: Config, new: Config) -> None:
    """
    Raises:
        ConfigError: the new configuration changes what only a restart can change.
    """
    changed: list[Path] = [("server", key) for key in AT_START if getattr(old.server, key) != getattr(new.server, key)]
    if old.tracing != new.tracing:
        changed.append(("tracing",))
    if changed:
        sentence = "changing it takes a restart; put it back, or restart with this file"
        raise ConfigError([new.sources.problem(path, sentence) for path in changed])


class Reloader:
    """Applies what the file holds now, each time it is asked to.

    Args:
        read: reads and validates the file, with the environment's overrides.

    Attributes:
        problems: why the file that was read last was refused; empty when it is the one that runs.
    """

    def __init__(self, app: App, read: Callable[[], Config]) -> None:
        self._app = app
        self._read = read
        self._asked = asyncio.Event()
        self.problems: list[str] = []

    def ask(self) -> None:
        """Apply the file soon; being asked again meanwhile means once more."""
        self._asked.set()

    async def run(self) -> None:
        """Do as asked, for ever; the owner cancels."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.reload()

    async def reload(self) -> str:
        """Read the file and apply it; return what became of it: ``applied``, ``unchanged`` or ``refused``."""
        result = await self._reload()
        self._app.metrics.config_reloads.labels(result).inc()
        return result

    async def _reload(self) -> str:
        try:
            config = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self.problems = error.problems
        except Exception:  # as in ``attempt``
            log.exception("reading the configuration again failed by a fault of the coordinator")
            self.problems = [FAULT]
        else:
            if config == self._app.front.plan.config:
                log.info("the configuration has not changed")
                self.problems = []
                return "unchanged"
            await self.attempt(config)
        for problem in self.problems:
            log.error("the configuration was not reloaded, and what ran before goes on: %s", problem)
        return "refused" if self.problems else "applied"

    async def attempt(self, config: Config) -> list[str]:
        """Put a configuration in place; return why not, or nothing, if it is."""
        try:
            await self._apply(config)
            self.problems = []
        except ConfigError as error:
            self.problems = error.problems
        except Exception:  # whatever is wrong with a new file, or with us: those who are served are not to pay for it
            log.exception("applying the configuration failed by a fault of the coordinator")
            self.problems = [FAULT]
        return self.problems

    async def _apply(self, config: Config) -> None:
        """
        Raises:
            ConfigError: it cannot be applied; nothing has been changed.
        """
        before = self._app.front.plan
        check(before.config, config)
        new = self._app.plan_of(config, Credentials(os.environ, config.sources), before)
        await self._app.plans.replace(new, _ASKED_WITHIN_S)
        if (config.log_level, config.log_format) != (before.config.log_level, before.config.log_format):
            set_up(LEVELS[config.log_level], config.log_format)
        log.info("the configuration was reloaded", extra={"fields": {"in_flight_on_the_old_one": before.in_use}})


class FileWatch:
    """Says whether a file has changed since it was asked the last time; a mounted ConfigMap is swapped silently."""

    def __init__(self, path: str) -> None:
        self._files = (path,)
        self._seen = mark(self._files)

    def changed(self) -> bool:
        seen, self._seen = self._seen, mark(self._files)
        return seen != self._seen

    async def run(self, changed: Callable[[], None]) -> None:
        """Look every few seconds, for ever; the owner cancels."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if await asyncio.to_thread(self.changed):
                changed()

"""A changed file, applied in every process or in none.

The supervisor reads it and makes of it what can be made without serving. Then one process applies it, which finds out
what only a process that serves can. When that has gone well the others follow; each goes on with what it has until
then. A process that fails where the first one did not is replaced by a new one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from coordinator.app import build
from coordinator.config import load
from coordinator.logs import LEVELS, log, set_up
from coordinator.reload import FAULT, check
from coordinator.settings.problems import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.config import Config
    from coordinator.processes.crew import Crew, Process


class Rollout:
    """
    Args:
        share: returns a process's share of a configuration.

    Attributes:
        config: the one that runs.
    """

    def __init__(self, crew: Crew, config: Config, path: str, share: Callable[[Config, int], Config]) -> None:
        self.config = config
        self._crew = crew
        self._path = path
        self._share = share
        self._trial: tuple[Config, Process] | None = None
        self._again = False

    def ask(self) -> None:
        """Begin to apply the file as it is now; while one is being tried, do so afterwards."""
        if self._trial is not None:
            self._again = True
            return
        try:
            config = load(self._path, os.environ)
            if config == self.config:
                log.info("the configuration has not changed")
                self._crew.tell_all("refused", [])
                self._crew.metrics.config_reloads.labels("unchanged").inc()
                return
            check(self.config, config)
            build(config)
        except ConfigError as error:
            self._refuse(error.problems)
        except Exception:  # as in ``reload``: those who are served are not to pay for it
            log.exception("reading the configuration again failed by a fault of the coordinator")
            self._refuse([FAULT])
        else:
            self._try(config)

    def follow(self) -> None:
        """Take in what has become of it."""
        if self._trial is not None:
            config, first = self._trial
            if first.reloaded is not None or first not in self._crew.processes:
                self._trial = None
                self._conclude(config, first)
        for process in self._crew.processes:
            problems, process.reloaded = process.reloaded, None
            if problems:  # only the first may refuse, and what it has to say has been taken in
                log.error("%s could not apply the configuration, and is replaced: %s", process, "; ".join(problems))
                self._crew.tell(process, "drain")
        if self._again and self._trial is None:
            self._again = False
            self.ask()

    def _try(self, config: Config) -> None:
        first = next((process for process in self._crew.processes if process.addresses), None)
        if first is None:  # nobody serves; whoever is started next has it
            self._accept(config, None)
            return
        self._trial = config, first
        self._crew.tell(first, "reload", self._share(config, first.index))

    def _conclude(self, config: Config, first: Process) -> None:
        problems, first.reloaded = first.reloaded, None
        if problems is None:
            problems = ["the process that was to apply it first has ended"]
        if problems:
            self._refuse(problems)
        else:
            self._accept(config, first)

    def _accept(self, config: Config, first: Process | None) -> None:
        self.config = config
        set_up(LEVELS[config.log_level], config.log_format)
        for process in self._crew.processes:
            if process is not first:
                self._crew.tell(process, "reload", self._share(config, process.index))
        self._crew.metrics.config_reloads.labels("applied").inc()

    def _refuse(self, problems: list[str]) -> None:
        for problem in problems:
            log.error("the configuration was not reloaded, and what ran before goes on: %s", problem)
        self._crew.tell_all("refused", problems)
        self._crew.metrics.config_reloads.labels("refused").inc()

"""Pools of parser processes as configurations hold them: what is wrong is told as the file's fault.

Two configurations with the same parsers, one taking the other's place, share one pool: nothing is loaded anew.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from coordinator.derender.pool import VLLM, ParserPool, ParserSettings, Unusable

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.background import Faults
    from coordinator.settings.problems import ConfigError

_NOT_INSTALLED = (
    "coordinator parses with vLLM's own parsers, and vllm is not installed here: pip install 'pd-coordinator[vllm]'"
)


class ParserPools:
    """Every pool that is made, by its settings; ``ended`` as theirs."""

    def __init__(self, faults: Faults, ended: Callable[[str], None], engine: str = VLLM) -> None:
        self._faults = faults
        self._engine = engine
        self._ended = ended
        self._pools: dict[ParserSettings, ParserPool] = {}

    def of(self, settings: ParserSettings) -> ParserPool:
        return self._pools.setdefault(settings, ParserPool(settings, self._faults, self._ended, self._engine))


class HeldParsers:
    """One configuration's hold on a pool.

    Args:
        fault: makes the error of a key's name, below the decode step's params, and a sentence.
    """

    def __init__(self, pool: ParserPool, fault: Callable[[str, str], ConfigError]) -> None:
        self.pool = pool
        self._fault = fault
        self._held = False

    def check(self) -> None:
        """
        Raises:
            ConfigError: vllm is not installed, or there is no such folder.
        """
        if self.pool.engine == VLLM and importlib.util.find_spec("vllm") is None:
            raise self._fault("derender", _NOT_INSTALLED)
        tokenizer = self.pool.settings.tokenizer
        if not os.path.isdir(tokenizer):
            raise self._fault("tokenizer", f"{tokenizer} is no folder here: write that of the model's tokenizer.json")

    async def start(self) -> None:
        """
        Raises:
            ConfigError: the tokenizer cannot be loaded, or vLLM has no such parser for it.
        """
        try:
            await self.pool.start()
        except Unusable as error:
            key, _, sentence = str(error).partition(": ")
            known = key in ("tokenizer", "tool_parser", "reasoning_parser")
            raise (self._fault(key, sentence) if known else self._fault("derender", str(error))) from None
        self._held = True

    async def release(self) -> None:
        if self._held:
            self._held = False
            await self.pool.release()

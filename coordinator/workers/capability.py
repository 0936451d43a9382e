"""What a worker can do, found out by requests that it refuses before any work.

A missing flag or an old version shall be named at the start, and not by the first request that fails. So each route
that vLLM serves only with a flag is sent an empty body, which a worker that serves it answers with a 400. Where the
worker is to make text of tokens, or tokens of text, one more question tells whether it can: streaming ``derender`` is
refused by every version that knows the mode, but only behind the check for a tokenizer. Versions that ignore the field,
and would answer, are told by ``/version`` and not asked.

Source: vLLM 0.33 ``scale_out/token_in_token_out/serving.py``, the order of its checks; 0.32 has no ``derender``.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import aiohttp

from envelope.formats import PATHS, Format
from envelope.generate import DERENDER, needs
from envelope.json_codec import JSONDecodeError, loads_lenient

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from coordinator.routing.router import Worker

PROBE_TIMEOUT_S = 3.0

GENERATE = PATHS[Format.GENERATE]
MODE_QUESTION = {
    "token_ids": [0],
    "sampling_params": {"max_tokens": 1},
    "output_mode": DERENDER,
    "stream": True,
}
_BY_OURSELVES = "output_mode: tokens and derender: coordinator"
_FIRST_WITH_MODES = (0, 32)
_VERSION = re.compile(r"(\d+)\.(\d+)")


class Unanswered(Exception):
    """A worker cannot be reached."""


class Asker:
    """Asks the workers of one role.

    Args:
        paths: routes that the pipeline needs, of those that need ``--enable-scale-out``.
        modes: output modes that it needs of the generate route.
        texts: routes whose requests or answers are text, so that the worker needs a tokenizer.
        our_key: what the configuration calls the key that these workers want of us; None where clients have one.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        paths: Sequence[str],
        modes: Sequence[str],
        texts: Sequence[str],
        tls: ssl.SSLContext | None,
        our_key: str | None,
    ) -> None:
        self._session = session
        self._paths = tuple(paths)
        self._modes = tuple(modes)
        self._texts = tuple(texts)
        self._tls = tls
        self._our_key = our_key

    async def lacks(self, worker: Worker) -> dict[str, str]:
        """Return what a worker cannot do: a route or a mode, and a sentence that says why and what helps.

        Raises:
            Unanswered
        """
        found: dict[str, str] = {}
        for path in self._paths:
            if fault := await self._route_fault(worker, path):
                found[path] = fault
        if GENERATE in found:
            return found | dict.fromkeys(self._modes, found[GENERATE])
        if self._modes or self._texts:
            found |= await self._lacking(worker)
        return found

    async def _route_fault(self, worker: Worker, path: str) -> str | None:
        status, _ = await self._post(worker, path, {})
        if status == 401 and self._our_key is not None:
            return f"{worker.url} answers 401 on {path}: {self._our_key} must be the key that it was started with"
        if status == 403:
            return f"{worker.url} answers 403 on {path}: start vllm serve with --enable-scale-out"
        if status in (404, 405):
            return f"{worker.url} has no {path}: is it the right server, and vllm serve with --enable-scale-out?"
        return None

    async def _lacking(self, worker: Worker) -> dict[str, str]:
        version = await self._version(worker)
        if version is None:
            return {}  # another server, or a build of one's own: its answers tell, by the echo
        if version < _FIRST_WITH_MODES:
            return {mode: _too_old(worker, version, mode) for mode in self._modes}
        status, said = await self._post(worker, GENERATE, MODE_QUESTION)
        if status != 400:
            return {}  # a full queue, or a key that only clients have
        if "requires a tokenizer" in said:
            by_ourselves = f", or write {_BY_OURSELVES}"
            needing = {mode: (f"output_mode {mode}", by_ourselves) for mode in self._modes}
            needing |= {path: (path, "") for path in self._texts}
            without = f"{worker.url} has no tokenizer, which {{}} needs: start it without --tokens-only{{}}"
            return {need: without.format(*what) for need, what in needing.items()}
        if "Input should be" in said and DERENDER in self._modes:
            return {DERENDER: _too_old(worker, version, DERENDER)}
        return {}

    async def _version(self, worker: Worker) -> tuple[int, int] | None:
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                self._session.get(f"{worker.url}/version", **manner(worker, self._tls)) as answer,
            ):
                body = loads_lenient(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(f"{worker.url} cannot be reached") from error
        except JSONDecodeError:
            return None
        return _release(body.get("version")) if isinstance(body, dict) else None

    async def _post(self, worker: Worker, path: str, body: Any) -> tuple[int, str]:
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                self._session.post(f"{worker.url}{path}", json=body, **manner(worker, self._tls)) as answer,
            ):
                return answer.status, (await answer.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(f"{worker.url} cannot be reached") from error


def manner(worker: Worker, tls: ssl.SSLContext | None) -> Any:
    """Return how a worker is asked anything: with its pool's key and authorities, and where it is alone."""
    return {"headers": worker.headers, "ssl": tls or True, "allow_redirects": False}


def _release(version: Any) -> tuple[int, int] | None:
    """Return a version's first two numbers; None where they tell nothing, as of a build without tags (0.1.dev1)."""
    told = _VERSION.match(str(version))
    if told is None:
        return None
    release = int(told[1]), int(told[2])
    return None if release < _FIRST_WITH_MODES and "dev" in str(version) else release


def _too_old(worker: Worker, version: tuple[int, int], mode: str) -> str:
    text_will_do = mode == DERENDER and version >= _FIRST_WITH_MODES
    instead = "output_mode: text" if text_will_do else _BY_OURSELVES
    release = f"{version[0]}.{version[1]}"
    return f"{worker.url} is vLLM {release}, without output_mode {mode}: run {needs(mode)}, or write {instead}"

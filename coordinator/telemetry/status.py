"""What the status page shows: the pipeline as the file has it, the workers and their load, and the last requests.

Each process tells of itself (``Status``), and ``together`` makes one view of what several have told. Nothing in it is a
prompt, an answer, a key or a client's address.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.http.server import text
from coordinator.planning import SERVED
from coordinator.routing.gateway import GatewayRouter
from coordinator.routing.pool import PoolRouter
from coordinator.telemetry.recent import KEPT
from coordinator.version import version
from envelope.formats import PATHS
from envelope.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from coordinator.app import App
    from coordinator.config import Config
    from coordinator.http.request import Request
    from coordinator.http.server import Handler
    from coordinator.plan import Plan
    from coordinator.reload import Reloader
    from coordinator.routing.router import Router, Worker

Told = dict[str, Any]
"""What one process tells of itself."""

_PAGE = Path(__file__).with_name("status.html")
# From the best state of a worker to the worst: of several processes, the one that thinks worst of it is shown.
_STATES = ("well", "leaving", "trial", "down", "ejected")


class Status:
    """What one process has to show.

    Args:
        file: where the configuration came from.
    """

    def __init__(self, app: App, reloader: Reloader, file: str) -> None:
        self._app = app
        self._reloader = reloader
        self._file = file
        self._version = version()
        self._began = time.time()

    def told(self) -> Told:
        front, plan = self._app.front, self._app.front.plan
        problems = ["shutting down"] if front.draining else plan.readiness.problems()
        return {
            "version": self._version,
            "process": {"pid": os.getpid(), "began": self._began, "in_flight": front.in_flight, "problems": problems},
            "config": {"file": self._file, "digest": digest(plan.config), "refused": list(self._reloader.problems)},
            "pipeline": _pipeline(plan),
            "pools": [_pool(role, link.router, plan.config) for role, link in plan.upstream.links.items()],
            "in_flight": front.in_flight,
            "queued": plan.admission.waiting,
            "outcomes": self._outcomes(),
            "requests": self._app.recent.shown(),
        }

    def _outcomes(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for family in self._app.metrics.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    found[sample.labels["outcome"]] += int(sample.value)
        return dict(found)


def digest(config: Config) -> str:
    """Return what tells two configurations apart, the environment's overrides included; keys are not part of it."""
    return hashlib.sha256(dumps(config.model_dump(mode="json"))).hexdigest()[:12]


def _pipeline(plan: Plan) -> list[Told]:
    return [
        {
            "api": str(api),
            "path": PATHS[api],
            "steps": [
                {
                    "step": row.step,
                    "role": row.role if row.path else None,
                    "format": None if row.format is None else str(row.format),
                    "path": row.path,
                    "notes": list(row.notes),
                }
                for row in (step.plan(api) for step in plan.pipeline.steps)
            ],
        }
        for api in SERVED
    ]


def _pool(role: str, router: Router, config: Config) -> Told:
    pool = getattr(config.pools, role, None)
    named_by = "the gateway" if isinstance(router, GatewayRouter) else "the pool"
    if pool is not None and pool.header:
        named_by = f"the request header {pool.header}"
    return {
        "role": role,
        "named_by": named_by,
        "policy": None if pool is None or pool.header else pool.policy,
        "max_inflight": None if pool is None else pool.max_inflight or None,
        "workers": [_worker(worker, router) for worker in router.known()],
    }


def _worker(worker: Worker, router: Router) -> Told:
    health = router.health if isinstance(router, PoolRouter) else None
    return {
        "url": worker.url,
        "in_flight": worker.in_flight,
        "state": None if health is None else health.state(worker),
    }


def together(told: Sequence[Told], processes: int) -> Told:
    """Return one view of what the processes told of themselves, of which there should be so many."""
    first = told[0]
    outcomes = sum((Counter(one["outcomes"]) for one in told), Counter[str]())
    requests = sorted((request for one in told for request in one["requests"]), key=lambda one: -one["at"])
    return {
        "version": first["version"],
        "at": time.time(),
        "config": {**first["config"], "differs": len({one["config"]["digest"] for one in told}) > 1},
        "processes": {"wanted": processes, "told": [one["process"] for one in told]},
        "problems": list(dict.fromkeys(problem for one in told for problem in one["process"]["problems"])),
        "pipeline": first["pipeline"],
        "pools": [{**pool, "workers": _workers(_of(pool["role"], told))} for pool in first["pools"]],
        "in_flight": sum(one["in_flight"] for one in told),
        "queued": sum(one["queued"] for one in told),
        "outcomes": dict(outcomes),
        "requests": requests[:KEPT],
    }


def _of(role: str, told: Sequence[Told]) -> list[Sequence[Told]]:
    """Return a role's workers as each process has them; while a file is rolled out, not all may have the role."""
    return [pool["workers"] for one in told for pool in one["pools"] if pool["role"] == role]


def _workers(told: Sequence[Sequence[Told]]) -> list[Told]:
    """Return the workers that any process knows: their legs added up, and the worst that is thought of each."""
    found: dict[str, Told] = {}
    for worker in (worker for one in told for worker in one):
        known = found.setdefault(worker["url"], {**worker, "in_flight": 0})
        known["in_flight"] += worker["in_flight"]
        known["state"] = max(known["state"], worker["state"], key=_badness)
    return list(found.values())


def _badness(state: str | None) -> int:
    return -1 if state is None else _STATES.index(state)


class Pages:
    """The routes of the page.

    Args:
        gather: what each process tells of itself.
        processes: how many there should be.
    """

    def __init__(self, gather: Callable[[], Awaitable[Sequence[Told]]], processes: int) -> None:
        self._gather = gather
        self._processes = processes

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/status": {"GET": self._html}, "/status.json": {"GET": self._json}}

    async def _html(self, request: Request) -> None:
        body, policy = page()
        headers = {"Content-Type": "text/html; charset=utf-8", **_HEADERS, "Content-Security-Policy": policy}
        request.response.whole(200, headers.items(), body)

    async def _json(self, request: Request) -> None:
        try:
            told = await self._gather()
        except TimeoutError:
            text(request, 503, "the supervisor of this process does not answer\n")
            return
        if not told:  # each has more to do than it can just now
            text(request, 503, "no process told of itself in time\n")
            return
        headers = {"Content-Type": "application/json", **_HEADERS}
        request.response.whole(200, headers.items(), dumps(together(told, self._processes)))


_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@cache
def page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy: its own style and script by their hashes, and nothing else."""
    text = _PAGE.read_text("utf-8")
    style, script = (_hash(text, tag) for tag in ("style", "script"))
    policy = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return text.encode(), policy


def _hash(text: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None, tag
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

"""Draws the dashboard's panels from scrapes that were kept: docs/dashboard.png.

``python -m scripts.panels --record`` first makes the scrapes: a minute of simulated traffic with a prefill worker that
refuses for a while, a decode worker whose answers are of no use, one that breaks streams off, and a rush in which
requests queue. Without it, the kept ones are drawn again, which is what a change of a panel needs.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import matplotlib

from coordinator.app import build
from coordinator.config import Config
from coordinator.sim import Canned, Fault, SimFleet
from scripts.dashboard import PANELS, Panel
from scripts.promql import Scrapes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEPT = DOCS / "dashboard-scrapes.json.gz"
PICTURE = DOCS / "dashboard.png"

_LASTS_S, _SCRAPE_S = 60.0, 1.0
_WINDOW = "6s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="run the simulated traffic and keep its scrapes")
    if parser.parse_args().record:
        pages = asyncio.run(record())
        KEPT.write_bytes(gzip.compress(json.dumps(pages).encode(), mtime=0))
    draw(json.loads(gzip.decompress(KEPT.read_bytes())))


async def record() -> list[tuple[float, str]]:
    async with SimFleet(prefills=2, decodes=3) as fleet:
        app = build(_config(fleet))
        async with app.running():
            await app.server.listen("127.0.0.1", 0)
            await app.front.plan.readiness.until_ready()
            for worker in fleet.decodes:
                worker.behave.fault = Fault(itl_s=0.02)
            return await _scraped(fleet, f"http://{app.server.addresses[0]}")


async def _scraped(fleet: SimFleet, url: str) -> list[tuple[float, str]]:
    pages: list[tuple[float, str]] = []
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(_trouble(fleet))
        traffic = tasks.create_task(_traffic(session, url, tasks))
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < _LASTS_S:
            async with session.get(f"{url}/metrics") as page:
                pages.append((round(now, 3), await page.text()))
            await asyncio.sleep(_SCRAPE_S)
        traffic.cancel()
    return pages


def _config(fleet: SimFleet) -> Config:
    pools = {
        "prefill": {"endpoints": [worker.url for worker in fleet.prefills]},
        "decode": {"endpoints": [worker.url for worker in fleet.decodes], "max_inflight": 8},
    }
    steps = [
        {"type": "render", "params": {"address": fleet.render.url}},
        {"type": "prefill"},
        {"type": "decode", "params": {"output_mode": "text", "wrap": "all"}},
    ]
    pipeline = {"kv_connector": "kv-nixl", "use_openai_format": False, "steps": steps}
    return Config.model_validate({"pools": pools, "pipeline": pipeline, "server": {"listen_addr": "127.0.0.1:0"}})


async def _trouble(fleet: SimFleet) -> None:
    await asyncio.sleep(10)
    fleet.prefills[0].behave.fault = Fault(canned=Canned(503, b"{}"))
    await asyncio.sleep(8)
    fleet.prefills[0].behave.fault = Fault()
    await asyncio.sleep(4)
    fleet.decodes[1].behave.fault = Fault(canned=Canned(200, "{}"))
    await asyncio.sleep(3)
    fleet.decodes[1].behave.fault = Fault(itl_s=0.02)
    await asyncio.sleep(8)
    fleet.decodes[2].behave.fault = Fault(die_after=5)
    await asyncio.sleep(8)
    fleet.decodes[2].behave.fault = Fault(itl_s=0.02)


async def _traffic(session: aiohttp.ClientSession, url: str, tasks: asyncio.TaskGroup) -> None:
    chance, begun = random.Random(9), time.monotonic()
    while True:
        rush = 45 < time.monotonic() - begun < 53
        tasks.create_task(_ask(session, url, chance))
        await asyncio.sleep(chance.expovariate(60 if rush else 12))


async def _ask(session: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
    text = "Say hello to " + " ".join(["everybody"] * chance.randrange(1, 40))
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": chance.randrange(5, 40)}
    body["n"] = 1 + (chance.random() < 0.1)  # what has several answers is computed by decode alone
    try:
        async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
            await answer.read()
    except aiohttp.ClientError:
        pass  # a stream that was broken off: the coordinator has counted it


def draw(pages: list[tuple[float, str]]) -> None:
    scrapes = Scrapes()
    for at, page in pages:
        scrapes.add(at, page, instance="here")
    rows = -(-len(PANELS) // 3)
    figure, grid = plt.subplots(rows, 3, figsize=(16, 2.6 * rows), layout="constrained")
    for axes, panel in zip(grid.flat, PANELS, strict=False):
        _draw(axes, panel, scrapes, [at for at, _ in pages])
    figure.savefig(PICTURE, dpi=75)


def _draw(axes: Axes, panel: Panel, scrapes: Scrapes, times: list[float]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for query, legend in panel.queries:
        for at in times[2:]:
            for labels, value in scrapes.at(query.replace("$__rate_interval", _WINDOW), at).items():
                lines.setdefault(_filled(legend, dict(labels)), []).append((at, value))
    for label, points in sorted(lines.items()):
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
    axes.set_title(f"{panel.title}: {panel.question}", fontsize=9, loc="left")
    axes.set_xlim(0, times[-1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=6, loc="upper left", ncols=2 if len(lines) > 4 else 1, framealpha=0.6)


def _filled(legend: str, labels: dict[str, Any]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


if __name__ == "__main__":
    main()

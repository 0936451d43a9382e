"""The simulated fleet in a process of its own: ``python -m bench.rfc_sim``. Prints where its workers are, as JSON."""

from __future__ import annotations

import asyncio
import json

import uvloop

from bench.rfc_cells import SIMULATED_ITL_S
from coordinator.sim import SimFleet


async def main() -> None:
    async with SimFleet(itl_s=SIMULATED_ITL_S) as fleet:
        named = {"render": fleet.render.url, "prefill": fleet.prefill.url, "decode": fleet.decode.url}
        print(json.dumps(named), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())

"""Who may begin, and what is done in between."""

from __future__ import annotations

import asyncio

from coordinator.http.turns import Turns


async def begin(turns: Turns, name: int, seen: list[object]) -> None:
    if (turn := turns.take(asyncio.get_running_loop())) is not None:
        await turn
    seen.append(name)


async def test_many_begin_a_few_at_a_time_in_their_order() -> None:
    loop, turns, seen = asyncio.get_running_loop(), Turns(2), list[object]()

    def look() -> None:  # what the loop does between two turns, as it reads its sockets
        seen.append("look")
        if 6 not in seen:
            loop.call_soon(look)

    tasks = [asyncio.create_task(begin(turns, name, seen)) for name in range(7)]
    loop.call_soon(look)
    await asyncio.gather(*tasks)
    assert [name for name in seen if name != "look"] == list(range(7))
    together = " ".join(map(str, seen)).split("look")
    assert max(len(part.split()) for part in together) == 2


async def test_one_that_comes_later_does_not_overtake() -> None:
    turns, seen = Turns(1), list[object]()
    tasks = [asyncio.create_task(begin(turns, name, seen)) for name in range(3)]
    await asyncio.sleep(0)
    assert seen == [0]
    tasks.append(asyncio.create_task(begin(turns, 3, seen)))
    await asyncio.gather(*tasks)
    assert seen == [0, 1, 2, 3]


async def test_who_has_left_takes_nobodys_turn() -> None:
    turns, seen = Turns(1), list[object]()
    tasks = [asyncio.create_task(begin(turns, name, seen)) for name in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert seen == [0, 3]
    await begin(turns, 4, seen)  # and nothing is left behind: the next one begins at once
    assert seen == [0, 3, 4]

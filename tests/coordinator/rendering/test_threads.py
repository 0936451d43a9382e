"""Rendering never holds up the event loop: not the longest prompt, and not a template that hardly ends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from coordinator.rendering.renderer import Model, Renderer
from coordinator.rendering.threads import Threads
from envelope.errors import LegTimeout
from envelope.formats import Format
from tests.bounds import HANG_S
from tests.coordinator.rendering.conftest import MODEL
from tests.coordinator.rendering.requests import HI

ENOUGH = 5  # turns of the loop while a thread works; a loop that is held up has one or two


async def turns(while_: asyncio.Task[Any]) -> int:
    """Count how often the event loop comes round until a task is done."""
    count = 0
    while not while_.done():
        await asyncio.sleep(0)
        count += 1
    return count


@pytest.fixture
def slow(tmp_path: Any) -> Renderer:
    file = tmp_path / "slow.jinja"
    file.write_text("{% for a in range(90000) %}{% for b in range(20) %}{% endfor %}{% endfor %}x")
    return Renderer(Model(str(MODEL), 4096, chat_template=str(file)), threads=1)


async def test_a_template_that_takes_long_leaves_the_loop_to_others(slow: Renderer) -> None:
    render = asyncio.create_task(slow.render(Format.CHAT, {"messages": HI}, "id", None))
    assert await turns(render) > ENOUGH
    assert render.result()["token_ids"]


async def test_a_long_text_leaves_the_loop_to_others(renderer: Renderer) -> None:
    text = "there are words " * 200_000
    encode = asyncio.create_task(asyncio.to_thread(renderer.tokenizer.encode, text[:400_000], add_special_tokens=False))
    assert await turns(encode) > ENOUGH


async def test_who_waits_too_long_is_told_and_others_are_still_served(slow: Renderer) -> None:
    with pytest.raises(LegTimeout, match=r"was not rendered within 0\.01 s"):
        await slow.render(Format.CHAT, {"messages": HI}, "id", 0.01)
    assert (await slow.render(Format.CHAT, {"messages": HI}, "id", 30))["token_ids"]


async def test_at_most_so_many_run_at_a_time_and_who_left_costs_nothing() -> None:
    threads, go, begun = Threads(2), threading.Event(), []

    def work(number: int) -> int:
        begun.append(number)
        go.wait(HANG_S)
        return number

    tasks = [asyncio.create_task(threads.run(lambda number=number: work(number))) for number in range(4)]
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    tasks[2].cancel()
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(tasks[0], tasks[1], tasks[3]) == [0, 1, 3]
    assert sorted(begun) == [0, 1, 3]
    threads.close()


async def test_an_error_is_the_waiter_s_and_the_thread_lives_on() -> None:
    threads = Threads(1)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run(fail)
    assert await threads.run(lambda: 5) == 5
    threads.close()


async def test_threads_end_when_they_are_closed() -> None:
    threads = Threads(3)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("render-")}
    await threads.run(lambda: None)
    mine = {thread for thread in threading.enumerate() if thread.name.startswith("render-")} - before
    assert len(mine) == 3
    threads.close()
    for thread in mine:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

"""What parsing in the coordinator costs: per token, by the length of the answer, and to everybody else.

    python -m bench.parse_cost --tokenizer FOLDER [--processes 1] [--streams 64]

It needs an environment with vLLM. Two questions are asked, and answered in Markdown. Is the cost of a token flat in
the length of the answer? One stream of 8,000 tokens is fed through vLLM's parsers in this process, and the time per
chunk is told near token 100 and near token 8,000. Does parsing stall relays? A loop that does nothing else is asked how
late it is, every millisecond, while ``--streams`` streams at 50 tokens a second are parsed: not at all, on a thread of
the same process, and in parser processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from coordinator.background import Faults
from coordinator.derender.pool import ParserPool, ParserSettings
from coordinator.derender.vllm_parsers import Parsers
from coordinator.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TOOL_PARSER, REASONING_PARSER = "hermes", "qwen3"
# hermes and pythonic keep the whole text and copy it for every chunk, as most of vLLM's tool parsers do; its newer ones
# do not.
PAIRS: tuple[tuple[str | None, str | None], ...] = (
    (TOOL_PARSER, REASONING_PARSER),
    (None, REASONING_PARSER),
    ("qwen3_coder", REASONING_PARSER),
    ("pythonic", None),
)
Lateness = tuple[float, float, float, float]

EVERY_S = 0.02  # between the tokens of a stream
FOR_S = 4.0
ROUNDS = 5
CONTEXT = {
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": True},
}


def job(prompt: list[int], *, tokens: bool) -> dict[str, Any]:
    decoding = {"skip_special_tokens": False} if tokens else None
    return {"id": "bench", "prompt": prompt, "n": 1, "context": CONTEXT, "decoding": decoding}


def chunks(parsers: Parsers, count: int, *, tokens: bool) -> list[dict[str, Any]]:
    """The chunks of an answer: a few of reasoning, then text, so that early and late ones are of a kind."""
    thought = parsers.tokenizer.encode("<think>\nso it seems", add_special_tokens=False)
    said = parsers.tokenizer.encode("</think>\n\n" + "one more word and ", add_special_tokens=False)
    words = parsers.tokenizer.encode("one more word and ", add_special_tokens=False)
    ids = (thought + said + words * count)[:count]
    made = []
    for token in ids:
        choice = {"index": 0, "token_ids": [token], "finish_reason": None, "stop_reason": None, "logprobs": None}
        text = {} if tokens else {"text": parsers.tokenizer.decode([token])}
        made.append({"request_id": "g", "usage": None, "choices": [choice | text]})
    return made


def by_length(parsers: Parsers, count: int, *, tokens: bool) -> tuple[float, float]:
    """Return the median µs of CPU for a chunk around token 100 and around the last."""
    early, late = [], []
    for _ in range(3):
        stream, spent = parsers.stream(job([1, 2, 3], tokens=tokens)), []
        for chunk in chunks(parsers, count, tokens=tokens):
            begun = time.thread_time()
            stream.chunk(chunk)
            spent.append(time.thread_time() - begun)
        early += spent[50:150]
        late += spent[-100:]
    return statistics.median(early) * 1e6, statistics.median(late) * 1e6


async def lateness(work: Callable[[], Awaitable[None]]) -> Lateness:
    """Return p50, p99 and the worst of how late a loop is, in ms, beside ``work``; and the part of a core it takes."""
    late: list[float] = []
    begun, spent = time.perf_counter(), time.process_time()

    async def clock() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append((time.perf_counter() - due) * 1000)

    task = asyncio.get_running_loop().create_task(clock())  # owned: cancelled below
    await work()
    task.cancel()
    cpu = (time.process_time() - spent) / (time.perf_counter() - begun)
    late.sort()
    return late[len(late) // 2], late[len(late) * 99 // 100], late[-1], cpu


async def paced(streams: int, step: Callable[[int, int], Any]) -> None:
    """Call ``step(stream, token)`` for every stream at its pace, the streams spread over the time between tokens."""
    begun = time.perf_counter()

    async def one(stream: int) -> None:
        for token in range(int(FOR_S / EVERY_S)):
            due = begun + (token + stream / streams) * EVERY_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await step(stream, token)

    async with asyncio.TaskGroup() as tasks:
        for stream in range(streams):
            tasks.create_task(one(stream))


async def main(options: argparse.Namespace) -> None:
    print(f"| parsers | worker sends | µs near token 100 | near token {options.tokens} |\n| :-- | :-- | --: | --: |")
    for tool, reasoning in reversed(PAIRS):
        parsers = Parsers(tokenizer=options.tokenizer, tool_parser=tool, reasoning_parser=reasoning)
        for tokens in (False, True):
            early, late = by_length(parsers, options.tokens, tokens=tokens)
            named = " + ".join(name for name in (tool, reasoning) if name)
            print(f"| {named} | {'tokens' if tokens else 'text'} | {early:.0f} | {late:.0f} |")
    made = chunks(parsers, int(FOR_S / EVERY_S), tokens=False)
    settings = ParserSettings(options.tokenizer, TOOL_PARSER, REASONING_PARSER, options.processes, 60.0)
    metrics = Metrics(CollectorRegistry())
    pool = ParserPool(settings, Faults(metrics), metrics.parser_ended)
    await pool.start()
    rows: dict[str, list[Lateness]] = {}
    for _ in range(ROUNDS):  # in turns, as others may use the machine
        rows.setdefault("nothing is parsed", []).append(await lateness(lambda: paced(options.streams, nothing)))
        rows.setdefault("on a thread", []).append(await on_a_thread(parsers, made, options.streams))
        rows.setdefault("in a process", []).append(await in_processes(pool, made, options.streams))
    await pool.release()
    print(f"\n| {options.streams} streams, {1 / EVERY_S:.0f} tokens/s each | p50 ms late | p99 | worst | CPU |")
    print("| :-- | --: | --: | --: | --: |")
    for name, rounds in rows.items():
        p50, p99, worst, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"| {name} | {p50:.2f} | {p99:.2f} | {worst:.1f} | {cpu:.0%} |")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\nA parser process: {used.ru_maxrss / 1024:.0f} MB resident, {used.ru_utime + used.ru_stime:.0f} s of CPU.")


async def nothing(stream: int, token: int) -> None:
    pass


async def on_a_thread(parsers: Parsers, made: list[Any], count: int) -> Lateness:
    loop, streams = asyncio.get_running_loop(), [parsers.stream(job([1], tokens=False)) for _ in range(count)]
    with ThreadPoolExecutor(1) as pool:

        async def step(stream: int, token: int) -> None:
            await loop.run_in_executor(pool, streams[stream].chunk, made[token])

        return await lateness(lambda: paced(count, step))


async def in_processes(pool: ParserPool, made: list[Any], count: int) -> Lateness:
    held, missing, over = [pool.open(job([1], tokens=False)) for _ in range(count)], count * len(made), asyncio.Event()

    def heard(kind: bytes, data: bytes) -> None:
        nonlocal missing
        missing -= kind == b"done"
        if not missing:
            over.set()

    for parsing in held:
        parsing.listen(heard)
    sent = [json.dumps(chunk).encode() for chunk in made]

    async def step(stream: int, token: int) -> None:
        held[stream].send(sent[token])

    async def work() -> None:
        await paced(count, step)
        await over.wait()

    try:
        return await lateness(work)
    finally:
        for parsing in held:
            parsing.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokenizer", required=True, help="the folder of a model's tokenizer and config.json")
    options.add_argument("--tokens", type=int, default=8000)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--processes", type=int, default=1)
    asyncio.run(main(options.parse_args()))

"""The stream of ``/v1/chat/completions``: which keys a chunk has depends on its kind.

Source: recordings ``chat/*_stream*``, ``kv_load_failure/chat_stream``.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim import logprobs, usage
from coordinator.sim.answers import DONE, Frame
from coordinator.sim.chat_run import weights
from coordinator.sim.parsers import rewritten
from coordinator.sim.refusals import Refusal
from coordinator.sim.stream_parser import StreamParser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from coordinator.sim.chat_run import Run
    from coordinator.sim.core import Generation
    from coordinator.sim.engine import Step


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    parser: StreamParser
    token_ids: list[int] = field(default_factory=list)


async def frames(run: Run) -> AsyncGenerator[Frame, None]:
    options = run.call.body.get("stream_options") or {}
    with_usage = bool(options.get("include_usage"))
    continuous = with_usage and bool(options.get("continuous_usage_stats"))
    choices = [_Choice(StreamParser(run.parsing)) for _ in range(run.prepared.sampling.n)]
    try:
        generation = run.admit()
        await generation.meet()  # nothing is said before the prompt's blocks are there
        for index in range(len(choices)):
            yield Frame(_role_chunk(run, index, continuous=continuous))
        async with aclosing(generation.rounds()) as rounds:
            async for steps in rounds:
                for step in steps:
                    choice = choices[step.index]
                    chunk = _chunk(run, step, choice, continuous=continuous)
                    if chunk is not None:
                        yield Frame(chunk | _tail(generation, step, with_fingerprint=not with_usage))
        if with_usage:
            yield Frame(_usage_chunk(run, choices, generation))
    except Refusal as refusal:
        yield Frame(refusal.body())
    yield DONE


def _head(run: Run) -> dict[str, Any]:
    return {
        "id": run.job.id,
        "object": "chat.completion.chunk",
        "created": run.call.created,
        "model": run.settings.model,
    }


def _role_chunk(run: Run, index: int, *, continuous: bool) -> dict[str, Any]:
    body = run.call.body
    delta = {"role": "assistant", "content": ""}
    chunk = _head(run)
    chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
    if continuous:
        chunk["usage"] = _running_usage(run, [])
    chunk["prompt_token_ids"] = run.prepared.token_ids if body.get("return_token_ids") else None
    chunk["prompt_text"] = run.prepared.text if body.get("return_prompt_text") else None
    return chunk


def _chunk(run: Run, step: Step, choice: _Choice, *, continuous: bool) -> dict[str, Any] | None:
    """Return one step's chunk; None where the parser has nothing to say yet."""
    choice.token_ids += step.token_ids
    with_ids = bool(run.call.body.get("return_token_ids"))
    last = step.finish_reason is not None
    if run.settings.parsers:
        delta = choice.parser.feed(step.text, last=last).wire()
        if not (delta or last or with_ids or step.logprobs is not None):
            return None
    else:
        delta = {"content": step.text}
    shown: dict[str, Any] = {
        "index": step.index,
        "delta": delta,
        "logprobs": logprobs.chat(step.logprobs, cut=run.prepared.sampling.logprobs),
        "finish_reason": rewritten(step.finish_reason, called=choice.parser.called, parsing=run.parsing),
    }
    if last:
        shown["stop_reason"] = step.stop_reason
    shown["token_ids"] = step.token_ids if with_ids else None
    if last and run.settings.at_least(0, 33):
        shown["weight_versions"] = weights(run, len(choice.token_ids))
    chunk = _head(run)
    chunk["choices"] = [shown]
    if continuous:
        chunk["usage"] = _running_usage(run, choice.token_ids)
    return chunk


def _tail(generation: Generation, step: Step, *, with_fingerprint: bool) -> dict[str, Any]:
    tail: dict[str, Any] = {}
    if step.finish_reason is not None and with_fingerprint:
        tail["system_fingerprint"] = generation.settings.fingerprint
    if generation.settings.at_least(0, 33):
        tail["kv_transfer_params"] = generation.handover if step.finish_reason is not None else None
    return tail


def _running_usage(run: Run, token_ids: list[int]) -> dict[str, Any]:
    counts = usage.counts(len(run.job.prompt_ids), len(token_ids))
    return {**counts, "completion_tokens_details": run.details([token_ids])}


def _usage_chunk(run: Run, choices: list[_Choice], generation: Generation) -> dict[str, Any]:
    every = [choice.token_ids for choice in choices]
    chunk = _head(run)
    chunk["choices"] = []
    chunk["usage"] = usage.set_only(
        len(run.job.prompt_ids),
        sum(map(len, every)),
        prompt_details=usage.prompt_details(generation, in_stream=True),
        details=run.details(every),
    )
    chunk["system_fingerprint"] = run.settings.fingerprint
    return chunk

"""``POST /v1/completions``: whole and streamed; no parser runs here.

Source: recordings ``completions/``.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim import logprobs, prompts, tokenizer, usage
from coordinator.sim.answers import DONE, Answer, Call, Frame, Stream, Whole
from coordinator.sim.chat_run import connector_params
from coordinator.sim.core import Core, Generation, Job
from coordinator.sim.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from coordinator.sim.engine import Output, Step
    from coordinator.sim.logprobs import TokenLogprobs
    from coordinator.sim.prompts import Prepared


async def completions(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    prompted = [
        _Prompted(prepared, _job(call, prepared, at))
        for at, prepared in enumerate(prompts.prepare_completions(call.body, core.settings))
    ]
    if call.wants_stream:
        return Stream(_frames(core, call, prompted))
    return Whole(_by_release(core, await _whole(core, call, prompted)))


@dataclass(slots=True)
class _Prompted:
    """One of the request's prompts.

    Attributes:
        lengths: by choice, of the token texts so far: where the next ``text_offset`` starts.
    """

    prepared: Prepared
    job: Job
    lengths: dict[int, int] = field(default_factory=dict)
    made: int = 0

    @property
    def n(self) -> int:
        return self.job.sampling.n


def _job(call: Call, prepared: Prepared, at: int) -> Job:
    return Job(
        id=f"cmpl-{call.id}-{at}",
        prompt_ids=prepared.token_ids,
        sampling=prepared.sampling,
        kv_params=connector_params(call.body),
        cache_salt=call.body.get("cache_salt"),
        itl_s=call.itl_s,
        tokens_per_step=call.tokens_per_step if call.wants_stream else 1,
        dp_rank=call.received.header("x-data-parallel-rank"),
    )


async def _whole(core: Core, call: Call, prompted: Sequence[_Prompted]) -> dict[str, Any]:
    generations = [core.admit(one.job) for one in prompted]
    results = await asyncio.gather(*(generation.outputs() for generation in generations))
    choices = [
        _whole_choice(call, one, output) for one, outputs in zip(prompted, results, strict=True) for output in outputs
    ]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": call.created,
        "model": core.settings.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": core.settings.fingerprint,
        "usage": usage.full(
            sum(len(one.job.prompt_ids) for one in prompted),
            sum(len(output.token_ids) for outputs in results for output in outputs),
            prompt_details=usage.prompt_details(generations[0]),
            details=None,
        ),
        "kv_transfer_params": generations[0].handover,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _whole_choice(call: Call, one: _Prompted, output: Output) -> dict[str, Any]:
    sampling, ids = one.job.sampling, list(one.job.prompt_ids)
    with_ids = bool(call.body.get("return_token_ids"))
    prompt_logprobs = None
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = logprobs.of_prompt(tokenizer.load(), ids, sampling.prompt_logprobs)
    return {
        "index": output.index,
        "text": _echoed(call, one) + output.text,
        "logprobs": _logprobs(call, one, output.index, output.logprobs, first=True),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if with_ids else None,
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": ids if with_ids else None,
        "routed_experts": None,
        "weight_versions": None,
    }


def _echoed(call: Call, one: _Prompted) -> str:
    if not call.body.get("echo"):
        return ""
    return one.prepared.text or tokenizer.load().decode(one.job.prompt_ids, skip_special=True)


def _logprobs(
    call: Call,
    one: _Prompted,
    index: int,
    positions: list[TokenLogprobs] | None,
    *,
    first: bool,
) -> dict[str, Any] | None:
    k = one.job.sampling.logprobs
    if k is None or positions is None:
        return None
    shown: list[TokenLogprobs | str] = [*positions]
    if call.body.get("echo") and first:
        vocabulary, ids = tokenizer.load(), list(one.job.prompt_ids)
        echoed = [logprobs.made_up(vocabulary, id, at, k, surprising=True) for at, id in enumerate(ids[1:], 1)]
        shown = [vocabulary.token_text(ids[0]), *echoed, *shown]
    wire, one.lengths[index] = logprobs.completions(shown, k=k, offset=one.lengths.get(index, 0))
    return wire


async def _frames(core: Core, call: Call, prompted: Sequence[_Prompted]) -> AsyncGenerator[Frame, None]:
    options = call.body.get("stream_options") or {}
    with_usage = bool(options.get("include_usage"))
    continuous = with_usage and bool(options.get("continuous_usage_stats"))
    made: dict[int, int] = {}
    try:
        generations = [core.admit(one.job) for one in prompted]
        async with aclosing(_interleaved(generations)) as interleaved:
            async for at, step in interleaved:
                one = prompted[at]
                index = at * one.n + step.index
                chunk = _head(core, call)
                chunk["choices"] = [_stream_choice(call, one, step, index, first=index not in made)]
                made[index] = made.get(index, 0) + len(step.token_ids)
                if continuous:
                    chunk["usage"] = usage.counts(len(one.job.prompt_ids), made[index])
                if step.finish_reason is not None and not with_usage:
                    chunk["system_fingerprint"] = core.settings.fingerprint
                if core.settings.at_least(0, 33):
                    chunk["kv_transfer_params"] = generations[at].handover if step.finish_reason else None
                yield Frame(_by_release(core, chunk))
        if with_usage:
            yield Frame(_usage_chunk(core, call, prompted, sum(made.values()), generations[0]))
    except Refusal as refusal:
        yield Frame(refusal.body(), spaced=True)
    yield DONE


def _usage_chunk(
    core: Core, call: Call, prompted: Sequence[_Prompted], completion: int, generation: Generation
) -> dict[str, Any]:
    chunk = _head(core, call)
    chunk["choices"] = []
    chunk["usage"] = usage.set_only(
        sum(len(one.job.prompt_ids) for one in prompted),
        completion,
        prompt_details=usage.prompt_details(generation, in_stream=True),
        details=None,
    )
    return {**chunk, "system_fingerprint": core.settings.fingerprint}


def _by_release(core: Core, answer: dict[str, Any]) -> dict[str, Any]:
    """Take out what releases before 0.33 do not have."""
    if not core.settings.at_least(0, 33):
        for choice in answer["choices"]:
            del choice["weight_versions"]
    return answer


async def _interleaved(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Step], None]:
    """Yield each prompt's next round in turn."""
    async with AsyncExitStack() as stack:
        running = [
            (at, await stack.enter_async_context(aclosing(generation.rounds())))
            for at, generation in enumerate(generations)
        ]
        while running:
            for at, rounds in running.copy():
                steps = await anext(rounds, None)
                if steps is None:
                    running.remove((at, rounds))
                for step in steps or ():
                    yield at, step


def _head(core: Core, call: Call) -> dict[str, Any]:
    return {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": call.created,
        "model": core.settings.model,
    }


def _stream_choice(call: Call, one: _Prompted, step: Step, index: int, *, first: bool) -> dict[str, Any]:
    with_ids = bool(call.body.get("return_token_ids"))
    echoed = _echoed(call, one) if first else ""
    return {
        "index": index,
        "text": echoed + step.text,
        "logprobs": _logprobs(call, one, step.index, step.logprobs, first=first),
        "finish_reason": step.finish_reason,
        "stop_reason": step.stop_reason,
        # An echoed prompt comes with its ids, though only in a stream.
        "prompt_token_ids": list(one.job.prompt_ids) if (with_ids or call.body.get("echo")) and first else None,
        "token_ids": step.token_ids if with_ids else None,
        "weight_versions": None,
    }

"""``POST /v1/completions``: whole and streamed; no parser runs here.

Source: recordings ``completions/``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim import logprobs, prompts, tokenizer
from coordinator.sim.answers import DONE, Answer, Call, Frame, Stream, Whole
from coordinator.sim.chat import connector_params
from coordinator.sim.core import Core, Generation, Job
from coordinator.sim.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

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
    return Whole(await _whole(core, call, prompted))


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
    completion = sum(len(output.token_ids) for outputs in results for output in outputs)
    usage = {**_usage(prompted, completion), "prompt_tokens_details": None, "completion_tokens_details": None}
    return {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": call.created,
        "model": core.settings.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": core.settings.fingerprint,
        "usage": usage,
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


def _usage(prompted: Sequence[_Prompted], completion: int) -> dict[str, Any]:
    prompt = sum(len(one.job.prompt_ids) for one in prompted)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


async def _frames(core: Core, call: Call, prompted: Sequence[_Prompted]) -> AsyncIterator[Frame]:
    options = call.body.get("stream_options") or {}
    with_usage = bool(options.get("include_usage"))
    continuous = with_usage and bool(options.get("continuous_usage_stats"))
    begun: set[int] = set()
    made: dict[int, int] = {}
    try:
        generations = [core.admit(one.job) for one in prompted]
        async for at, step in _interleaved(generations):
            one = prompted[at]
            index = at * one.n + step.index
            made[index] = made.get(index, 0) + len(step.token_ids)
            chunk = _head(core, call)
            chunk["choices"] = [_stream_choice(call, one, step, index, first=index not in begun)]
            begun.add(index)
            if continuous:
                chunk["usage"] = _usage([one], made[index])
            if step.finish_reason is not None and not with_usage:
                chunk["system_fingerprint"] = core.settings.fingerprint
            if core.settings.parse_context:
                chunk["kv_transfer_params"] = generations[at].handover if step.finish_reason else None
            yield Frame(chunk)
        if with_usage:
            chunk = _head(core, call)
            chunk |= {"choices": [], "usage": _usage(prompted, sum(made.values()))}
            yield Frame({**chunk, "system_fingerprint": core.settings.fingerprint})
    except Refusal as refusal:
        yield Frame(refusal.body(), spaced=True)
    yield DONE


async def _interleaved(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Step]]:
    """Yield each prompt's next round in turn."""
    running = [(at, generation.rounds()) for at, generation in enumerate(generations)]
    while running:
        going = []
        for at, rounds in running:
            steps = await anext(rounds, None)
            if steps is None:
                continue
            going.append((at, rounds))
            for step in steps:
                yield at, step
        running = going


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

"""``POST /inference/v1/generate``: its whole answer and its stream.

Source: recordings ``generate/``.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from coordinator.sim import features, logprobs, tokenizer, usage
from coordinator.sim.answers import DONE, Answer, Call, Frame, Stream, Whole
from coordinator.sim.core import Core, Job
from coordinator.sim.generate_request import checked, output_mode, transfer_params
from coordinator.sim.parsers import Parsing, parse
from coordinator.sim.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from coordinator.sim.engine import Output, Step
    from coordinator.sim.sampling import Sampling


async def generate(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    body, settings = call.body, core.settings
    mode = output_mode(body, settings)
    sampling = checked(body, mode, settings)
    job = Job(
        id=f"generate-tokens-{call.id}",
        prompt_ids=body["token_ids"],
        sampling=sampling,
        kv_params=transfer_params(body, sampling),
        media=features.read(body.get("features"), body["token_ids"]),
        ec_params=body.get("ec_transfer_params"),
        cache_salt=body.get("cache_salt"),
        reasoning_ended=body.get("reasoning_ended"),
        itl_s=call.itl_s,
        tokens_per_step=call.tokens_per_step if call.wants_stream else 1,
        dp_rank=call.received.header("x-data-parallel-rank"),
    )
    if call.wants_stream:
        return Stream(_frames(core, call, job, mode))
    return Whole(await _whole(core, call, job, mode))


async def _whole(core: Core, call: Call, job: Job, mode: str | None) -> dict[str, Any]:
    generation = core.admit(job)
    outputs = await generation.outputs()
    sampling, count = job.sampling, len(job.prompt_ids)
    prompt_logprobs = None
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = logprobs.of_prompt(
            tokenizer.load(), job.prompt_ids, sampling.prompt_logprobs, with_text=not core.settings.tokens_only
        )
    answer = {
        "request_id": job.id,
        "model": core.settings.model,
        "created": call.created,
        "usage": usage.full(
            count,
            sum(len(output.token_ids) for output in outputs),
            prompt_details=usage.prompt_details(generation),
            details=None,
        ),
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": list(job.prompt_ids) if call.body.get("return_token_ids") else None,
        "mm_placeholders": _placeholders(call),
        "metrics": None,
        "kv_transfer_params": generation.handover,
        "ec_transfer_params": generation.encodings,
    }
    if mode is not None:
        answer["output_mode"] = mode
    parsing = Parsing.of(call.body.get("parse_context"), parsers=core.settings.parsers)
    answer["choices"] = [_whole_choice(output, sampling, mode, parsing) for output in outputs]
    return answer


def _whole_choice(output: Output, sampling: Sampling, mode: str | None, parsing: Parsing) -> dict[str, Any]:
    choice = _choice(output.index, output.token_ids, output.finish_reason, output.stop_reason, mode)
    if mode is not None:
        choice["weight_versions"] = _weights(len(output.token_ids))
    if mode != "derender":
        return _with_payload(choice, output.text, output.logprobs, mode)
    parsed = parse(output.text, parsing)
    choice["finish_reason"] = parsed.finish_reason(output.finish_reason, parsing)
    choice["message"] = parsed.message()
    choice["logprobs"] = logprobs.chat(output.logprobs, cut=sampling.logprobs)
    if not parsing.include_reasoning:
        choice["token_ids"] = choice["logprobs"] = None
    return choice


async def _frames(core: Core, call: Call, job: Job, mode: str | None) -> AsyncGenerator[Frame, None]:
    options = call.body.get("stream_options") or {}
    with_usage = bool(options.get("include_usage"))
    continuous = with_usage and bool(options.get("continuous_usage_stats"))
    made: dict[int, int] = dict.fromkeys(range(job.sampling.n), 0)
    count = len(job.prompt_ids)
    echo = {} if mode is None else {"output_mode": mode}
    prompt: dict[str, Any] = {}
    if call.body.get("return_token_ids"):
        prompt["prompt_token_ids"] = list(job.prompt_ids)
        prompt |= {"mm_placeholders": _placeholders(call)} if job.media else {}
    try:
        generation = core.admit(job)
        async with aclosing(generation.rounds()) as rounds:
            async for steps in rounds:
                for step in steps:
                    made[step.index] += len(step.token_ids)
                    running = usage.full(count, made[step.index], prompt_details=None, details=None)
                    head = {"request_id": job.id, "usage": running if continuous else None, **prompt, **echo}
                    yield Frame({**head, "choices": [_stream_choice(step, made[step.index], mode)]})
                    prompt = {}  # on the first chunk alone
        if with_usage:
            details = usage.prompt_details(generation, in_stream=True)
            total = usage.set_only(count, sum(made.values()), prompt_details=details, details=None)
            yield Frame({"request_id": job.id, "usage": total, **echo, "choices": []})
    except Refusal as refusal:
        yield Frame(refusal.body(), spaced=True)
    yield DONE


def _stream_choice(step: Step, made: int, mode: str | None) -> dict[str, Any]:
    choice = _choice(step.index, step.token_ids, step.finish_reason, step.stop_reason, mode)
    if mode is not None and step.finish_reason is not None:
        choice["weight_versions"] = _weights(made)
    return _with_payload(choice, step.text, step.logprobs, mode)


def _choice(
    index: int, token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None, mode: str | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
    if mode is not None:
        choice["stop_reason"] = stop_reason
    choice |= {"token_ids": token_ids, "routed_experts": None}
    if mode is not None:
        choice |= {"sampling_mask": None, "weight_versions": None}
    return choice


def _with_payload(
    choice: dict[str, Any], text: str, positions: list[logprobs.TokenLogprobs] | None, mode: str | None
) -> dict[str, Any]:
    if mode == "text":
        return {**choice, "text": text, "logprobs": logprobs.chat(positions, cut=None)}
    if mode is None:
        return {**choice, "logprobs": logprobs.chat_by_id(positions)}
    return {**choice, "logprobs": logprobs.by_id(positions)}


def _placeholders(call: Call) -> Any:
    """Return where the media stands, for those who also want the ids; null for text."""
    given = call.body.get("features")
    return given["mm_placeholders"] if given and call.body.get("return_token_ids") else None


def _weights(count: int) -> list[dict[str, Any]]:
    return [{"version": "default", "start": 0, "end": count}]

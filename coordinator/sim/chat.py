"""``POST /v1/chat/completions``: whole and streamed.

Source: recordings ``chat/``, ``no_parser/``, ``nixl_prefill_server/prefill_chat*``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.sim import logprobs, prompts, tokenizer
from coordinator.sim.answers import DONE, Answer, Call, Frame, Stream, Whole
from coordinator.sim.core import Core, Generation, Job
from coordinator.sim.parsers import Delta, Parsing, StreamParser, parse, reasoning_tokens, rewritten
from coordinator.sim.refusals import Refusal, failed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from coordinator.sim.engine import Output, Step
    from coordinator.sim.prompts import Prepared

_TAGS = {"<think>": 1017, "</think>": 1018}


async def chat(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    if core.settings.tokens_only:
        raise failed("", late=False)
    run = prepared_run(core, call, prompts.prepare_chat(call.body, core.settings))
    if call.wants_stream:
        return Stream(_frames(run))
    return Whole(await _whole(run))


@dataclass(slots=True)
class Run:
    """A chat-like request on its way: chat itself and messages are built on it."""

    core: Core
    call: Call
    prepared: Prepared
    job: Job
    parsing: Parsing

    def admit(self) -> Generation:
        return self.core.admit(self.job)

    def usage(self, completion: int, thought: int, *, details: bool = True) -> dict[str, Any]:
        prompt = len(self.job.prompt_ids)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        if details:
            usage["prompt_tokens_details"] = None
        if self.core.settings.parsers:
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        elif details:
            usage["completion_tokens_details"] = None
        return usage

    def thought(self, token_ids: list[int]) -> int:
        return reasoning_tokens(token_ids, _TAGS, self.parsing)


def prepared_run(core: Core, call: Call, prepared: Prepared, *, id: str | None = None) -> Run:
    job = Job(
        id=id or f"chatcmpl-{call.id}",
        prompt_ids=prepared.token_ids,
        sampling=prepared.sampling,
        kv_params=connector_params(call.body),
        cache_salt=call.body.get("cache_salt"),
        itl_s=call.itl_s,
        tokens_per_step=call.tokens_per_step if call.wants_stream else 1,
        reasoning_ended=prepared.reasoning_ended,
        dp_rank=call.received.header("x-data-parallel-rank"),
    )
    return Run(core, call, prepared, job, Parsing.of(prepared.context, parsers=core.settings.parsers))


def connector_params(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the transfer params as the connector sees them: the reused prompt is taken out before."""
    params = {
        name: value for name, value in (body.get("kv_transfer_params") or {}).items() if name != "prompt_token_ids"
    }
    return params or None


async def _whole(run: Run) -> dict[str, Any]:
    generation = run.admit()
    outputs = await generation.outputs()
    body, prepared = run.call.body, run.prepared
    prompt_logprobs = None
    if prepared.sampling.prompt_logprobs is not None:
        prompt_logprobs = logprobs.of_prompt(tokenizer.load(), prepared.token_ids, prepared.sampling.prompt_logprobs)
    completion = sum(len(output.token_ids) for output in outputs)
    thought = sum(run.thought(output.token_ids) for output in outputs)
    return {
        "id": run.job.id,
        "object": "chat.completion",
        "created": run.call.created,
        "model": run.core.settings.model,
        "choices": [_choice(run, output) for output in outputs],
        "service_tier": None,
        "system_fingerprint": run.core.settings.fingerprint,
        "usage": run.usage(completion, thought),
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prepared.token_ids if body.get("return_token_ids") else None,
        "prompt_text": prepared.text if body.get("return_prompt_text") else None,
        "kv_transfer_params": generation.handover,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(run: Run, output: Output) -> dict[str, Any]:
    body, parsing = run.call.body, run.parsing
    parsed = parse(output.text, parsing)
    hidden = not parsing.include_reasoning
    shown = logprobs.chat(output.logprobs, cut=run.prepared.sampling.logprobs)
    return {
        "index": output.index,
        "message": parsed.message(),
        "logprobs": None if hidden else shown,
        "finish_reason": parsed.finish_reason(output.finish_reason, parsing),
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if body.get("return_token_ids") and not hidden else None,
        "routed_experts": None,
        "weight_versions": _weights(len(output.token_ids)) if body.get("return_weight_versions") else None,
    }


def _weights(count: int) -> list[dict[str, Any]]:
    return [{"version": "default", "start": 0, "end": count}]


@dataclass(slots=True)
class _Progress:
    """One choice of a stream."""

    parser: StreamParser
    token_ids: list[int]


async def _frames(run: Run) -> AsyncIterator[Frame]:
    options = run.call.body.get("stream_options") or {}
    with_usage = bool(options.get("include_usage"))
    continuous = with_usage and bool(options.get("continuous_usage_stats"))
    made = [_Progress(StreamParser(run.parsing), []) for _ in range(run.prepared.sampling.n)]
    started = False
    try:
        generation = run.admit()
        rounds = generation.rounds()
        while True:
            try:
                steps = await anext(rounds)
            except StopAsyncIteration:
                break
            except Refusal:
                # The engine had accepted the request, so the role has been sent.
                for index in range(len(made) if not started else 0):
                    yield Frame(_role_chunk(run, index, continuous=continuous))
                raise
            for index in range(len(made) if not started else 0):
                yield Frame(_role_chunk(run, index, continuous=continuous))
            started = True
            for step in steps:
                chunk = _chunk(run, step, made[step.index], generation, last_of_all=not with_usage)
                if chunk is None:
                    continue
                if continuous:
                    ids = made[step.index].token_ids
                    usage = run.usage(len(ids), run.thought(ids), details=not run.core.settings.parsers)
                    usage.pop("prompt_tokens_details", None)
                    chunk = _before_kv(chunk, "usage", usage)
                yield Frame(chunk)
        if with_usage:
            yield Frame(_usage_chunk(run, made))
    except Refusal as refusal:
        yield Frame(refusal.body())
    yield DONE


def _head(run: Run) -> dict[str, Any]:
    return {
        "id": run.job.id,
        "object": "chat.completion.chunk",
        "created": run.call.created,
        "model": run.core.settings.model,
    }


def _role_chunk(run: Run, index: int, *, continuous: bool) -> dict[str, Any]:
    body = run.call.body
    delta = {"role": "assistant", "content": ""}
    chunk = _head(run)
    chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
    if continuous:
        usage = run.usage(0, 0)
        usage.pop("prompt_tokens_details")
        chunk["usage"] = usage
    chunk["prompt_token_ids"] = run.prepared.token_ids if body.get("return_token_ids") else None
    chunk["prompt_text"] = run.prepared.text if body.get("return_prompt_text") else None
    return chunk


def _chunk(
    run: Run, step: Step, progress: _Progress, generation: Generation, *, last_of_all: bool
) -> dict[str, Any] | None:
    """Return one step's chunk; None where the parser has nothing to say yet."""
    body, parsing = run.call.body, run.parsing
    with_ids = bool(body.get("return_token_ids"))
    progress.token_ids += step.token_ids
    last = step.finish_reason is not None
    if run.core.settings.parsers:
        delta = progress.parser.feed(step.text, last=last)
        wire = delta.wire()
        if not (wire or last or with_ids or step.logprobs is not None):
            return None
    else:
        wire = Delta(content=step.text).wire() or {"content": ""}
    choice: dict[str, Any] = {
        "index": step.index,
        "delta": wire,
        "logprobs": logprobs.chat(step.logprobs, cut=run.prepared.sampling.logprobs),
        "finish_reason": None,
    }
    chunk = _head(run)
    chunk["choices"] = [choice]
    if last:
        choice["finish_reason"] = rewritten(step.finish_reason, called=progress.parser.called, parsing=parsing)
        choice["stop_reason"] = step.stop_reason
    choice["token_ids"] = step.token_ids if with_ids else None
    if last:
        weights = _weights(len(progress.token_ids)) if body.get("return_weight_versions") else None
        choice["weight_versions"] = weights
        if last_of_all:
            chunk["system_fingerprint"] = run.core.settings.fingerprint
    if run.core.settings.parse_context:  # the field came with the same release
        chunk["kv_transfer_params"] = generation.handover if last else None
    return chunk


def _before_kv(chunk: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Put a key where vLLM has it: after the choices."""
    head = {name: chunk[name] for name in ("id", "object", "created", "model", "choices")}
    return {**head, key: value, **{name: item for name, item in chunk.items() if name not in head}}


def _usage_chunk(run: Run, made: list[_Progress]) -> dict[str, Any]:
    completion = sum(len(progress.token_ids) for progress in made)
    thought = sum(run.thought(progress.token_ids) for progress in made)
    chunk = _head(run)
    chunk["choices"] = []
    chunk["usage"] = run.usage(completion, thought, details=False)
    chunk["system_fingerprint"] = run.core.settings.fingerprint
    return chunk

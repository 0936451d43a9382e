"""``POST /v1/chat/completions``: its whole answer; the stream is in ``chat_stream``.

Source: recordings ``chat/``, ``no_parser/``, ``nixl_prefill_server/prefill_chat*``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.sim import chat_stream, logprobs, prompts, tokenizer, usage
from coordinator.sim.answers import Answer, Call, Stream, Whole
from coordinator.sim.chat_run import Run, prepared_run, weights
from coordinator.sim.parsers import parse
from coordinator.sim.refusals import failed

if TYPE_CHECKING:
    from coordinator.sim.core import Core
    from coordinator.sim.engine import Output


async def chat(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    if core.settings.tokens_only:
        raise failed("", late=False)
    run = prepared_run(core, call, prompts.prepare_chat(call.body, core.settings))
    if call.wants_stream:
        return Stream(chat_stream.frames(run))
    return Whole(await _whole(run))


async def _whole(run: Run) -> dict[str, Any]:
    generation = run.admit()
    outputs = await generation.outputs()
    body, prepared = run.call.body, run.prepared
    prompt_logprobs = None
    if prepared.sampling.prompt_logprobs is not None:
        prompt_logprobs = logprobs.of_prompt(tokenizer.load(), prepared.token_ids, prepared.sampling.prompt_logprobs)
    return {
        "id": run.job.id,
        "object": "chat.completion",
        "created": run.call.created,
        "model": run.settings.model,
        "choices": [_choice(run, output) for output in outputs],
        "service_tier": None,
        "system_fingerprint": run.settings.fingerprint,
        "usage": usage.full(
            len(prepared.token_ids),
            sum(len(output.token_ids) for output in outputs),
            prompt_details=usage.prompt_details(generation),
            details=run.details([output.token_ids for output in outputs]),
        ),
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prepared.token_ids if body.get("return_token_ids") else None,
        "prompt_text": prepared.text if body.get("return_prompt_text") else None,
        "kv_transfer_params": generation.handover,
        "ec_transfer_params": generation.encodings,
        "metrics": None,
    }


def _choice(run: Run, output: Output) -> dict[str, Any]:
    parsing = run.parsing
    parsed = parse(output.text, parsing)
    hidden = not parsing.include_reasoning
    shown = logprobs.chat(output.logprobs, cut=run.prepared.sampling.logprobs)
    choice = {
        "index": output.index,
        "message": parsed.message(),
        "logprobs": None if hidden else shown,
        "finish_reason": parsed.finish_reason(output.finish_reason, parsing),
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if run.call.body.get("return_token_ids") and not hidden else None,
        "routed_experts": None,
    }
    if run.settings.at_least(0, 33):
        choice["weight_versions"] = weights(run, len(output.token_ids))
    return choice

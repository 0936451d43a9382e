"""What a worker without a tokenizer leaves undone: tokens become text, by the engine's own incremental detokenizer.

vLLM is imported inside functions, as in ``vllm_parsers``.

Source: vLLM 0.33 ``v1/engine/output_processor.py``, ``v1/engine/logprobs.py`` and ``v1/core/sched/utils.py``
(``check_stop``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

Json = dict[str, Any]

# Tokens before one that ends inside a character: enough for any in UTF-8.
_CONTEXT = 4
# What its processor of logprobs holds of a request, of which none is needed here.
_OF_A_REQUEST = ("logprobs", "prompt_logprobs", "cumulative_logprob", "num_logprobs", "num_prompt_logprobs")


class Detokenized:
    """One choice of a worker without a tokenizer: its tokens become text, and stop strings end it, as in the engine."""

    def __init__(self, tokenizer: Any, job: Json) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._tokenizer = tokenizer
        request = SimpleNamespace(
            request_id=job["id"],
            prompt_token_ids=job["prompt"],
            prompt_embeds=None,
            # The worker minds the cap; vLLM's default of 16 would refuse a larger min_tokens.
            sampling_params=SamplingParams(max_tokens=None, **job["decoding"]),
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        # To such a worker the end token is a stop token like any other, and reason enough to be named.
        self._unnamed = None if job["decoding"].get("ignore_eos") else tokenizer.eos_token_id
        self._context: list[int] = []  # the tokens before a chunk's, which mend logprobs cut inside a character
        self.ended = False
        self.stopped = False  # by a stop string: the worker goes on

    @property
    def count(self) -> int:
        return int(self._detokenizer.num_output_tokens())

    def choice(self, choice: Json) -> Json | None:
        """Return a choice's chunk with its text; None once the choice has ended here."""
        if self.ended:
            return None
        token_ids, finish = list(choice.get("token_ids") or ()), choice.get("finish_reason")
        reason = choice.get("stop_reason")
        if reason == self._unnamed:
            reason = None
        before = self.count
        stop = self._detokenizer.update(token_ids, finish == "stop")
        if stop:
            # What an engine step made beyond the stop string is surplus, and told of by nobody.
            token_ids = self._detokenizer.output_token_ids[before:]
            finish, reason, self.stopped = "stop", stop, True
        self.ended = finish is not None
        text = self._detokenizer.get_next_output_text(self.ended, True)
        scores = choice.get("logprobs")
        if scores is not None:
            scores = self._logprobs(scores, token_ids)
        made = {**choice, "token_ids": token_ids, "finish_reason": finish, "stop_reason": reason}
        return {**made, "text": text, "logprobs": scores}

    def _logprobs(self, given: Json, token_ids: list[int]) -> Json:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateLogProbs
        from vllm.renderers.online_derenderer import _logprob_context_tail, _resolve_logprobs

        rows = GenerateLogProbs.model_validate({**given, "content": (given.get("content") or [])[: len(token_ids)]})
        resolved = _resolve_logprobs(rows, self._tokenizer, initial_context_token_ids=self._context)
        self._context = _logprob_context_tail(self._context, token_ids)
        scores: Json = resolved.model_dump(mode="json")
        return scores


def counts(job: Json, choices: list[Detokenized]) -> Json:
    """Return the usage of an answer that was ended here: the worker's own counts what came after a stop string too."""
    prompt, made = len(job["prompt"]), sum(choice.count for choice in choices)
    return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}


def with_prompt_texts(tokenizer: Any, rows: list[Json | None]) -> list[Json | None]:
    """Return the logprobs of a prompt with the text of each token, as the engine tells them."""
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
    from vllm.v1.engine.logprobs import LogprobsProcessor

    nothing: dict[str, Any] = dict.fromkeys(_OF_A_REQUEST)
    processor = LogprobsProcessor(tokenizer=tokenizer, **nothing)
    before: list[int] = []  # the prompt's own tokens, which mend those cut inside a character
    made: list[Json | None] = []
    for row in rows:
        if row is None:
            made.append(None)
            continue
        ids = [int(token) for token in row]
        texts = processor._verify_tokens(convert_ids_list_to_tokens(tokenizer, ids), ids, before[-_CONTEXT:])
        told = zip(row.items(), texts, strict=True)
        made.append({token: {**scores, "decoded_token": text} for (token, scores), text in told})
        before.append(ids[0])
    return made

"""A generate answer as ``/v1/completions`` sends it, whole and streamed.

Keys, their order and their nulls are vLLM's own (0.33). No parser runs on this route: of a derender answer
only the content is taken.

Source: vLLM ``entrypoints/openai/completion/serving.py`` and ``protocol.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import logprobs, usage
from envelope.errors import BadRequest
from envelope.json_codec import Json, dumps
from envelope.passthrough import DONE
from envelope.rebuild import answer_id, choices_of, content_of, model_name, prompt_token_ids
from envelope.sse import frame
from envelope.text_stream import TextStream

if TYPE_CHECKING:
    from envelope.shape import Asked

ID_PREFIX = "cmpl-"
OBJECT = "text_completion"


def refuse(body: Json) -> None:
    """Refuse what cannot be rebuilt from a generate answer.

    ``suffix`` with a text prompt is the renderer's to judge: it knows whether the model fills in the middle.

    Raises:
        BadRequest: echo, beam search, best_of above n, several prompts, or a suffix to a prompt of token ids.
    """
    prompt = body.get("prompt")
    parts = prompt if isinstance(prompt, list) else []
    if body.get("echo"):
        raise BadRequest("echo is not supported: the prompt's text is not in the worker's answer", param="echo")
    if body.get("use_beam_search"):
        raise BadRequest("use_beam_search is not supported: the tokens-in route samples", param="use_beam_search")
    if _number(body.get("best_of")) > _number(body.get("n")):
        raise BadRequest("best_of above n is not supported; ask for n and choose among them", param="best_of")
    if len(parts) > 1 and not isinstance(parts[0], int):
        raise BadRequest("several prompts in one request are not supported; send one each", param="prompt")
    if body.get("suffix") and parts and isinstance(parts[0], (int, list)):
        raise BadRequest("suffix requires a text prompt", param="suffix")


def whole(reply: Json, asked: Asked) -> Json:
    """Return the ``text_completion`` for a whole generate answer in text or derender mode.

    Raises:
        LegFailed: the answer has no choices, or one has neither text nor message.
    """
    return {
        "id": answer_id(reply.get("request_id"), asked, ID_PREFIX),
        "object": OBJECT,
        "created": reply.get("created") or asked.created,
        "model": model_name(reply, asked),
        "choices": [_choice(choice, reply, asked) for choice in choices_of(reply)],
        "service_tier": None,
        "system_fingerprint": None,  # a hash of the worker's configuration, which generate does not tell
        "usage": usage.of_reply(reply, asked.rendered),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": reply.get("metrics"),
    }


class Chunks(TextStream):
    """Rebuilds a text-mode stream as ``text_completion`` events, one for each output.

    An output whose text is held back gives an event with empty text, as vLLM sends it.
    """

    id_prefix = ID_PREFIX
    object = OBJECT
    _after = (
        b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null,'
        b'"weight_versions":null}],"kv_transfer_params":null}\n\n'
    )

    def __init__(self, asked: Asked, **options: Any) -> None:
        super().__init__(asked, **options)
        self._offsets: dict[int, int] = {}  # where the next token begins, in characters; by choice
        self._told: set[int] = set()  # choices that have shown the prompt's ids

    def _plain(self) -> bool:
        return not (self._continuous or self._token_ids or self._asked.body.get("logprobs") is not None)

    def _prefix(self, index: int) -> bytes:
        return b"data: " + dumps(self._head)[:-1] + b',"choices":[{"index":%d,"text":' % index

    def _frame(self, chunk: Json, choice: Json) -> bytes:
        counted = chunk.get("usage") if self._continuous else None
        running = usage.counts(counted["prompt_tokens"], counted["completion_tokens"]) if counted else None
        return self._write([self._shown(chunk, choice)], running, {"kv_transfer_params": None})

    def _shown(self, chunk: Json, choice: Json) -> Json:
        index = choice["index"]
        scores = _logprobs(choice, self._asked.body, self._offsets.get(index, 0))
        self._offsets[index] = logprobs.end_offset(scores, self._offsets.get(index, 0))
        first = self._token_ids and index not in self._told
        self._told.add(index)
        return stream_choice(
            index,
            choice["text"],
            scores,
            finish=(choice.get("finish_reason"), choice.get("stop_reason")),
            prompt=prompt_token_ids(chunk, self._asked) if first else None,
            token_ids=choice.get("token_ids") if self._token_ids else None,
            weights=choice.get("weight_versions") if self._weights else None,
        )


def replay(reply: Json, asked: Asked) -> bytes:
    """Return a whole generate answer as the complete event stream that a streaming client expects.

    Each choice comes in one chunk, its finish included.

    Raises:
        LegFailed: as ``whole``.
    """
    answer = whole(reply, asked)
    head = {key: answer[key] for key in ("id", "object", "created", "model")}
    options = asked.body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    running = include_usage and bool(options.get("continuous_usage_stats"))
    prompt = answer["usage"].get("prompt_tokens") or 0
    frames = []
    for choice, source in zip(answer["choices"], choices_of(reply), strict=True):
        shown = stream_choice(
            choice["index"],
            choice["text"],
            choice["logprobs"],
            finish=(choice["finish_reason"], choice["stop_reason"]),
            prompt=choice["prompt_token_ids"],
            token_ids=choice["token_ids"],
            weights=choice["weight_versions"],
        )
        counted = {"usage": usage.counts(prompt, len(source.get("token_ids") or ()))} if running else {}
        frames.append(frame(dumps({**head, "choices": [shown], **counted, "kv_transfer_params": None})))
    if include_usage:
        frames.append(frame(dumps({**head, "choices": [], "usage": usage.without_nulls(answer["usage"])})))
    return b"".join([*frames, frame(DONE)])


def stream_choice(
    index: int,
    text: str,
    scores: Json | None,
    *,
    finish: tuple[Any, Any],
    prompt: Any,
    token_ids: Any,
    weights: Any,
) -> Json:
    """Return a chunk's choice; ``finish`` is finish_reason and stop_reason."""
    return {
        "index": index,
        "text": text,
        "logprobs": scores,
        "finish_reason": finish[0],
        "stop_reason": finish[1],
        "prompt_token_ids": prompt,
        "token_ids": token_ids,
        "weight_versions": weights,
    }


def _choice(choice: Json, reply: Json, asked: Asked) -> Json:
    body = asked.body
    token_ids = bool(body.get("return_token_ids"))
    finish = choice.get("finish_reason")
    return {
        "index": choice.get("index") or 0,
        "text": content_of(choice) or "",
        "logprobs": _logprobs(choice, body, 0),
        "finish_reason": "stop" if finish == "tool_calls" else finish,
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids") if token_ids else None,
        "prompt_logprobs": reply.get("prompt_logprobs"),
        "prompt_token_ids": prompt_token_ids(reply, asked) if token_ids else None,
        "routed_experts": choice.get("routed_experts"),
        "weight_versions": choice.get("weight_versions") if body.get("return_weight_versions") else None,
    }


def _logprobs(choice: Json, body: Json, offset: int) -> Json | None:
    if body.get("logprobs") is None:
        return None
    return logprobs.to_completion(choice.get("logprobs"), logprobs.completion_limit(body), offset)


def _number(count: Any) -> int:
    return count if isinstance(count, int) else 1

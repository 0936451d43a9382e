"""A generate answer as ``/v1/chat/completions`` sends it, whole and streamed.

Keys, their order and their nulls are vLLM's own (0.33). Only named fields are taken over from the worker, so
that nothing of the tokens-in route leaks: no request_id, output_mode, hand-over, sampling mask, placeholders.

Source: vLLM ``entrypoints/openai/chat_completion/serving.py`` and ``protocol.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import logprobs, usage
from envelope.chat_message import echoed, finish_reason_of, message_of, role
from envelope.json_codec import Json, dumps
from envelope.passthrough import DONE
from envelope.rebuild import answer_id, choices_of, model_name, prompt_token_ids
from envelope.sse import frame
from envelope.text_stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.shape import Asked

ID_PREFIX = "chatcmpl-"
CHUNK = "chat.completion.chunk"


def whole(reply: Json, asked: Asked) -> Json:
    """Return the ``chat.completion`` for a whole generate answer in text or derender mode.

    Raises:
        LegFailed: the answer has no choices, or one has neither text nor message.
    """
    token_ids = bool(asked.body.get("return_token_ids"))
    return {
        "id": answer_id(reply.get("request_id"), asked, ID_PREFIX),
        "object": "chat.completion",
        "created": reply.get("created") or asked.created,
        "model": model_name(reply, asked),
        "choices": [_choice(choice, asked.body) for choice in choices_of(reply)],
        "service_tier": None,
        "system_fingerprint": None,  # a hash of the worker's configuration, which generate does not tell
        "usage": usage.of_reply(reply, asked.rendered),
        "prompt_logprobs": reply.get("prompt_logprobs"),
        "prompt_token_ids": prompt_token_ids(reply, asked) if token_ids else None,
        "prompt_text": None,  # as the fingerprint: not in the answer
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": reply.get("metrics"),
    }


class Chunks(TextStream):
    """Rebuilds a text-mode stream as ``chat.completion.chunk`` events.

    As vLLM does where no parser is configured: a role chunk for each choice when the first output comes, a
    content chunk for each output, a finish chunk, the usage chunk; each kind has its own set of keys. One
    difference: an output whose text is held back gives no empty chunk, unless it shows token ids or logprobs.
    """

    id_prefix = ID_PREFIX
    object = CHUNK
    _after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}\n\n'

    def _plain(self) -> bool:
        return not (self._continuous or self._token_ids or self._asked.body.get("logprobs"))

    def _prefix(self, index: int) -> bytes:
        head = b"data: " + dumps(self._head)[:-1]
        return head + b',"choices":[{"index":%d,"delta":{"content":' % index

    def _opening(self, chunk: Json) -> bytes:
        body = self._asked.body
        counted = chunk.get("usage") or usage.counts(usage.prompt_length(self._asked.rendered), 0)
        running = _running(counted["prompt_tokens"], 0) if self._continuous else None
        prompt = prompt_token_ids(chunk, self._asked) if self._token_ids else None
        spoken = echoed(body)
        deltas = [{"role": role(body), "content": ""}] + ([{"content": spoken}] if spoken else [])
        frames = []
        for delta in deltas:
            rest = {"prompt_token_ids": prompt, "prompt_text": None} if "role" in delta else {}
            for index in range(self._count):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                frames.append(self._write([choice], running, rest))
        return b"".join(frames)

    def _frame(self, chunk: Json, choice: Json) -> bytes:
        index, text, finish = choice["index"], choice["text"], choice.get("finish_reason")
        scores = _logprobs(choice, self._asked.body)
        if not text and finish is None and scores is None and not self._token_ids:
            return b""
        delta = {"content": text} if index in self._started else {}
        shown = _stream_choice(index, delta, scores, choice.get("token_ids") if self._token_ids else None)
        return self._shown(chunk, choice, shown)

    def _shown(self, chunk: Json, choice: Json, shown: Json) -> bytes:
        finish = choice.get("finish_reason")
        if finish is not None:
            weights = choice.get("weight_versions") if self._weights else None
            shown = _finish(shown, finish, choice.get("stop_reason"), weights)
        counted = chunk.get("usage") if self._continuous else None
        running = _running(counted["prompt_tokens"], counted["completion_tokens"]) if counted else None
        return self._write([shown], running, {"kv_transfer_params": None})


class ParsedChunks(Chunks):
    """Rebuilds a parsed stream, which has a ``delta`` in the place of text: as vLLM does where there are parsers.

    A ``delta`` is what the parser had to say about an output: any of ``content``, ``reasoning`` and ``tool_calls``,
    or null. An output of which there is nothing to say gives no chunk, unless it shows token ids or logprobs.
    """

    _after = b',"logprobs":null,"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}\n\n'

    def _prefix(self, index: int) -> bytes:
        return b"data: " + dumps(self._head)[:-1] + b',"choices":[{"index":%d,"delta":' % index

    def _choice(self, chunk: Json, choice: Json, event: bytes = b"") -> bytes:
        delta, before = choice["delta"], self._before.get(choice["index"])
        if before is not None and delta and choice["finish_reason"] is None:
            self.content_seen = self.content_seen or any(delta.values())
            return before + dumps(delta) + self._after
        return self._special(chunk, choice)

    def _said(self, choice: Json) -> Json | None:
        delta: Json | None = choice["delta"]
        return delta if delta and any(delta.values()) else None

    def _frame(self, chunk: Json, choice: Json) -> bytes:
        delta, finish = choice["delta"], choice.get("finish_reason")
        scores = _logprobs(choice, self._asked.body)
        token_ids = choice.get("token_ids") if self._token_ids else None
        if delta is None and finish is None and scores is None and token_ids is None:
            return b""
        shown = _stream_choice(choice["index"], delta or {}, scores, token_ids)
        return self._shown(chunk, choice, shown)


def replay(reply: Json, asked: Asked) -> bytes:
    """Return a whole generate answer as the complete event stream that a streaming client expects.

    The text of each choice comes in one delta per kind: reasoning, content, then two per tool call. Logprobs
    and token ids, which cover all of it, are on the choice's first delta.

    Raises:
        LegFailed: as ``whole``.
    """
    answer = whole(reply, asked)
    options = asked.body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    continuous = include_usage and bool(options.get("continuous_usage_stats"))
    head = {"id": answer["id"], "object": CHUNK, "created": answer["created"], "model": answer["model"]}
    prompt = answer["usage"].get("prompt_tokens") or 0

    def write(choice: Json, completion: int, rest: Json) -> bytes:
        running = {"usage": _running(prompt, completion)} if continuous else {}
        return frame(dumps({**head, "choices": [choice], **running, **rest}))

    frames = [
        write(_role_choice(choice), 0, {"prompt_token_ids": answer["prompt_token_ids"], "prompt_text": None})
        for choice in answer["choices"]
    ]
    for choice, source in zip(answer["choices"], choices_of(reply), strict=True):
        made = len(source.get("token_ids") or ())
        frames += [write(part, made, {"kv_transfer_params": None}) for part in _parts(choice)]
    if include_usage:
        frames.append(frame(dumps({**head, "choices": [], "usage": usage.without_nulls(answer["usage"])})))
    return b"".join([*frames, frame(DONE)])


def _role_choice(choice: Json) -> Json:
    delta = {"role": choice["message"]["role"], "content": ""}
    return {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}


def _parts(choice: Json) -> Iterator[Json]:
    """Yield the stream choices that carry a whole choice, the finish last."""
    scores, token_ids = choice["logprobs"], choice["token_ids"]
    for delta in _deltas(choice["message"]):
        yield _stream_choice(choice["index"], delta, scores, token_ids)
        scores, token_ids = None, None if token_ids is None else []
    last = _stream_choice(choice["index"], {}, scores, token_ids)
    yield _finish(last, choice["finish_reason"], choice["stop_reason"], choice["weight_versions"])


def _deltas(message: Json) -> Iterator[Json]:
    for key in ("reasoning", "content", "refusal"):
        if message.get(key):
            yield {key: message[key]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        name = {"name": function.get("name")}
        first = {"id": call.get("id"), "type": "function", "index": index, "function": name}
        yield {"content": None, "tool_calls": [first]}
        arguments = {"arguments": function.get("arguments") or ""}
        yield {"content": None, "tool_calls": [{"index": index, "function": arguments}]}


def _stream_choice(index: int, delta: Json, scores: Json | None, token_ids: Any) -> Json:
    return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None, "token_ids": token_ids}


def _finish(shown: Json, reason: Any, stop_reason: Any, weights: Any) -> Json:
    """Return a finish chunk's choice, whose keys stand in vLLM's order."""
    token_ids = shown["token_ids"]
    ended = {**shown, "finish_reason": reason}
    del ended["token_ids"]
    return {**ended, "stop_reason": stop_reason, "token_ids": token_ids, "weight_versions": weights}


def _running(prompt_tokens: int, completion_tokens: int) -> Json:
    return {**usage.counts(prompt_tokens, completion_tokens), "completion_tokens_details": None}


def _choice(choice: Json, body: Json) -> Json:
    # Worker's derender has cut its logprobs, which a second cut leaves as they are; our own parsers have not.
    cut = body.get("logprobs") or not isinstance(choice.get("message"), dict)
    return {
        "index": choice.get("index") or 0,
        "message": message_of(choice, body),
        "logprobs": _logprobs(choice, body) if cut else choice.get("logprobs"),
        "finish_reason": finish_reason_of(choice, body),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids") if body.get("return_token_ids") else None,
        "routed_experts": choice.get("routed_experts"),
        "weight_versions": choice.get("weight_versions") if body.get("return_weight_versions") else None,
    }


def _logprobs(choice: Json, body: Json) -> Json | None:
    return logprobs.cut(choice.get("logprobs"), logprobs.chat_limit(body)) if body.get("logprobs") else None

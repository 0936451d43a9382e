"""A worker for every role that takes any request and says the right thing, or what a test makes of it.

The simulated fleet refuses what vLLM refuses, so little of what is odd gets past it. This one lets everything pass:
what is odd in a client's request meets the coordinator's own code to the last leg, and what is odd in an answer can be
made so by a function.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    TwistBody = Callable[[str, Any], Any]
    TwistRaw = Callable[[str, bytes], bytes]

TEXT = "Hello there."
_HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e1",
    "remote_request_id": "r1",
    "remote_host": "10.9.9.9",
    "remote_port": 5600,
    "tp_size": 1,
}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None}


@dataclass
class Parrot:
    """
    Attributes:
        twist_body: gets the leg's name and each JSON value of its answer, and returns another.
        twist_raw: gets the leg's name and its whole answer as bytes, and returns others; the connection ends with them.
        url, prefill_url: two addresses of the same, since no worker can hand anything over to itself.
        said: how many answers were given.
    """

    twist_body: TwistBody | None = None
    twist_raw: TwistRaw | None = None
    url: str = ""
    prefill_url: str = ""
    said: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Parrot:
        self._server = await asyncio.start_server(self._serve, ["127.0.0.1", "127.0.0.2"], 0, limit=2**24)
        self.url, self.prefill_url = ("http://{}:{}".format(*plug.getsockname()) for plug in self._server.sockets)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        lengths = [line.split(":")[1] for line in head if line.lower().startswith("content-length:")]
        raw = await reader.readexactly(int(lengths[0])) if lengths else b""
        body = json.loads(raw) if raw else None
        if method == "GET" or body == {}:  # readiness
            writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n" if raw else _json({"data": []}))
            return True
        leg, answer = _right(path, body)
        self.said += 1
        if self.twist_body is not None:
            twist = self.twist_body
            answer = [twist(leg, one) for one in answer] if isinstance(answer, list) else twist(leg, answer)
        out = _stream(answer) if isinstance(answer, list) and _wants_stream(body) else _json(answer)
        if self.twist_raw is not None:
            twisted = self.twist_raw(leg, out)
            if twisted != out:
                writer.write(twisted)
                return False
        writer.write(out)
        return True


def _wants_stream(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("stream"))


def _right(path: str, body: Any) -> tuple[str, Any]:
    """Return the leg's name and its answer; a stream is a list."""
    if path.endswith("/render"):
        rendered = _rendered(path)
        return "render", [rendered] if "completions/render" in path and "chat" not in path else rendered
    if path == "/v1/messages/count_tokens":
        return "decode", {"input_tokens": 3}
    kv = body.get("kv_transfer_params") or {}
    prefill = isinstance(kv, dict) and bool(kv.get("do_remote_decode"))
    handover = _HANDOVER if prefill else None
    leg = "prefill" if prefill else "decode"
    if path == "/inference/v1/generate":
        answer: Any = _generated(body, handover)
    else:
        answer = _OPENAI[path](body, handover)
    return leg, answer


def _rendered(path: str) -> Any:
    parse_context = {"chat_request": {}} if "chat" in path or "messages" in path else None
    return {
        "request_id": "chatcmpl-x",
        "token_ids": [1, 2, 3],
        "features": None,
        "sampling_params": {"max_tokens": 5, "temperature": 0.7},
        "model": "tiny",
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "output_mode": "tokens",
        "parse_context": parse_context,
        "stream": False,
        "priority": 0,
        "kv_transfer_params": None,
    }


def _generated(body: Any, handover: Any) -> Any:
    mode = body.get("output_mode") or "tokens"
    head = {"request_id": "generate-tokens-x", "output_mode": mode}
    choice = {"index": 0, "token_ids": [4, 5], "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    if _wants_stream(body):
        pieces = [("Hello", None), (" there.", None), ("", "stop")]
        chunks = [
            {**head, "usage": None, "choices": [{**choice, "text": text, "token_ids": [4], "finish_reason": finish}]}
            for text, finish in pieces
        ]
        return [*chunks, {**head, "choices": [], "usage": _USAGE}, "[DONE]"]
    if mode == "derender":
        choice["message"] = {"role": "assistant", "content": TEXT, "reasoning": None, "tool_calls": []}
    elif mode == "text":
        choice["text"] = TEXT
    return {**head, "model": "tiny", "usage": _USAGE, "choices": [choice], "kv_transfer_params": handover}


def _chat(body: Any, handover: Any) -> Any:
    head = {"id": "chatcmpl-x", "created": 1, "model": "tiny"}
    if _wants_stream(body):
        deltas: list[tuple[Any, Any]] = [({"role": "assistant", "content": ""}, None), ({"content": TEXT}, None)]
        deltas.append(({}, "stop"))
        chunks = [
            {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "finish_reason": f}]}
            for d, f in deltas
        ]
        return [*chunks, {**head, "choices": [], "usage": _USAGE}, "[DONE]"]
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE, "kv_transfer_params": handover}


def _completion(body: Any, handover: Any) -> Any:
    head = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": "tiny"}
    choice = {"index": 0, "text": TEXT, "finish_reason": "stop", "logprobs": None}
    if _wants_stream(body):
        return [{**head, "choices": [choice]}, "[DONE]"]
    return {**head, "choices": [choice], "usage": _USAGE, "kv_transfer_params": handover}


def _response(body: Any, handover: Any) -> Any:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]}
    whole = {"id": "resp_x", "object": "response", "status": "completed", "output": [item], "usage": None}
    if _wants_stream(body):
        return [
            {"type": "response.created", "sequence_number": 0, "response": {**whole, "output": []}},
            {"type": "response.output_text.delta", "sequence_number": 1, "delta": TEXT},
            {"type": "response.completed", "sequence_number": 2, "response": whole},
        ]
    return {**whole, "kv_transfer_params": handover}


def _message(body: Any, handover: Any) -> Any:
    whole = {"id": "msg_x", "type": "message", "role": "assistant", "content": [{"type": "text", "text": TEXT}]}
    if _wants_stream(body):
        return [
            {"type": "message_start", "message": {**whole, "content": []}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
            {"type": "message_stop"},
        ]
    return {**whole, "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 2},
            "kv_transfer_params": handover}  # fmt: skip


_OPENAI = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
}


def _json(body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _stream(events: list[Any]) -> bytes:
    def event(one: Any) -> bytes:
        if isinstance(one, bytes):
            return one
        data = one if one == "[DONE]" else json.dumps(one)
        name = f"event: {one['type']}\n" if isinstance(one, dict) and isinstance(one.get("type"), str) else ""
        return f"{name}data: {data}\n\n".encode("utf-8", "surrogatepass")

    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = [event(one) for one in events]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in raw if one) + b"0\r\n\r\n"

"""A stand-in for one vLLM worker that costs next to nothing, so that a measurement sees the proxy and not the worker.

Answers are bytes that were made beforehand, in the shapes of vLLM 0.33 (``tests/data/recordings``). Streams get their
tokens in batches, one per step of an engine, as real ones do, and each chunk holds the time at which it was written:
``@0123456789012345678@``, nanoseconds of the monotonic clock, which processes of one machine share.

What a request asks for travels in fields that every proxy lets through: ``max_tokens`` (or ``max_completion_tokens``)
is the length of the answer, ``seed`` the microseconds between its tokens (0: as fast as they can be written).

Real workers answer a prefill leg by what it asks for; here the role alone decides, so that no proxy is slowed down by
how it writes the leg.

``GET /counts`` tells how many requests came, and how many of them carried a prefill worker's hand-over: how the runner
knows that a proxy did the legs that it is said to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from functools import cache
from typing import Any

import httptools

ENGINE_ID = "engine-of-the-fake-prefill-worker"
DEFAULT_TOKENS = 16

# The streams of a proxy come from many workers, whose engines do not step at the same time.
BATCHES = 8

HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[6, 5, 3, 8, 9, 12, 2, 4]],
    "remote_engine_id": ENGINE_ID,
    "remote_request_id": "chatcmpl-p6-b6757074",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 128,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 1,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 64,
}


def answer(body: Any, status: str = "200 OK") -> bytes:
    """Return a whole HTTP answer with a JSON body."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {len(raw)}\r\ncontent-type: application/json\r\n\r\n"
    )
    return head.encode() + raw


OK = answer({"status": "ok", "served_model_name": "tiny", "is_generation": True})
MODELS = answer({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm"}]})
NO_BODY = answer(
    {"error": {"message": "a body is needed", "type": "Bad Request", "param": None, "code": 400}}, "400 Bad"
)


def usage(tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": 128, "total_tokens": 128 + tokens, "completion_tokens": tokens}
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}


@cache
def chat_answer(tokens: int, handover: bool) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * tokens, "refusal": None, "tool_calls": []},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
    }
    return answer(
        {
            "id": "chatcmpl-d",
            "object": "chat.completion",
            "created": 1795991732,
            "model": "tiny",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": "vllm-0.33.0-79908ff0",
            "usage": usage(tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": HANDOVER if handover else None,
        }
    )


@cache
def generate_answer(tokens: int, handover: bool, mode: str) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": list(range(1000, 1000 + tokens)),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None,
    }
    if mode == "text":
        choice["text"] = "word " * tokens
    if mode == "derender":
        choice["message"] = {"role": "assistant", "content": "word " * tokens, "reasoning": None, "tool_calls": []}
    return answer(
        {
            "request_id": "generate-tokens-d",
            "model": "tiny",
            "created": 1795992607,
            "usage": usage(tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": HANDOVER if handover else None,
            "ec_transfer_params": None,
            "output_mode": mode,
            "choices": [choice],
        }
    )


@cache
def rendered(prompt_tokens: int, tokens: int, seed: int) -> bytes:
    """Return what a render service makes of a chat: ids from a vocabulary of a usual size."""
    dice = random.Random(prompt_tokens)
    template = {"add_generation_prompt": True, "continue_final_message": False}
    return answer(
        {
            "request_id": "chatcmpl-r",
            "token_ids": [dice.randrange(151_000) for _ in range(prompt_tokens)],
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "temperature": 0.0,
                "seed": seed,
                "stop": [],
                "stop_token_ids": [],
                "max_tokens": tokens,
                "skip_special_tokens": False,
                "output_kind": 2,
                "skip_clone": True,
                "bad_words": [],
            },
            "model": "tiny",
            "reasoning_ended": False,
            "reasoning_parser_kwargs": {"chat_template_kwargs": template},
            "return_token_ids": None,
            "output_mode": "tokens",
            "parse_context": {
                "tools": None,
                "tool_choice": "none",
                "parallel_tool_calls": True,
                "include_reasoning": True,
                "chat_template_kwargs": template,
                "history_tool_call_cnt": 0,
            },
            "stream": False,
            "stream_options": None,
            "cache_salt": None,
            "priority": 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
    )


def chunk(event: bytes) -> bytes:
    """Frame an event as one chunk of the HTTP body, which is how uvicorn sends it."""
    event = b"data: %b\n\n" % event
    return b"%x\r\n%b\r\n" % (len(event), event)


class Template:
    """The bytes of a stream: what opens it, a token before and after its stamp, and what closes it."""

    def __init__(self, opening: bytes, token: bytes, closing: bytes, *, framed: bytes = b"0123456789012345678") -> None:
        self.opening = (
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + (chunk(opening) if opening else b"")
        )
        self.before, self.after = chunk(token.replace(b"STAMP", framed)).split(framed)
        self.closing = chunk(closing) + chunk(b"[DONE]") + b"0\r\n\r\n"


_CHUNK = (
    b'{"id":"chatcmpl-d","object":"chat.completion.chunk","created":1795991732,"model":"tiny","choices":[{"index":0,'
)
_GENERATED = (
    b'{"request_id":"generate-tokens-d","usage":null,"output_mode":"text","choices":[{"index":0,"finish_reason":'
)
_TAIL = b'"routed_experts":null,"sampling_mask":null,"weight_versions":null,"text":"'

CHAT_STREAM = Template(
    _CHUNK + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null}',
    _CHUNK + b'"delta":{"content":" w@STAMP@"},"logprobs":null,"finish_reason":null,"token_ids":null}],'
    b'"kv_transfer_params":null}',
    _CHUNK + b'"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    b'"weight_versions":null}],"system_fingerprint":"vllm-0.33.0-1ef91a68","kv_transfer_params":null}',
)
GENERATE_STREAM = Template(
    b"",
    _GENERATED + b'null,"stop_reason":null,"token_ids":[1234],' + _TAIL + b' w@STAMP@","logprobs":null}]}',
    _GENERATED + b'"length","stop_reason":null,"token_ids":[],' + _TAIL + b'","logprobs":null}]}',
)


class Stream:
    """One open answer."""

    __slots__ = ("left", "template", "transport")

    def __init__(self, transport: asyncio.Transport, template: Template, tokens: int) -> None:
        self.transport = transport
        self.template = template
        self.left = tokens
        transport.write(template.opening)

    def step(self) -> bool:
        """Write one token; False when the answer is over."""
        if self.transport.is_closing():
            return False
        template = self.template
        self.transport.write(b"%b%019d%b" % (template.before, time.monotonic_ns(), template.after))
        self.left -= 1
        if self.left <= 0:
            self.transport.write(template.closing)
        return self.left > 0


class Engine:
    """Steps the streams of one batch together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pace_s: float, phase: float) -> None:
        self._loop = loop
        self._pace_s = pace_s
        self._phase = phase
        self._streams: set[Stream] = set()
        self._due = 0.0

    def add(self, stream: Stream) -> None:
        """Take a stream in. Its first token comes at once: prefill has computed it."""
        if not stream.step():
            return
        if not self._streams and self._pace_s:
            steps = self._loop.time() // self._pace_s
            self._due = (steps + self._phase) * self._pace_s
        first = not self._streams
        self._streams.add(stream)
        if first:
            self._next()

    def drop(self, stream: Stream) -> None:
        self._streams.discard(stream)

    def _next(self) -> None:
        now = self._loop.time()
        # A late engine goes on from now: two tokens in one write would be cheaper for a proxy than they are.
        self._due = max(self._due + self._pace_s, now)
        self._loop.call_later(self._due - now, self._step)

    def _step(self) -> None:
        self._streams.difference_update([stream for stream in tuple(self._streams) if not stream.step()])
        if self._streams:
            self._next()


class Server:
    """What all connections of one worker share."""

    def __init__(self, role: str, loop: asyncio.AbstractEventLoop) -> None:
        self.role = role
        self.requests = 0
        self.handed_over = 0
        self._loop = loop
        self._engines: dict[int, list[Engine]] = {}
        self._streams = 0

    def engine(self, pace_us: int) -> Engine:
        """Return the engine for the next stream."""
        if pace_us not in self._engines:
            phases = [batch / BATCHES for batch in range(BATCHES)]
            self._engines[pace_us] = [Engine(self._loop, pace_us / 1e6, phase) for phase in phases]
        self._streams += 1
        return self._engines[pace_us][self._streams % BATCHES]

    def counts(self) -> bytes:
        return answer({"role": self.role, "requests": self.requests, "handed_over": self.handed_over})


class Connection(asyncio.Protocol):
    """One connection of a proxy."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stream: tuple[Engine, Stream] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream's

    def connection_lost(self, error: Exception | None) -> None:
        if self._stream is not None:
            engine, stream = self._stream
            engine.drop(stream)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._path, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        path, body = self._path.partition(b"?")[0], b"".join(self._body)
        if self._parser.get_method() == b"GET":
            self._transport.write({b"/v1/models": MODELS, b"/counts": self._server.counts()}.get(path, OK))
        elif len(body) < 3:  # {}: a probe that asks whether the route is there
            self._transport.write(NO_BODY)
        else:
            self._work(path, body)

    def _work(self, path: bytes, body: bytes) -> None:
        server = self._server
        server.requests += 1
        server.handed_over += ENGINE_ID.encode() in body
        tokens = number(body, b"max_tokens", 0) or number(body, b"max_completion_tokens", DEFAULT_TOKENS)
        pace_us = number(body, b"seed", 0)
        generate = path.endswith(b"/generate")
        if path.endswith(b"/render"):
            self._transport.write(rendered(max(len(body) // 4, 16), tokens, pace_us))
        elif says(body, b'"stream"', b"true"):
            engine = server.engine(pace_us)
            template = GENERATE_STREAM if generate else CHAT_STREAM
            stream = Stream(self._transport, template, 1 if server.role == "prefill" else tokens)
            self._stream = engine, stream
            engine.add(stream)
        elif server.role == "prefill":
            self._transport.write(generate_answer(1, True, "tokens") if generate else chat_answer(1, True))
        elif generate:
            self._transport.write(generate_answer(tokens, False, output_mode(body)))
        else:
            self._transport.write(chat_answer(tokens, False))


def number(body: bytes, name: bytes, default: int) -> int:
    """Read an integer field without parsing the body; the last one wins, and a prompt comes before the parameters."""
    start = body.rfind(b'"%b":' % name)
    if start < 0:
        return default
    digits = body[start + len(name) + 3 : start + len(name) + 24].lstrip()
    end = next((at for at, byte in enumerate(digits) if not 48 <= byte <= 57), len(digits))
    return int(digits[:end]) if end else default


def says(body: bytes, key: bytes, value: bytes) -> bool:
    return body.rfind(b"%b:%b" % (key, value)) >= 0 or body.rfind(b"%b: %b" % (key, value)) >= 0


def output_mode(body: bytes) -> str:
    modes = ("derender", "text")
    return next((mode for mode in modes if says(body, b'"output_mode"', b'"%b"' % mode.encode())), "tokens")


async def serve(role: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    state = Server(role, loop)
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--role", choices=["render", "prefill", "decode"], required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()

    import uvloop

    uvloop.run(serve(options.role, options.port))


if __name__ == "__main__":
    main()

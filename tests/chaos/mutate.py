"""Makes odd things out of right ones: bytes and JSON values, by chance with a known seed."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

# What parsers and framing stumble over.
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b"\xff", b"\xe2\x82", b"\xe2\x80\xa8", b" ", b"\t", b":", b",", b";", b'"', b"\\",
    b"{", b"}", b"[", b"]", b"data: ", b"data:", b"event: error\n", b": \n", b"id: 1\n", b"[DONE]", b"data: [DONE]\n\n",
    b"null", b"NaN", b"1e999", b"-1", b"0", b"9" * 25, b"\\ud800", b"\xef\xbb\xbf", b"0\r\n\r\n", b"ffffffff\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Content-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n", b"Content-Type: text/event-stream\r\n", b"Upgrade: h2c\r\n", b"x" * 3000, b'"error"',
    b'{"error":{}}', b'{"error":"x"}',
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, 2**70, -(2**63) - 1, float("nan"),
    float("inf"), "", "x", "0", "null", "\ud800", "\0", "a\u2028b", "x" * 5000, [], [[]], [None], ["x"], [0], [1.5],
    [{}], {}, {"": None}, {"a": {"b": {}}}, {"type": "x"}, {"type": None}, {"url": "data:,x"},
    "data:image/png;base64,A",
    ["x", 1, None, {}], [[1, 2], [3]], [-1], [2**40],
)  # fmt: skip

# Names that some API, route or leg reads.
KEYS = (
    "model", "messages", "role", "content", "type", "text", "name", "tools", "tool_choice", "tool_calls", "function",
    "arguments", "id", "index", "parameters", "response_format", "json_schema", "schema", "stream", "stream_options",
    "include_usage", "continuous_usage_stats", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens",
    "n", "best_of", "stop", "stop_sequences", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
    "logit_bias", "seed", "temperature", "top_p", "top_k", "prompt", "input", "system", "thinking", "budget_tokens",
    "reasoning", "reasoning_effort", "metadata", "user", "suffix", "cache_salt", "priority", "token_ids", "features",
    "sampling_params", "extra_args", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "output_mode",
    "image_url", "input_audio", "parse_context", "chat_request", "chat_template_kwargs", "return_token_ids",
    "use_beam_search", "structured_outputs", "previous_response_id", "background", "store", "instructions", "include",
    "truncation",
    "request_id", "choices", "message", "delta", "finish_reason", "stop_reason", "usage", "prompt_tokens",
    "completion_tokens", "prompt_tokens_details", "error", "code", "created", "bytes", "token", "weight_versions",
    "prompt_token_ids", "reasoning_ended", "reasoning_parser_kwargs", "documents", "mm_placeholders", "text_offset",
)  # fmt: skip


def bytes_mutant(raw: bytes, rng: random.Random) -> bytes:
    """Return a text of bytes with a few things done to it."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        to = min(len(out), at + rng.choice((1, 1, 2, 5, 40)))
        match rng.randrange(7):
            case 0:
                out[at:to] = b""
            case 1:
                out[at:at] = rng.choice(TOKENS)
            case 2:
                out[at:to] = rng.choice(TOKENS)
            case 3 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 4:
                out[at:at] = out[at:to] * rng.choice((1, 2, 9))
            case 5:
                del out[at:]
            case _:
                out = bytearray(_lines_mutant(bytes(out), rng))
    return bytes(out)


def _lines_mutant(raw: bytes, rng: random.Random) -> bytes:
    """Drop, double, swap or re-end lines."""
    lines = raw.split(b"\r\n") if b"\r\n" in raw else raw.split(b"\n")
    end = b"\r\n" if b"\r\n" in raw else b"\n"
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            end = rng.choice((b"\n", b"\r", b"\r\n", b"\r\r\n"))
        case _:
            lines[at] = rng.choice(TOKENS) + lines[at]
    return end.join(lines)


def json_mutant(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with a few things done to it."""
    out = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder, key = rng.choice(_places(out))
        _change(holder, key, rng)
    return out[0] if out else None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a value, as what holds it and its key or index."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        found += _places(item)
    return found


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    item = holder[key]
    match rng.randrange(8):
        case 0 if not (isinstance(holder, list) and len(holder) == 1):
            del holder[key]
        case 1 if isinstance(item, dict):
            item[rng.choice(KEYS)] = rng.choice(VALUES)
        case 2 if isinstance(item, dict) and item:
            item[rng.choice(KEYS)] = item.pop(rng.choice(list(item)))
        case 3 if isinstance(item, list) and item:
            item.append(rng.choice(item))
        case 4:
            holder[key] = [item]
        case 5:
            holder[key] = {rng.choice(KEYS): item}
        case 6 if isinstance(item, (int, float)) and not isinstance(item, bool):
            holder[key] = -item
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))


def text_of(value: Any) -> bytes:
    """Write a value as JSON, also where JSON has no word for it."""
    return json.dumps(value).encode()

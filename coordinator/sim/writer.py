"""Writes an answer to a socket, as badly as it was told to."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import aclosing
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from coordinator.sim.answers import DONE, Answer, Cut, Frame, Stream, Whole
from coordinator.sim.messages import AnthropicRefusal
from coordinator.sim.refusals import failed

if TYPE_CHECKING:
    from coordinator.sim.faults import Canned, Fault

EVENT_STREAM = "text/event-stream; charset=utf-8"


async def misbehave_early(request: web.Request, fault: Fault) -> web.StreamResponse | None:
    """Do what goes wrong before the request is even looked at; return the answer, if that is all there will be."""
    if fault.hang:
        await asyncio.Event().wait()
    await asyncio.sleep(fault.first_byte_s)
    if fault.drop:
        _reset(request)
    if fault.canned is not None:
        return _canned(fault.canned)
    return None


async def write(request: web.Request, answer: Answer, fault: Fault) -> web.StreamResponse:
    if isinstance(answer, Whole):
        return await _write_whole(request, answer, fault)
    return await _write_stream(request, answer, fault)


async def _write_whole(request: web.Request, answer: Whole, fault: Fault) -> web.StreamResponse:
    if answer.body is None:
        return web.Response(status=answer.status, headers=dict(answer.headers))
    if isinstance(answer.body, str):
        return web.Response(status=answer.status, headers=dict(answer.headers), text=answer.body)
    body = answer.body
    if fault.rewrite is not None and isinstance(body, dict) and answer.status == 200:
        body = fault.rewrite(body)
    raw = orjson.dumps(body)
    headers = [*answer.headers, ("Content-Type", fault.content_type or "application/json")]
    if fault.gzip:
        raw = gzip.compress(raw)
        headers.append(("Content-Encoding", "gzip"))
    if fault.truncate == "clean":
        raw = raw[: len(raw) // 2]
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = len(raw)
    await response.prepare(request)
    if fault.truncate == "cut":
        await response.write(raw[: len(raw) // 2])
        _reset(request)
    await response.write(raw)
    await response.write_eof()
    return response


async def _write_stream(request: web.Request, answer: Stream, fault: Fault) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": fault.content_type or EVENT_STREAM})
    response.enable_chunked_encoding()
    if fault.gzip:
        response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    await asyncio.sleep(fault.first_event_s)
    if fault.only_done:
        await response.write(DONE.encode())
        await response.write_eof()
        return response
    try:
        async with aclosing(answer.frames) as frames:
            count = 0
            async for frame in frames:
                if await _stop_at(count, frame, request, response, fault):
                    break
                await _write_event(response, _rewritten(frame, fault).encode(), fault)
                count += 1
    except Cut:
        _reset(request)
    await response.write_eof()
    return response


async def _stop_at(count: int, frame: Frame, request: web.Request, response: web.StreamResponse, fault: Fault) -> bool:
    """Do what goes wrong before event number ``count``; say whether the stream ends there."""
    if count == fault.hang_after:
        await asyncio.Event().wait()
    if count == fault.die_after:
        _reset(request)
    if count == fault.half_event_after:
        raw = frame.encode()
        await response.write(raw[: len(raw) // 2])
        _reset(request)
    if count == fault.error_after:
        await response.write(_error(request.path, frame))
        return True
    return count == fault.end_after


def _error(path: str, instead: Frame) -> bytes:
    """Return the events that a stream fails with, in the place of the next one."""
    refusal = failed()
    if path.endswith("/v1/messages"):
        return Frame(AnthropicRefusal(refusal.message, status=refusal.status).body(), event="error").encode()
    return Frame(refusal.body(), spaced=instead.spaced).encode() + DONE.encode()


async def _write_event(response: web.StreamResponse, event: bytes, fault: Fault) -> None:
    if fault.comments:
        await response.write(b": keep-alive\n\n")
    size = fault.slice_bytes or len(event)
    for start in range(0, len(event), size):
        await response.write(event[start : start + size])
        await asyncio.sleep(0)  # so that each slice is sent by itself


def _rewritten(frame: Frame, fault: Fault) -> Frame:
    if fault.rewrite is None or isinstance(frame.data, str):
        return frame
    return Frame(fault.rewrite(dict(frame.data)), frame.event, frame.spaced)


def _canned(canned: Canned) -> web.Response:
    body = canned.body.encode() if isinstance(canned.body, str) else canned.body
    headers = [*canned.headers, ("Content-Type", canned.content_type)]
    return web.Response(status=canned.status, body=body, headers=headers)


class Reset(Exception):
    """The connection has been reset on purpose."""


def _reset(request: web.Request) -> None:
    """Break the connection off without an end.

    Raises:
        Reset: always.
    """
    transport = request.transport
    if transport is not None:
        transport.abort()
    raise Reset

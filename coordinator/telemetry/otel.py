"""Spans by OpenTelemetry: one for a request, and one for each call of a worker, all children of the request's.

Where they go, and how many are taken, the standard environment says: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``_HEADERS``,
``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ``OTEL_BSP_*`` and so on. A thread of the SDK exports them in batches;
while a collector is down, spans are dropped, and no request waits. Nothing is done per chunk.

Source: OpenTelemetry's semantic conventions for HTTP, and for generative AI (``gen_ai.*``, in development).
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from coordinator.telemetry.tracing import BAGGAGE, TRACEPARENT, TRACESTATE, valid, within_limits, without_trace
from coordinator.version import DISTRIBUTION, version
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from multidict import CIMultiDict
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from coordinator.context import Attempt, Headers, RequestContext
    from coordinator.outcome import Outcome
    from coordinator.step import Leg

_SHUTDOWN_S = 5.0

_OPERATIONS = {
    Format.CHAT: "chat",
    Format.RESPONSES: "chat",
    Format.MESSAGES: "chat",
    Format.COMPLETIONS: "text_completion",
    Format.GENERATE: "text_completion",
}
_PROVIDER = "vllm"

# What a request asks for, by the attribute that tells of it; the first of the keys that is a number counts.
_NUMBERS = {
    "gen_ai.request.max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "gen_ai.request.temperature": ("temperature",),
    "gen_ai.request.top_p": ("top_p",),
    "gen_ai.request.choice.count": ("n",),
}
_LONGEST_NAME = 256


class OtelTracing:
    """Exports spans. Implements ``coordinator.telemetry.tracing.Tracing``.

    Raises:
        ValueError: the environment asks for what is not here.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        own = {"service.name": DISTRIBUTION, "service.version": version()}
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        # At exit it would wait for a collector that is down, without a bound; ``close`` has one.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _exporter(environ)
        self._tracer = self._provider.get_tracer("coordinator", version())

    def start(self) -> None:
        """Begin to export: this starts a thread."""
        if self._exporter is not None:
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def begin(self, method: str, path: str, headers: CIMultiDict[str]) -> OtelTrace:
        attributes = {"http.request.method": method, "http.route": path, "url.path": path}
        span = self._tracer.start_span(f"{method} {path}", _parent(headers), SpanKind.SERVER, attributes)
        return OtelTrace(self._tracer, span)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Export meanwhile."""
        self.start()
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Send what there is, if a collector takes it in time; never longer."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # Not a thread of the loop's pool: for those the process waits at its end.
        threading.Thread(target=shut_down, name="spans", daemon=True).start()
        with suppress(TimeoutError):  # the SDK has logged that its collector cannot be reached
            async with asyncio.timeout(_SHUTDOWN_S):
                await done.wait()


class OtelTrace:
    """One request's span. Implements ``coordinator.telemetry.tracing.Trace``."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)

    def carry(self, headers: Headers) -> Headers:
        if any(name.lower() == BAGGAGE for name, _ in headers):
            headers = within_limits(headers)
        return (*without_trace(headers), *_headers(self._span))

    def leg(self, leg: Leg, url: str, number: int) -> OtelLeg:
        attributes: dict[str, Any] = {"coordinator.step": leg.step, "coordinator.role": leg.role}
        if self._span.is_recording():
            attributes |= _called(leg, url, number)
        return OtelLeg(self._tracer.start_span(leg.step, self._context, SpanKind.CLIENT, attributes))

    def end(self, ctx: RequestContext | None, outcome: Outcome) -> None:
        span = self._span
        if span.is_recording():
            span.set_attributes(_ended(outcome) if ctx is None else {**_asked(ctx), **_ended(outcome)})
            if outcome.error and (outcome.status >= 500 or outcome.word == "stream_broken"):
                span.set_status(StatusCode.ERROR)
        span.end()


class OtelLeg:
    """One call's span. Implements ``coordinator.telemetry.tracing.LegTrace``."""

    __slots__ = ("_span", "headers")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers = _headers(span)

    def end(self, attempt: Attempt) -> None:
        self._span.set_attribute("coordinator.outcome", attempt.outcome)
        if attempt.outcome not in ("ok", "cancelled"):  # a client that leaves is no failure of the worker
            self._span.set_attribute("error.type", attempt.outcome)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    chosen = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if chosen not in ("otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {chosen}, write otlp or none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            if protocol != "http/protobuf":
                raise ValueError(f"{name} is {protocol}, and spans go by http/protobuf: write that, and its port")
            break
    return None if chosen == "none" else OTLPSpanExporter()


def _parent(headers: CIMultiDict[str]) -> Context | None:
    """Return a client's span, or None where it sent none that is valid, or several."""
    values = headers.getall(TRACEPARENT, [])
    if len(values) != 1 or not valid(values[0]):
        return None
    _, trace_id, span_id, flags, *_ = values[0].split("-")
    state = TraceState.from_header(headers.getall(TRACESTATE, []))
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)), state)
    return set_span_in_context(NonRecordingSpan(context))


def _headers(span: Span) -> Headers:
    context = span.get_span_context()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if not context.trace_state:
        return ((TRACEPARENT, parent),)
    return ((TRACEPARENT, parent), (TRACESTATE, context.trace_state.to_header()))


def _called(leg: Leg, url: str, number: int) -> dict[str, Any]:
    parts = urlsplit(url)
    found: dict[str, Any] = {
        "http.request.method": leg.method,
        "url.full": url + leg.path,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }
    if number:
        found["http.request.resend_count"] = number
    return found


def _asked(ctx: RequestContext) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS[ctx.api],
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.stream": ctx.stream,
        "coordinator.request_id": ctx.request_id,
    }
    if isinstance(model := ctx.body.get("model"), str):
        found["gen_ai.request.model"] = model[:_LONGEST_NAME]
    settings: Any = ctx.body.get("sampling_params") if ctx.api is Format.GENERATE else ctx.body
    for name, keys in _NUMBERS.items() if isinstance(settings, dict) else ():
        value = next((settings[key] for key in keys if _is_number(settings.get(key))), None)
        if value is not None:
            found[name] = value
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ended(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"http.response.status_code": outcome.status, "coordinator.outcome": outcome.word}
    if outcome.error:
        found["error.type"] = outcome.error if outcome.word != "stream_broken" else outcome.word
    if outcome.queued_s:
        found["coordinator.queue_seconds"] = outcome.queued_s
    if (result := outcome.result) is None:
        return found
    if result.pace is not None and (ttft_s := result.pace.ttft_s) is not None:
        found["gen_ai.response.time_to_first_chunk"] = ttft_s
    for name, count in outcome.tokens.items():
        found[f"gen_ai.usage.{name}_tokens"] = count
    return found

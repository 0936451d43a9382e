"""What a worker's refusal means for the client: whose fault it is, and which status says so.

A 4xx is the client's own mistake and goes on as it is, unless it tells of our configuration: a route that is switched
off or missing. A 5xx is the worker's, and its text stays here.

Source: vLLM 0.33 error bodies: ``{"error": {message, type, param, code}}`` from handlers, ``{"error": "Unauthorized"}``
from its key check, ``{"detail": ..}`` from the router when a route or method does not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.errors import LegBusy, LegError, LegFailed, LegRejected, LegTimeout
from envelope.formats import PATHS, RENDER_PATHS, Format
from envelope.json_codec import JSONDecodeError, loads_lenient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.step import Leg

_SCALE_OUT_PATHS = frozenset((PATHS[Format.GENERATE], *RENDER_PATHS.values()))

_SCALE_OUT_HINT = "vllm serve needs --enable-scale-out for this route (vLLM 0.30 and later)"

# What a handler says of a model that it does not serve, in OpenAI's words and in Anthropic's.
_UNKNOWN_MODEL = ("NotFoundError", "not_found_error")


def refusal(leg: Leg, status: int, headers: Mapping[str, str], raw: bytes, our_key: str | None = None) -> LegError:
    """Return the error that a worker's answer with a status outside 2xx stands for.

    Args:
        our_key: what the configuration calls the key that the leg carried, or should have; None where the client's own
            goes to the workers, so that a 401 is the client's.
    """
    retry = {"Retry-After": headers["Retry-After"]} if "Retry-After" in headers else {}
    if status == 503:
        busy = LegBusy(leg.step, "the worker answered 503: it is overloaded or starting", headers=retry or _SOON)
        busy.ailing = not (retry or _is_full(raw))
        return retryable(busy, reached=not _queue_full(leg, raw))
    if status == 504:
        return retryable(LegTimeout(leg.step, "the worker answered 504"))
    if status == 502:
        return retryable(LegFailed(leg.step, "the worker answered 502"))
    if not 400 <= status < 500:
        return LegFailed(leg.step, f"the worker answered {status}")
    error = _error_object(raw, status)
    if hint := _our_fault(leg, status, error, our_key):
        ours = LegFailed(leg.step, f"the worker answered {status} on {leg.path}; {hint}")
        ours.reached = False  # refused at the door
        ours.ailing = False
        return ours
    return LegRejected(leg.step, status, error or _plain(leg, status), headers=retry)


# The messages route names its errors and gives them no code.
_ANTHROPIC_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}


def event_error(leg: Leg, error: Any) -> LegError:
    """Return the error that a stream's first event stands for; ``error.code`` is the status it should have had."""
    obj = error if isinstance(error, dict) else {"message": str(error)}
    code = obj.get("code") or _ANTHROPIC_STATUS.get(str(obj.get("type")))
    if isinstance(code, int) and 400 <= code < 500:
        return LegRejected(leg.step, code, obj)
    if code == 503:
        return retryable(LegBusy(leg.step, "the worker is overloaded", headers=_SOON))
    return LegFailed(leg.step, "the worker failed before its first token")


def retryable(error: LegError, *, reached: bool = True) -> LegError:
    """Mark an error that another worker may not have; ``reached``: this one may have begun."""
    error.retryable = True
    error.reached = reached
    return error


_SOON = {"Retry-After": "1"}


def _queue_full(leg: Leg, raw: bytes) -> bool:
    """Say whether a worker refused a request before it looked at its hand-over, which then is still good for another.

    The OpenAI routes tell prefill to free the blocks when they refuse; the generate route does not.
    """
    return leg.path == PATHS[Format.GENERATE] and _is_full(raw)


def _is_full(raw: bytes) -> bool:
    """Say whether a 503 is the one of vLLM's queue limits."""
    error = _error_object(raw, 503)
    return error is not None and error.get("type") == "Service Unavailable"


def _our_fault(leg: Leg, status: int, error: dict[str, Any] | None, our_key: str | None) -> str | None:
    if status == 401 and our_key is not None:
        return f"{our_key} must be the key that it was started with"
    if status == 403 and leg.path in _SCALE_OUT_PATHS:
        return _SCALE_OUT_HINT
    if status in (404, 405) and (error is None or error.get("type") not in _UNKNOWN_MODEL):
        asked = f"it has no such route: is this the right server for {leg.role}?"
        return f"{asked} {_SCALE_OUT_HINT}" if leg.path in _SCALE_OUT_PATHS else asked
    if status == 412:
        return "only a conditional-decode step asks for that; does something between add Prefer: if-available?"
    return None


def _error_object(raw: bytes, status: int) -> dict[str, Any] | None:
    """Return the worker's ``error`` object, or None when the body has none."""
    try:
        body = loads_lenient(raw)
    except (JSONDecodeError, RecursionError):
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return {"message": error, "type": "AuthenticationError", "param": None, "code": status}
    return error if isinstance(error, dict) and error.get("message") is not None else None


def _plain(leg: Leg, status: int) -> dict[str, Any]:
    return {"message": f"{leg.step}: the worker answered {status}", "type": "BadRequestError", "param": None,
            "code": status}  # fmt: skip

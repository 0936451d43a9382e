"""Refusals in vLLM's words: one exception, and the error bodies it becomes.

Source: protocol of vLLM 0.33.0 as recorded in ``tests/data/recordings``, folder ``errors``.
"""

from __future__ import annotations

from typing import Any

SCHEMA = "Bad Request"  # the type of what FastAPI and pydantic refuse


class Refusal(Exception):
    """An answer other than 200.

    Attributes:
        late: the engine itself refuses, so a stream is already open: it comes as HTTP 200 and an error event.
    """

    def __init__(
        self,
        message: str,
        *,
        type: str = "BadRequestError",
        param: str | None = None,
        status: int = 400,
        late: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.param = param
        self.status = status
        self.late = late

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}


def value_error(message: str, *, param: str | None = None, value: Any = None, late: bool = False) -> Refusal:
    """Refuse a value as vLLM's own checks do: the parameter is named again at the end of the message."""
    if param is not None:
        shown = f", value={value!r}" if value is not None else ""
        message = f"{message} (parameter={param}{shown})"
    return Refusal(message, param=param, late=late)


def unknown_model(asked: str, served: str) -> Refusal:
    return Refusal(
        f"The model `{asked}` does not exist. Valid aliases: {served}.",
        type="NotFoundError",
        param="model",
        status=404,
    )


def scale_out_off() -> Refusal:
    return Refusal(
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        type="PermissionDeniedError",
        status=403,
    )


def failed(message: str = "Internal server error", *, late: bool = True) -> Refusal:
    return Refusal(message, type="InternalServerError", status=500, late=late)

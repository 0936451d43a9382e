"""Every way in which a request fails, by whose fault, with the status that the client gets.

::

    ApiError
    ├── ClientError          the request is wrong: nothing was sent to a worker
    │   ├── BadRequest 400, Unauthorized 401, Forbidden 403, UnknownPath 404, MethodNotAllowed 405,
    │   └── ReadTimeout 408, TooLarge 413, UnsupportedMedia 415, HeadersTooLarge 431
    ├── LegError             one leg failed; names its step
    │   ├── LegRejected      the worker's own 4xx, passed on as it is
    │   ├── LegFailed 502    no usable answer: LegUnreadable, it makes no sense; LegUnechoed, in another output_mode
    │   ├── LegBusy 503      the worker is up and takes no more
    │   ├── LegTimeout 504   no answer in time
    │   └── NoWorker 503     nobody to ask
    ├── NotSupported 501     what this release cannot do for this request, by its framing or by the configuration
    ├── Overloaded           no room for it, and nothing was done: QueueFull 429, QueueTimeout 503
    ├── Unavailable 503      the coordinator itself: draining
    ├── InternalError 500    a fault of ours
    └── ClientGone 499       for logs and metrics alone; nobody is left to read it

The body is OpenAI's, with vLLM's type names, so that an SDK maps it as it maps vLLM's own.
"""

from __future__ import annotations

from typing import Any

from envelope.json_codec import dumps


class ApiError(Exception):
    """A failure with an HTTP status and an OpenAI error body.

    Attributes:
        message: one sentence or more, for the person who sent the request.
        param: the field at fault, or None.
        headers: response headers that belong to the error, such as Retry-After.
    """

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the ``error`` object; the request id goes into the text so that it survives any SDK."""
        return {
            "message": f"{self.message} (request id {request_id})" if request_id else self.message,
            "type": self.type,
            "param": self.param,
            "code": self.status,
        }


class ClientError(ApiError):
    """The request itself is at fault; no worker saw it."""


class BadRequest(ClientError):
    status = 400
    type = "BadRequestError"


class Unauthorized(ClientError):
    status = 401
    type = "AuthenticationError"


class Forbidden(ClientError):
    status = 403
    type = "PermissionDeniedError"


class UnknownPath(ClientError):
    status = 404
    type = "NotFoundError"


class MethodNotAllowed(ClientError):
    status = 405
    type = "MethodNotAllowedError"


class ReadTimeout(ClientError):
    status = 408
    type = "RequestTimeoutError"


class TooLarge(ClientError):
    status = 413
    type = "RequestEntityTooLargeError"


class UnsupportedMedia(ClientError):
    status = 415
    type = "UnsupportedMediaTypeError"


class HeadersTooLarge(ClientError):
    status = 431
    type = "RequestHeaderFieldsTooLargeError"


class LegError(ApiError):
    """One leg failed. ``leg`` is the step's type, such as ``prefill``.

    Attributes:
        retryable: another worker may do better: the connection or the worker failed, not the request.
        reached: the worker may have begun to work on the request.
        elsewhere: another worker may be tried: there is one, and a retry to spare.
        ailing: it speaks against the worker's health, whatever the request was.
    """

    retryable = False
    reached = True
    elsewhere = False
    ailing = False

    def __init__(
        self, leg: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(f"{leg}: {message}", param=param, headers=headers)
        self.leg = leg


class LegRejected(LegError):
    """The worker answered 4xx: the client's mistake, told in the worker's words.

    Attributes:
        error: the worker's own ``error`` object, passed on unchanged.
    """

    def __init__(self, leg: str, status: int, error: dict[str, Any], *, headers: dict[str, str] | None = None) -> None:
        super().__init__(leg, str(error.get("message", "")), headers=headers)
        self.status = status
        self.error = error

    def body(self, request_id: str) -> dict[str, Any]:
        return self.error


class LegFailed(LegError):
    status = 502
    type = "BadGatewayError"
    ailing = True


class LegUnreadable(LegFailed):
    """The worker's answer is not what its route answers: no JSON, or another shape."""

    ailing = False


class LegUnechoed(LegFailed):
    """The worker did not answer in the output mode that it was asked for."""

    ailing = False


class LegBusy(LegError):
    status = 503
    type = "ServiceUnavailableError"


class LegTimeout(LegError):
    status = 504
    type = "GatewayTimeoutError"
    ailing = True


class NoWorker(LegError):
    status = 503
    type = "ServiceUnavailableError"


class NotSupported(ApiError):
    status = 501
    type = "NotImplementedError"


class Overloaded(ApiError):
    """No room for the request: nothing was done for it, so it may be sent again as it is."""


class QueueFull(Overloaded):
    status = 429
    type = "RateLimitError"


class QueueTimeout(Overloaded):
    status = 503
    type = "ServiceUnavailableError"


class Unavailable(ApiError):
    status = 503
    type = "ServiceUnavailableError"


class InternalError(ApiError):
    """A fault of ours; what it was is for the log alone."""

    def __init__(self, message: str = "the coordinator failed; its log has the details") -> None:
        super().__init__(message)


class ClientGone(ApiError):
    status = 499
    type = "ClientClosedRequest"


class ClientStalled(ClientGone):
    """It took nothing of its answer for so long, or a whole one not in its time, that it was hung up."""


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return the JSON body of an error answer."""
    return dumps({"error": error.body(request_id)})


def error_event(error: ApiError, request_id: str) -> bytes:
    """Return the SSE frame that tells of a failure once the status line is spent.

    Source: vLLM sends ``data: {"error": ...}`` in a stream that fails; SDKs raise on it.
    """
    return b"data: " + error_body(error, request_id) + b"\n\n"

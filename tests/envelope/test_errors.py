"""Every failure has one status and one OpenAI body, whole or as the last event of a stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from envelope import errors
from envelope.errors import ApiError, BadRequest, LegError, LegRejected, error_body, error_event
from envelope.sse import data_of, split

if TYPE_CHECKING:
    from collections.abc import Iterator

# class name -> status, vLLM's name for the type, whose fault it is
TREE = {
    "BadRequest": (400, "BadRequestError", "ClientError"),
    "Unauthorized": (401, "AuthenticationError", "ClientError"),
    "Forbidden": (403, "PermissionDeniedError", "ClientError"),
    "UnknownPath": (404, "NotFoundError", "ClientError"),
    "MethodNotAllowed": (405, "MethodNotAllowedError", "ClientError"),
    "ReadTimeout": (408, "RequestTimeoutError", "ClientError"),
    "TooLarge": (413, "RequestEntityTooLargeError", "ClientError"),
    "UnsupportedMedia": (415, "UnsupportedMediaTypeError", "ClientError"),
    "HeadersTooLarge": (431, "RequestHeaderFieldsTooLargeError", "ClientError"),
    "LegFailed": (502, "BadGatewayError", "LegError"),
    "LegUnreadable": (502, "BadGatewayError", "LegFailed"),
    "LegUnechoed": (502, "BadGatewayError", "LegFailed"),
    "LegBusy": (503, "ServiceUnavailableError", "LegError"),
    "LegTimeout": (504, "GatewayTimeoutError", "LegError"),
    "NoWorker": (503, "ServiceUnavailableError", "LegError"),
    "NotSupported": (501, "NotImplementedError", "ApiError"),
    "QueueFull": (429, "RateLimitError", "Overloaded"),
    "QueueTimeout": (503, "ServiceUnavailableError", "Overloaded"),
    "Unavailable": (503, "ServiceUnavailableError", "ApiError"),
    "InternalError": (500, "InternalServerError", "ApiError"),
    "ClientGone": (499, "ClientClosedRequest", "ApiError"),
    "ClientStalled": (499, "ClientClosedRequest", "ClientGone"),
}
# Their status is their children's, or the worker's.
BRANCHES = {"ClientError", "LegError", "LegRejected", "Overloaded"}

WORKER_ERROR = {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}


def below(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    for child in kind.__subclasses__():
        yield child
        yield from below(child)


def made(kind: type[ApiError], message: str) -> ApiError:
    return kind("prefill", message) if issubclass(kind, LegError) else kind(message)


def test_the_table_has_every_class_of_the_tree() -> None:
    assert {kind.__name__ for kind in below(ApiError)} == TREE.keys() | BRANCHES


@pytest.mark.parametrize("name", TREE)
def test_a_class_has_its_status_its_type_and_its_place(name: str) -> None:
    kind = getattr(errors, name)
    error = made(kind, "no")
    assert (error.status, error.type, kind.__base__.__name__) == TREE[name]
    assert error.body("r1")["code"] == error.status


def test_the_body_is_openai_s_and_names_the_request() -> None:
    assert json.loads(error_body(BadRequest("n must be at least 1", param="n"), "r1")) == {
        "error": {
            "message": "n must be at least 1 (request id r1)",
            "type": "BadRequestError",
            "param": "n",
            "code": 400,
        }
    }


def test_without_a_request_id_the_message_stands_alone() -> None:
    assert BadRequest("no").body("") == {"message": "no", "type": "BadRequestError", "param": None, "code": 400}


def test_a_leg_s_error_names_the_leg_first() -> None:
    error = errors.LegTimeout("prefill", "the worker did not answer in time", param="x", headers={"Retry-After": "1"})
    assert (error.leg, str(error)) == ("prefill", "prefill: the worker did not answer in time")
    assert error.body("r1") == {
        "message": "prefill: the worker did not answer in time (request id r1)",
        "type": "GatewayTimeoutError",
        "param": "x",
        "code": 504,
    }
    assert error.headers == {"Retry-After": "1"}


def test_headers_are_none_unless_given_and_never_shared() -> None:
    first, second = BadRequest("a"), BadRequest("b")
    first.headers["Allow"] = "POST"
    assert second.headers == {}


@pytest.mark.parametrize(
    "error",
    [
        WORKER_ERROR,
        {"message": "no", "type": "not_found_error"},
        {"message": "no", "type": "X", "param": None, "code": None, "more": [10**30]},
        {},
    ],
)
def test_a_worker_s_own_refusal_goes_on_word_for_word(error: dict[str, object]) -> None:
    rejected = LegRejected("decode", 404, error, headers={"Retry-After": "2"})
    assert json.loads(error_body(rejected, "r1")) == {"error": error}
    assert (rejected.status, rejected.leg, rejected.headers) == (404, "decode", {"Retry-After": "2"})
    assert str(rejected) == f"decode: {error.get('message', '')}"


@pytest.mark.parametrize("error", [BadRequest("two\nlines \u2028 \r"), LegRejected("decode", 400, WORKER_ERROR)])
def test_in_a_stream_the_same_body_is_one_event(error: ApiError) -> None:
    event = error_event(error, "r1")
    assert split(event) == [event]
    assert data_of(event) == error_body(error, "r1")

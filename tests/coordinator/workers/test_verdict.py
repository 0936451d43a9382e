"""What a real worker's refusal becomes for the client: its own words, or a failure of the leg that hides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.step import Leg
from coordinator.workers.verdict import event_error, refusal, retryable
from envelope.errors import LegBusy, LegError, LegFailed, LegRejected, LegTimeout
from envelope.sse import data_of, split

RECORDINGS = Path(__file__).parents[2] / "data" / "recordings" / "vllm-0.33.0"
FOLDERS = ("errors", "scale_out_disabled", "tokens_only", "abort", "chat", "derender", "kv_load_failure",
           "nixl_prefill_server", "render_only_server")  # fmt: skip

CHAT, GENERATE, RENDER = "/v1/chat/completions", "/inference/v1/generate", "/v1/chat/completions/render"

ERROR = {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}


def leg(path: str = CHAT) -> Leg:
    return Leg("decode", "decode", path, {})


def refused(status: int, raw: bytes, path: str = CHAT, **headers: str) -> LegError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return refusal(leg(path), status, named, raw)


def recorded(folder: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the exchanges of a folder that a worker refused with a status."""
    found = []
    for file in sorted((RECORDINGS / folder).glob("*.json")):
        exchange = json.loads(file.read_text())
        if exchange.get("response", {}).get("status", 0) >= 400:
            found.append((f"{folder}/{file.stem}", exchange))
    return found


REFUSALS = [pair for folder in FOLDERS for pair in recorded(folder)]

# Those that tell of our configuration, or of a worker that fails: a 502 that names the leg, and why.
OURS = {
    "errors/generate_error_get": "405 on /inference/v1/generate; it has no such route",
    "errors/unknown_path": "404 on /v1/nope; it has no such route",
    "abort/abort_legacy_path_not_tokens_only": "404 on /abort_requests; it has no such route",
    "render_only_server/generate_absent": "404 on /inference/v1/generate; it has no such route",
    "render_only_server/chat_absent": "404 on /v1/chat/completions; it has no such route",
    "scale_out_disabled/generate_403": "403 on /inference/v1/generate; vllm serve needs --enable-scale-out",
    "scale_out_disabled/render_chat_403": "403 on /v1/chat/completions/render; vllm serve needs --enable-scale-out",
}


def raw_body(response: dict[str, Any]) -> bytes:
    return json.dumps(response["body"]).encode() if "body" in response else response.get("text", "").encode()


@pytest.mark.parametrize(("name", "exchange"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_recorded_refusal_has_its_verdict(name: str, exchange: dict[str, Any]) -> None:
    """A 4xx goes on with its status, message, type, param and code; a 5xx, and what is our fault, does not."""
    response = exchange["response"]
    error = refusal(leg(exchange["request"]["path"]), response["status"], response["headers"], raw_body(response))
    if name in OURS:
        assert (type(error), error.status) == (LegFailed, 502)
        assert error.message.startswith(f"decode: the worker answered {OURS[name]}")
    elif response["status"] >= 500:
        assert (type(error), error.status) == (LegFailed, 502)
        assert error.message == f"decode: the worker answered {response['status']}"
    else:
        assert (type(error), error.status) == (LegRejected, response["status"])
        assert error.body("r1") == client_gets(response)


def client_gets(response: dict[str, Any]) -> dict[str, Any]:
    """Return the error object that the client of a recorded 4xx is to see."""
    body = response.get("body")
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return body["error"]  # type: ignore[no-any-return]
    code = response["status"]
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return {"message": body["error"], "type": "AuthenticationError", "param": None, "code": code}
    message = f"decode: the worker answered {code}"
    return {"message": message, "type": "BadRequestError", "param": None, "code": code}


def test_the_recordings_hold_each_kind_of_refusal() -> None:
    statuses = {exchange["response"]["status"] for _, exchange in REFUSALS}
    assert statuses >= {400, 401, 403, 404, 405, 500}
    assert OURS.keys() <= {name for name, _ in REFUSALS}


def test_a_worker_s_error_object_is_the_client_s_whatever_else_is_in_it() -> None:
    error = {**ERROR, "brand_new": [10**30]}
    assert refused(400, json.dumps({"error": error, "x": 1}).encode()).body("r1") == error


NO_ERROR = [b"", b"<html>no</html>", b"null", b"[]", b'{"detail":"x"}', b'{"error":null}', b'{"error":[]}',
            b'{"error":{"code":400}}', b"\xff", b"[" * 100_000, b"1" * 5000]  # fmt: skip


@pytest.mark.parametrize("raw", NO_ERROR, ids=lambda raw: raw[:20])
@pytest.mark.parametrize("status", [400, 401, 409, 413, 422, 429])
def test_a_refusal_without_an_error_object_keeps_its_status(status: int, raw: bytes) -> None:
    error = refused(status, raw)
    assert (type(error), error.status) == (LegRejected, status)
    message = f"decode: the worker answered {status}"
    assert error.body("r1") == {"message": message, "type": "BadRequestError", "param": None, "code": status}


def test_retry_after_goes_on_to_the_client_with_any_body() -> None:
    """Case V15: SDKs wait by it."""
    error = refused(429, b"<html>", Retry_After="2")
    assert (error.status, error.headers) == (429, {"Retry-After": "2"})
    assert refused(400, json.dumps({"error": ERROR}).encode()).headers == {}


@pytest.mark.parametrize("path", [GENERATE, RENDER])
def test_a_route_that_is_switched_off_is_not_the_client_s_mistake(path: str) -> None:
    """Case H26: it asked for a good path."""
    error = refused(403, json.dumps({"error": {"message": "disabled", "type": "PermissionDeniedError"}}).encode(), path)
    assert (type(error), error.status) == (LegFailed, 502)
    assert "--enable-scale-out" in error.message
    assert "disabled" not in error.message


def test_a_403_on_the_client_s_own_route_is_a_403() -> None:
    error = refused(403, json.dumps({"error": {"message": "not yours", "type": "PermissionDeniedError"}}).encode())
    assert (type(error), error.status) == (LegRejected, 403)


def test_an_unknown_model_is_the_client_s_mistake_and_a_route_that_is_not_there_is_ours() -> None:
    """Case V12: SDKs map by status and code."""
    unknown = {"message": "no model", "type": "NotFoundError", "param": None, "code": 404}
    assert refused(404, json.dumps({"error": unknown}).encode()).body("r1") == unknown
    for raw in (b'{"detail":"Not Found"}', b"<html>", b""):
        assert type(refused(404, raw)) is LegFailed


def test_the_hint_at_the_flag_stands_only_where_the_flag_matters() -> None:
    assert "--enable-scale-out" in refused(404, b"", GENERATE).message
    assert "is this the right server for decode?" in refused(405, b"").message
    assert "--enable-scale-out" not in refused(404, b"").message


def test_a_key_of_ours_that_a_worker_does_not_know_is_not_the_client_s_mistake() -> None:
    error = refusal(leg(), 401, {}, b'{"error":"Unauthorized"}', "pools.decode.api_key")
    assert (type(error), error.status) == (LegFailed, 502)
    assert error.message.endswith("pools.decode.api_key must be the key that it was started with")


def test_a_412_that_nobody_asked_for_never_reaches_the_client() -> None:
    """Case L22: only our own probe may ask for it."""
    error = refused(412, b"")
    assert (type(error), error.status) == (LegFailed, 502)
    assert "Prefer: if-available" in error.message


# status -> the error's class, whether another worker may not have it
SERVERS = [
    (500, LegFailed, False),
    (501, LegFailed, False),
    (502, LegFailed, True),
    (503, LegBusy, True),
    (504, LegTimeout, True),
    (505, LegFailed, False),
    (301, LegFailed, False),
    (304, LegFailed, False),
    (199, LegFailed, False),
]


@pytest.mark.parametrize(("status", "kind", "again"), SERVERS)
def test_a_worker_s_failure_hides_its_text_and_says_whether_another_may_do(
    status: int, kind: type[LegError], again: bool
) -> None:
    error = refused(status, json.dumps({"error": {"message": "secret", "type": "X", "code": status}}).encode())
    assert (type(error), error.retryable) == (kind, again)
    assert "secret" not in error.message
    assert f"answered {status}" in error.message


def test_a_full_worker_is_a_503_to_be_asked_again_soon() -> None:
    assert refused(503, b"").headers == {"Retry-After": "1"}
    assert refused(503, b"", Retry_After="7").headers == {"Retry-After": "7"}


FULL = json.dumps({"error": {"message": "queue", "type": "Service Unavailable", "param": None, "code": 503}}).encode()

# (route, body, whether the worker may have looked at the hand-over)
REACHED = [(GENERATE, FULL, False), (GENERATE, b"", True), (GENERATE, b'{"error":{"message":"x"}}', True),
           (CHAT, FULL, True)]  # fmt: skip


@pytest.mark.parametrize(("path", "raw", "reached"), REACHED)
def test_a_queue_that_is_full_has_not_touched_the_hand_over_on_the_generate_route(
    path: str, raw: bytes, reached: bool
) -> None:
    """The OpenAI routes tell prefill to free the blocks when they refuse."""
    assert refused(503, raw, path).reached is reached


def test_an_error_is_marked_as_one_that_another_worker_may_not_have() -> None:
    error = LegFailed("decode", "x")
    assert not error.retryable
    assert retryable(error, reached=False) is error
    assert (error.retryable, error.reached) == (True, False)


# --- the first event of a stream -----------------------------------------------------------------------------------

EVENTS = sorted(file for file in RECORDINGS.rglob("*stream_error*.sse") if not file.stem.startswith("responses"))


@pytest.mark.parametrize("file", EVENTS, ids=lambda file: file.stem)
def test_a_stream_that_was_refused_has_the_status_it_should_have_had(file: Path) -> None:
    """Case S07: the checks of the engine run when the stream is open already."""
    error = json.loads(data_of(split(file.read_bytes())[0]) or b"")["error"]
    verdict = event_error(leg(), error)
    assert (type(verdict), verdict.status, verdict.body("r1")) == (LegRejected, 400, error)


# (what the event's error is, class, status, whether another worker may not have it)
FIRST_EVENTS: list[tuple[Any, type[LegError], int, bool]] = [
    ({**ERROR, "code": 404}, LegRejected, 404, False),
    ({"message": "Internal server error", "type": "InternalServerError", "code": 500}, LegFailed, 502, False),
    ({"message": "x", "code": 503}, LegBusy, 503, True),
    ({"message": "x"}, LegFailed, 502, False),
    ({"message": "x", "code": "400"}, LegFailed, 502, False),
    ({"message": "x", "code": 200}, LegFailed, 502, False),
    ("broken", LegFailed, 502, False),
    (["broken"], LegFailed, 502, False),
]


@pytest.mark.parametrize(("error", "kind", "status", "again"), FIRST_EVENTS)
def test_a_first_event_that_is_an_error_ends_the_leg(
    error: Any, kind: type[LegError], status: int, again: bool
) -> None:
    verdict = event_error(leg(), error)
    assert (type(verdict), verdict.status, verdict.retryable) == (kind, status, again)
    if kind is LegBusy:
        assert verdict.headers == {"Retry-After": "1"}

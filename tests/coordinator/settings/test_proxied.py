"""Routes that may be passed on: how they are written, and which of them are dangerous."""

from __future__ import annotations

import pytest

from coordinator.settings.proxied import Route, parse_route


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("POST /tokenize", Route("POST", "/tokenize")),
        ("  get   /metrics ", Route("GET", "/metrics")),
        ("POST /v1/audio/transcriptions", Route("POST", "/v1/audio/transcriptions")),
    ],
)
def test_a_route_is_a_method_and_a_path(text: str, route: Route) -> None:
    assert parse_route(text) == route
    assert parse_route(str(route)) == route


REFUSED = [
    ("/tokenize", "'/tokenize' is not a route, write a method and a path, such as POST /tokenize"),
    ("DELETE /v1/files", "'DELETE /v1/files' is not a route, write a method and a path, such as POST /tokenize"),
    ("", "'' is not a route, write a method and a path, such as POST /tokenize"),
    (7, "7 is not a route, write a method and a path, such as POST /tokenize"),
    ("GET *", "'*' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /", "'/' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /v1/*", "'/v1/*' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /files/{id}", "'/files/{id}' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /tokenizer_info/", "'/tokenizer_info/' is not one exact path, write each path in full, such as /tokenize"),
    ("GET //sleep", "'//sleep' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /a/../sleep", "'/a/../sleep' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /a?b=c", "'/a?b=c' is not one exact path, write each path in full, such as /tokenize"),
    ("GET /%73leep", "'/%73leep' is not one exact path, write each path in full, such as /tokenize"),
    ("POST /v1/chat/completions", "/v1/chat/completions is answered by the coordinator itself, take it out"),
    ("GET /v1/models", "/v1/models is answered by the coordinator itself, take it out"),
    ("GET /readyz", "/readyz is answered by the coordinator itself, take it out"),
    ("POST /v1/messages/count_tokens", "/v1/messages/count_tokens is answered by the coordinator itself, take it out"),
]


@pytest.mark.parametrize(("value", "sentence"), REFUSED)
def test_what_is_no_exact_route_of_the_worker_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_route(value)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/abort_requests", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter", "/server_info"),
        *("/invocations", "/v1/chat/completions/batch"),
    ],
)
def test_a_dangerous_route_says_what_it_does(path: str) -> None:
    assert Route("POST", path).danger


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/metrics", "/version", "/v1/embeddings", "/is_sleeping"])
def test_what_clients_are_for_is_not_dangerous(path: str) -> None:
    assert Route("POST", path).danger is None

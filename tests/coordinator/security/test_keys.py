"""Keys of clients: which header is read how, and that any of them is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from coordinator.config import load
from coordinator.security.credentials import Credentials
from coordinator.security.keys import Keys
from envelope.errors import Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

KEYS = Keys(["sk-a", "sk-b"], None)


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        [("Authorization", "Bearer sk-a")],
        [("AUTHORIZATION", "bearer  sk-b ")],
        [("X-Api-Key", " sk-a ")],
        [("Authorization", "Bearer no"), ("x-api-key", "sk-b")],
        [("Authorization", "Bearer sk-b"), ("x-api-key", "no")],
        [("Authorization", "Basic abc"), ("Authorization", "Bearer sk-a")],
    ],
)
def test_one_good_key_is_enough(pairs: list[tuple[str, str]]) -> None:
    KEYS.check(headers(*pairs))


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([], "an API key is needed"),
        ([("Authorization", "")], "an API key is needed"),
        ([("Authorization", "Bearer ")], "an API key is needed"),
        ([("Authorization", "sk-a")], "an API key is needed"),
        ([("Authorization", "Basic sk-a")], "an API key is needed"),
        ([("Authorization", "Bearer sk-a sk-b")], "this API key is not valid here"),
        ([("x-api-key", "SK-A")], "this API key is not valid here"),
        ([("x-api-key", "sk-\udce9")], "this API key is not valid here"),
    ],
)
def test_anything_else_is_a_401_that_says_what_to_send(pairs: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(Unauthorized) as refused:
        KEYS.check(headers(*pairs))
    assert refused.value.message == f"{told}; send one as 'Authorization: Bearer ..' or as 'x-api-key: ..'"
    assert (refused.value.status, refused.value.headers) == (401, {"WWW-Authenticate": "Bearer"})


def test_keys_of_the_environment_take_the_place_of_the_file_s(tmp_path: Path) -> None:
    """``COORDINATOR_SERVER_API_KEYS``: a list with commas, which may name places as well."""
    file = tmp_path / "pd.yaml"
    file.write_text(
        "server: {api_keys: [sk-file]}\ngateway: {address: 'http://g'}\npipeline: {steps: [{type: decode}]}"
    )
    environ = {"COORDINATOR_SERVER_API_KEYS": "sk-a, env:MORE", "MORE": "sk-more"}
    config = load(str(file), environ)
    keys = Credentials(environ, config.sources).client_keys(config.server)
    assert keys is not None
    for good in ("sk-a", "sk-more"):
        keys.check(headers(("x-api-key", good)))
    with pytest.raises(Unauthorized):
        keys.check(headers(("x-api-key", "sk-file")))

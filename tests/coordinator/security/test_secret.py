"""Keys are read from where the configuration says, and nothing that is said of them holds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.config import Config
from coordinator.security.secret import Digests, Secret, parse_secret, parse_secrets, read_list

if TYPE_CHECKING:
    from pathlib import Path


def test_a_key_is_the_text_itself_or_stands_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert Secret("sk-1").read({}) == "sk-1"
    assert Secret("env:KEY").read({"KEY": " from-env "}) == "from-env"
    assert Secret(f"file:{file}").read({}) == "from-a-file"
    assert (Secret(f"file:{file}").path, Secret("sk-1").path) == (str(file), None)


@pytest.mark.parametrize(
    ("text", "content", "sentence"),
    [
        ("env:KEY", None, "the environment variable KEY is empty or not set, and a key should be there"),
        ("file:{file}", None, "{file} cannot be read: No such file or directory"),
        ("file:{file}", b"", "{file} is empty or not set, and a key should be there"),
        (
            "file:{file}",
            b"SECRET one",
            "{file} has a blank or a character that no header can carry, write a key without it",
        ),
        ("file:{file}", b"SECRET\xff", "{file} is not a text file"),
    ],
)
def test_what_is_wrong_with_a_place_is_said_with_its_name_and_without_the_key(
    tmp_path: Path, text: str, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError) as told:
        Secret(text.format(file=file)).read({})
    assert str(told.value) == sentence.format(file=file)


@pytest.mark.parametrize(
    "value", ["SECRET one", "SECRET\n2", 'SECRET"é', 12345, ["SECRET"], "", "env:SECRET-1", "file:"]
)
def test_what_is_wrong_with_a_key_is_said_without_it(value: object) -> None:
    with pytest.raises(ValueError) as told:
        parse_secret(value)
    assert "SECRET" not in str(told.value) and "12345" not in str(told.value)


def test_a_list_may_be_one_text_with_commas() -> None:
    assert parse_secrets("a, b,,env:C") == (Secret("a"), Secret("b"), Secret("env:C"))
    assert parse_secrets("[]") == ()


def test_a_file_of_keys_has_one_on_a_line_with_blanks_and_comments_between(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nsk-a\n\n  sk-b  \n#sk-old\n")
    assert read_list(str(file)) == ["sk-a", "sk-b"]


def test_a_key_is_shown_as_its_place_or_not_at_all() -> None:
    assert (repr(Secret("sk-1")), str(Secret("env:KEY")), f"{Secret('file:/k')}") == ("***", "env:KEY", "file:/k")


def test_a_configuration_that_is_printed_or_dumped_shows_no_key() -> None:
    config = Config.model_validate(
        {
            "server": {"api_keys": ["SECRET-a", "env:KEYS"]},
            "gateway": {"address": "http://g", "api_key": "SECRET-g"},
            "pools": {"decode": {"endpoints": ["http://d"], "api_key": "SECRET-d"}},
            "pipeline": {"steps": [{"type": "decode"}]},
        }
    )
    assert "SECRET" not in f"{config!r} {config} {config.model_dump()}"
    dumped = config.model_dump_json()
    assert "SECRET" not in dumped and '"api_keys":["***","env:KEYS"]' in dumped


def test_digests_know_their_keys_and_no_other() -> None:
    good = Digests(["sk-a", "sk-b"])
    assert (good.has("sk-a"), good.has("sk-b"), good.has("sk-"), good.has(""), good.has("sk-aé")) == (
        True, True, False, False, False,
    )  # fmt: skip
    assert not Digests(()).has("")
    assert "sk-a" not in repr(vars(good))

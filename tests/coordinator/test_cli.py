"""The command line: what each command prints, where, and with which code it ends."""

from __future__ import annotations

import gc
import importlib.metadata
import io
import json
import logging
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from jsonschema import Draft202012Validator

from coordinator import cli
from coordinator.logs import access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).resolve().parents[2] / "pipeline_configs"
FILES = sorted(FOLDER.glob("*.yaml"))

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi é"}], "max_tokens": 50, "seed": 10**30}


class Ended(NamedTuple):
    code: Any
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command in this process."""

    def main(*argv: str) -> Ended:
        with pytest.raises(SystemExit) as exited:
            cli.main(argv)
        return Ended(exited.value.code, *capsys.readouterr())

    return main


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """Write a configuration, or any other file; return its path."""

    def write(content: Any, name: str = "pd.yaml") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def restored() -> Iterator[None]:
    """Put logging and the garbage collector's pace back as they were: serve and demo set them up."""
    root = logging.getLogger()
    before, collected_at = (root.handlers[:], root.level), gc.get_threshold()
    yield
    gc.set_threshold(*collected_at)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    access.human = False


DECODE = {"gateway": {"address": "http://g"}, "pipeline": {"steps": [{"type": "decode"}]}}
BROKEN = {"gateway": {"address": "http://g"}, "pipeline": {"kv_conector": "x", "steps": [{"type": "decode"}]}}
WRONG_STEPS = {"gateway": {"address": "http://g"}, "pipeline": {"steps": [{"type": "prefill"}]}}


# --- the command line itself ---------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(run: Any) -> None:
    assert run("--version") == Ended(0, f"coordinator {version('pd-coordinator')}\n", "")


def test_without_the_package_installed_it_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert run("--version").out == "coordinator unknown (not installed)\n"


WRONG_LINES = [
    "",
    "servee",
    "check",
    "serve --config",
    "explain --config x",
    "explain --config x --request y --api chats",
    "demo --port x",
    "schema --config x",
]


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_command_line_that_is_wrong_ends_with_2_and_the_usage_on_standard_error(run: Any, line: str) -> None:
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("usage: coordinator")


def test_help_names_every_command(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"    {name}" in out for name in ("serve", "check", "explain", "schema", "demo"))


@pytest.mark.parametrize("command", ["check", "serve", "explain"])
def test_a_configuration_that_is_wrong_ends_with_2_and_one_sentence_a_line(run: Any, file: Any, command: str) -> None:
    path = file(BROKEN)
    more = ("--request", file(CHAT, "chat.json")) if command == "explain" else ()
    sentence = f"{path}: pipeline.kv_conector: unknown key, did you mean kv_connector?\n"
    assert run(command, "--config", path, *more) == Ended(2, "", sentence)


def test_so_do_steps_that_do_not_fit_together(run: Any, file: Any) -> None:
    path = file(WRONG_STEPS)
    code, out, err = run("check", "--config", path)
    assert (code, out) == (2, "")
    assert err == f"{path}: pipeline.steps: no step answers the client, write {{type: decode}} as the last one\n"


def test_a_file_that_is_not_there_is_a_sentence_and_no_traceback(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    assert run("check", "--config", path) == Ended(2, "", f"{path}: cannot be read: No such file or directory\n")


def test_the_environment_overrides_the_file(run: Any, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COORDINATOR_SERVER_READ_TIMEOUT", "soon")
    code, _, err = run("check", "--config", file(DECODE))
    assert code == 2
    assert err.startswith("environment variable COORDINATOR_SERVER_READ_TIMEOUT: server.read_timeout: 'soon'")


def test_an_interrupted_command_ends_as_a_shell_expects(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_schema", interrupted)
    assert run("schema") == Ended(130, "", "")


# --- check ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_is_ok_and_told_for_every_api(run: Any, path: Path) -> None:
    code, out, err = run("check", "--config", str(path))
    assert (code, err) == (0, "")
    head, *apis = out.split("\n\n")
    assert head == f"{path}: ok"
    assert [api.split("\n")[0] for api in apis] == [
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /inference/v1/generate",
    ]


# (sections of the file, what is said of a chat client's request)
CHECKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a gateway": (
        {"gateway": {"address": "http://g:80"}, "pipeline": {"steps": [{"type": "prefill"}, {"type": "decode"}]}},
        ["prefill             chat /v1/chat/completions -> http://g:80 with EPP-Profile: prefill "
         "(hand-over by kv-shared-storage)",
         "decode              chat /v1/chat/completions -> http://g:80 with EPP-Profile: decode "
         "(the worker's answer passes through)"]),
    "pools": (
        {"pools": {"prefill": {"endpoints": ["http://a:1"]},
                   "decode": {"endpoints": ["http://b:1", "http://c:1"], "policy": "least_inflight"}},
         "pipeline": {"kv_connector": "kv-nixl", "steps": [{"type": "prefill"}, {"type": "decode"}]}},
        ["prefill             chat /v1/chat/completions -> http://a:1 (hand-over by kv-nixl)",
         "decode              chat /v1/chat/completions -> http://b:1, http://c:1 by least_inflight "
         "(the worker's answer passes through)"]),
    "both legs at once": (
        {"pools": {"prefill": {"endpoints": ["http://a:1"]}, "decode": {"endpoints": ["http://b:1"]}},
         "pipeline": {"kv_connector": "kv-sglang", "steps": [{"type": "prefill-decode"}]}},
        ["prefill-decode      chat /v1/chat/completions -> http://a:1 and http://b:1 "
         "(beside prefill by kv-sglang; the worker's answer passes through)"]),
    "a header": (
        {"pools": {"prefill": {"header": "x-prefill", "allow": ["10.0.0.0/8"]},
                   "decode": {"endpoints": ["http://b:1"]}},
         "pipeline": {"steps": [{"type": "prefill"}, {"type": "decode"}]}},
        ["prefill             chat /v1/chat/completions -> the worker named by the request header x-prefill, if any "
         "(hand-over by kv-shared-storage)",
         "decode              chat /v1/chat/completions -> http://b:1 (the worker's answer passes through)"]),
    "tokens-in": (
        {"gateway": {"address": "http://g:80"},
         "pipeline": {"use_openai_format": False, "steps": [
             {"type": "render", "params": {"address": "http://r:1"}},
             {"type": "decode", "params": {"wrap_chat_completion": True}}]}},
        ["render              chat /v1/chat/completions/render -> http://r:1",
         "decode              generate /inference/v1/generate -> http://g:80 with EPP-Profile: decode "
         "(output_mode text; rebuilt as chat)"]),
}  # fmt: skip


@pytest.mark.parametrize(("tree", "lines"), CHECKED.values(), ids=CHECKED)
def test_check_says_where_each_leg_goes(run: Any, file: Any, tree: dict[str, Any], lines: list[str]) -> None:
    code, out, _ = run("check", "--config", file(tree))
    assert code == 0
    assert out.split("\n\n")[1].splitlines() == ["POST /v1/chat/completions", *(f"  {line}" for line in lines)]


def test_check_says_of_a_step_that_makes_no_leg_why(run: Any, file: Any) -> None:
    _, out, _ = run("check", "--config", file(CHECKED["tokens-in"][0]))
    assert "  render              no call (the client sends token ids)" in out.split("\n\n")[-1].splitlines()


# --- explain -------------------------------------------------------------------------------------------------------

HEADERS = [
    ["Content-Type", "application/json"],
    ["Authorization", "Bearer ***"],
    ["Accept", "application/json"],
    ["Accept-Encoding", "identity"],
]


def test_explain_prints_the_exact_legs_as_json(run: Any, file: Any) -> None:
    steps = [{"type": "prefill"}, {"type": "decode"}]
    path = file({"gateway": {"address": "http://g:80"}, "pipeline": {"kv_connector": "kv-nixl", "steps": steps}})
    code, out, err = run("explain", "--config", path, "--request", file(CHAT, "chat.json"),
                         "--header", "Authorization: Bearer sk-1")  # fmt: skip
    assert (code, err) == (0, "")
    prefill, decode = json.loads(out)
    leg_ids = [dict(leg["headers"]).pop("X-Request-Id") for leg in (prefill, decode)]
    assert leg_ids[0] == leg_ids[1]
    for leg, role in ((prefill, "prefill"), (decode, "decode")):
        assert (leg["step"], leg["method"], leg["url"]) == (role, "POST", "http://g:80/v1/chat/completions")
        assert leg["headers"] == [
            *HEADERS,
            ["X-Request-Id", leg_ids[0]],
            ["EPP-Profile", role],
            ["x-llm-d-revision-decision-id", leg_ids[0]],
        ]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    one = {**CHAT, "max_tokens": 1, "stream": False, "ignore_eos": True, "kv_transfer_params": asked}
    assert prefill["body"] == one
    assert {name: decode["body"][name] for name in CHAT} == CHAT
    assert decode["body"]["kv_transfer_params"]["remote_host"] == "<prefill's host>"
    assert "sk-1" not in out
    assert "hi é" in out, "as it is, not as escapes"


def test_explain_reads_standard_input(run: Any, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(CHAT).encode())))
    code, out, _ = run("explain", "--config", file(DECODE), "--request", "-")
    assert (code, json.loads(out)[0]["body"]) == (0, CHAT)


@pytest.mark.parametrize(("argv", "url"), [((), "http://g/v1/chat/completions"),
                                           (("--api", "messages"), "http://g/v1/messages")])  # fmt: skip
def test_the_api_is_guessed_unless_it_is_named(run: Any, file: Any, argv: Any, url: str) -> None:
    request = file({**CHAT, "seed": 7}, "chat.json")
    _, out, _ = run("explain", "--config", file(DECODE), "--request", request, *argv)
    assert json.loads(out)[0]["url"] == url


def test_a_request_that_would_be_refused_ends_with_1_and_the_error_on_standard_error(run: Any, file: Any) -> None:
    request = file({**CHAT, "max_tokens": 0}, "chat.json")
    code, out, err = run("explain", "--config", file(DECODE), "--request", request)
    assert (code, out) == (1, "")
    assert json.loads(err) == {
        "error": {
            "message": "max_tokens must be an integer of at least 1, not 0",
            "type": "BadRequestError",
            "param": "max_tokens",
            "code": 400,
        }
    }


NO_REQUESTS = {
    "cut": ('{"a":', "not JSON: "),
    "NaN, which the server refuses too": ("NaN", "not JSON: "),
    "nested too deep": ("[" * 2000, "not JSON: "),
}


@pytest.mark.parametrize(("text", "why"), NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_a_request_that_is_no_json_ends_with_2(run: Any, file: Any, text: str, why: str) -> None:
    request = file(text, "chat.json")
    code, out, err = run("explain", "--config", file(DECODE), "--request", request)
    assert (code, out) == (2, "")
    assert err.startswith(f"{request}: {why}")
    assert err.count("\n") == 1


def test_a_request_that_is_not_there_ends_with_2(run: Any, file: Any, tmp_path: Path) -> None:
    request = str(tmp_path / "none.json")
    ended = run("explain", "--config", file(DECODE), "--request", request)
    assert ended == Ended(2, "", f"{request}: No such file or directory\n")


def test_a_header_without_a_colon_ends_with_2(run: Any, file: Any) -> None:
    request = file(CHAT, "chat.json")
    ended = run("explain", "--config", file(DECODE), "--request", request, "--header", "X 1")
    assert ended == Ended(2, "", "--header 'X 1': write it as 'name: value'\n")


# --- schema --------------------------------------------------------------------------------------------------------


def test_the_schema_is_one_and_every_shipped_file_satisfies_it(run: Any) -> None:
    code, out, err = run("schema")
    assert (code, err) == (0, "")
    schema = json.loads(out)
    Draft202012Validator.check_schema(schema)
    for path in FILES:
        faults = Draft202012Validator(schema).iter_errors(yaml.safe_load(path.read_text()))
        assert [fault.message for fault in faults] == [], path.name


# --- serve and demo ------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_ends_with_1_and_names_the_key(run: Any, file: Any, restored: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path = file({**DECODE, "server": {"listen_addr": address}})
        code, out, err = run("serve", "--config", path)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"{path}: server.listen_addr: ")


def test_without_uvloop_the_standard_loop_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    async def done() -> None: ...

    async def failed() -> int:
        return 1

    assert (cli.run(done()), cli.run(failed())) == (0, 1)


def test_demo_is_told_the_port_the_question_its_picture_and_whether_to_stream(
    run: Any, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def demo(port: int, ask: str | None, stream: bool, image: str | None) -> int:
        asked.append((port, ask, stream, image))
        return 0

    monkeypatch.setattr("coordinator.demo.demo", demo)
    assert run("demo").code == 0
    assert run("demo", "--port", "0", "--ask", "Hello", "--stream", "--image", "cat.png").code == 0
    assert asked == [(8080, None, False, None), (0, "Hello", True, "cat.png")]


# --- output that nobody reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_it_quietly(unbuffered: str) -> None:
    """As in ``coordinator schema | head -1``, whether Python holds the output back or not."""
    command = [sys.executable, "-m", "coordinator", "schema"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141

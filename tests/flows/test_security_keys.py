"""Keys of clients, which are checked here, and keys of workers, which are ours: who sees which, who is told what."""

import json
import logging
import os

import pytest
from multidict import CIMultiDict

from coordinator.app import build
from coordinator.config import Config, ConfigError
from coordinator.sim import Settings
from coordinator.workers.capability import MODE_QUESTION
from tests.flows.conftest import config_tree
from tests.flows.wire import connect, head

CHAT = "/v1/chat/completions"
KEY, OTHER, WORKERS = "sk-client-1", "sk-client-2", "sk-workers"
BEARER = ("Authorization", f"Bearer {KEY}")
NONE = ("X-None", "1")


def value_of(received, name):
    return CIMultiDict(received.headers).get(name)


def sent(worker, name):
    """Return a header of every leg that a worker got, None where it was missing."""
    legs = [got for got in worker.received if got.method == "POST" and got.body not in ({}, MODE_QUESTION)]
    return [value_of(got, name) for got in legs]


@pytest.fixture
def keyed(coordinator):
    """Start a coordinator whose /metrics is asked for with a key, as the end of each test does."""

    async def start(*args, key=KEY, **changes):
        at = await coordinator(*args, **changes)
        get = at.get

        async def with_key(path, *headers):
            own = (("x-api-key", key),) if path == "/metrics" and not headers else ()
            return await get(path, *headers, *own)

        at.get = with_key
        return at

    return start


@pytest.fixture
async def guarded(keyed, fleet):
    return await keyed(fleet, "text", server={"api_keys": [KEY, OTHER]})


@pytest.mark.parametrize(
    "header",
    [
        BEARER,
        ("authorization", f"bearer {OTHER}"),
        ("Authorization", f"BEARER   {KEY} "),
        ("x-api-key", KEY),
    ],
)
async def test_a_good_key_is_let_in_in_either_header(guarded, header):
    assert (await guarded.chat("Say hello.", header)).status == 200


@pytest.mark.parametrize(
    "header",
    [
        NONE,
        ("Authorization", "Bearer wrong"),
        ("Authorization", f"Bearer {KEY}x"),
        ("Authorization", f"Bearer {KEY[:-1]}"),
        ("Authorization", "Bearer"),
        ("Authorization", KEY),
        ("Authorization", f"Basic {KEY}"),
        ("x-api-key", ""),
        ("x-api-key", f"{KEY}, {OTHER}"),
        ("Proxy-Authorization", f"Bearer {KEY}"),
    ],
)
async def test_without_a_good_key_the_answer_is_401_and_no_worker_is_asked(guarded, fleet, legs, header):
    got = await guarded.chat("Say hello.", header)
    assert (got.status, got.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert (got.error["type"], got.error["code"], got.error["param"]) == ("AuthenticationError", 401, None)
    assert "x-api-key" in got.error["message"] and KEY not in got.raw.decode()
    assert [legs(worker) for worker in fleet.workers] == [[], [], []]
    assert await guarded.count("coordinator_requests_total", outcome="unauthorized") == 1


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropic_clients_are_refused_in_their_own_shape(guarded, path):
    got = await guarded.post(path, {"model": "tiny", "max_tokens": 5, "messages": []})
    assert (got.status, got.body["type"], got.error["type"]) == (401, "error", "authentication_error")


async def test_every_route_but_the_probes_wants_a_key(guarded):
    """/metrics tells of everybody's load, so on the port where clients are it is not open either."""
    assert [(await guarded.get(path)).status for path in ("/healthz", "/health", "/readyz")] == [200, 200, 200]
    for path in ("/v1/models", "/metrics"):
        assert [(await guarded.get(path, header)).status for header in (NONE, BEARER)] == [401, 200], path
    for path in ("/v1/completions", "/v1/responses", "/inference/v1/generate"):
        assert (await guarded.post(path, {})).status == 401
        assert (await guarded.post(path, {}, BEARER)).status == 400


async def test_a_key_is_asked_for_before_a_body_is_waited_for(guarded):
    async with connect(guarded.url) as wire:
        await wire.send(head(CHAT, "Content-Type: application/json", "Content-Length: 99"))
        assert (await wire.answer()).status == 401
    async with connect(guarded.url) as wire:
        await wire.send(head(CHAT, "Content-Type: application/json", "Content-Length: 99", "Expect: 100-continue"))
        got = await wire.answer()
        assert (got.status, got.headers["Connection"]) == (401, "close")


async def test_strangers_take_no_place_in_the_queue(keyed, fleet):
    at = await keyed(fleet, server={"api_keys": [KEY], "max_concurrency": 1, "queue_size": 0})
    permit = at.front.plan.admission.permit()
    await permit.begin()
    try:
        assert (await at.chat()).status == 401
        assert (await at.chat("Say hello.", BEARER)).status == 429
    finally:
        permit.release()


@pytest.mark.parametrize("header", [BEARER, ("x-api-key", KEY)])
async def test_a_key_that_was_checked_here_goes_no_further(guarded, fleet, header):
    assert (await guarded.chat("Say hello.", header, ("X-Kept", "1"))).status == 200
    assert (await guarded.get("/v1/models", header)).status == 200
    for worker in fleet.workers:
        assert set(sent(worker, "X-Kept")) - {None} == {"1"}  # probes carry nothing of a client
        assert {value_of(got, name) for got in worker.received for name in ("Authorization", "x-api-key")} == {None}


async def test_a_checked_key_goes_on_where_the_configuration_says_so(keyed, fleet):
    at = await keyed(fleet, server={"api_keys": [KEY], "forward_authorization": True})
    assert (await at.chat("Say hello.", BEARER)).status == 200
    assert sent(fleet.decode, "Authorization") == [f"Bearer {KEY}"]


async def test_without_keys_of_our_own_a_client_s_key_is_for_the_workers(coordinator, fleet):
    at = await coordinator(fleet)
    assert (await at.chat("Say hello.", BEARER, ("x-api-key", "a"))).status == 200
    for worker in (fleet.prefill, fleet.decode):
        assert (sent(worker, "Authorization"), sent(worker, "x-api-key")) == ([f"Bearer {KEY}"], ["a"])


async def test_a_client_s_key_can_be_kept_from_workers_without_being_checked(coordinator, fleet):
    at = await coordinator(fleet, server={"forward_authorization": False})
    assert (await at.chat("Say hello.", BEARER)).status == 200
    assert sent(fleet.decode, "Authorization") == [None]


@pytest.mark.parametrize("server", [{}, {"api_keys": [KEY]}, {"api_keys": [KEY], "forward_authorization": True}])
async def test_a_role_s_key_goes_on_every_leg_and_probe_and_replaces_the_client_s(keyed, fleet_of, server):
    """Workers with ``--api-key`` refuse anything else; what asks for health and for routes has the key as well."""
    fleet = await fleet_of(settings=Settings(api_key=WORKERS))
    key = {"api_key": WORKERS}
    at = await keyed(fleet, "text", server=server, pools={"prefill": key, "decode": key}, steps={"render": key})
    for header in (BEARER, ("x-api-key", KEY)):
        assert (await at.chat("Say hello.", header)).status == 200
    assert (await at.get("/v1/models", BEARER)).status == 200
    for worker in fleet.workers:
        assert {value_of(got, "Authorization") for got in worker.received} == {f"Bearer {WORKERS}"}
        assert KEY not in str([got.headers for got in worker.received])


async def test_a_worker_s_401_is_our_fault_where_the_key_is_ours(keyed, fleet_of, eventually, excuse):
    """The client's key was good: a 502 tells the operator which key is not, and readiness has told before."""
    excuse("unread", "no decode worker lets us in")
    fleet = await fleet_of(decode_settings=Settings(api_key=WORKERS))
    at = await keyed(fleet, "text", server={"api_keys": [KEY]}, ready=False)
    got = await at.chat("Say hello.", BEARER)
    assert got.status == 502
    assert "pools.decode.api_key must be the key that it was started with" in got.error["message"]

    async def told():
        return "pools.decode.api_key must be the key" in (await at.get("/readyz", BEARER)).raw.decode()

    await eventually(told)
    anybody = await at.get("/readyz")
    assert (anybody.status, "127.0.0.1" in anybody.raw.decode()) == (503, False)


async def test_a_worker_s_401_is_the_client_s_where_the_key_is_the_client_s(coordinator, fleet_of):
    fleet = await fleet_of(settings=Settings(api_key=WORKERS))
    at = await coordinator(fleet, "text")
    got = await at.chat("Say hello.", BEARER)
    assert (got.status, got.error["message"]) == (401, "Unauthorized")
    assert (await at.chat("Say hello.", ("Authorization", f"Bearer {WORKERS}"))).status == 200


async def test_keys_in_files_are_read_again_when_the_files_change(keyed, fleet, tmp_path):
    """The file of clients' keys, and the file of one worker's key; a key that is taken out is good no longer."""
    clients, decode = tmp_path / "clients", tmp_path / "decode"
    clients.write_text(f"# team a\n{KEY}\n")
    decode.write_text("first\n")
    files = {"server": {"api_keys_file": str(clients)}, "pools": {"decode": {"api_key": f"file:{decode}"}}}
    at = await keyed(fleet, "alone", key=OTHER, **files)
    assert (await at.chat("a", BEARER)).status == 200
    clients.write_text(OTHER)
    decode.write_text("second-one\n")
    await at.front.plan.watch.look()
    assert (await at.chat("b", BEARER)).status == 401
    assert (await at.chat("c", ("x-api-key", OTHER))).status == 200
    assert sent(fleet.decode, "Authorization") == ["Bearer first", "Bearer second-one"]
    os.remove(clients)
    await at.front.plan.watch.look()
    assert (await at.chat("d", ("x-api-key", OTHER))).status == 200
    clients.write_text("")
    await at.front.plan.watch.look()
    assert (await at.chat("e", ("x-api-key", OTHER))).status == 401
    clients.write_text(OTHER)
    await at.front.plan.watch.look()


async def test_a_key_of_the_environment_is_read_at_the_start(coordinator, fleet, monkeypatch):
    monkeypatch.setenv("DECODE_KEY", "from-env")
    at = await coordinator(fleet, "alone", pools={"decode": {"api_key": "env:DECODE_KEY"}})
    assert (await at.chat()).status == 200
    assert sent(fleet.decode, "Authorization") == ["Bearer from-env"]


async def test_keys_that_cannot_be_read_stop_the_start_all_in_one_message(fleet, tmp_path):
    missing = tmp_path / "none"
    tree = config_tree(
        fleet,
        "text",
        {"render": {"api_key": "env:NOT_SET_A"}},
        {
            "server": {"api_keys": ["env:NOT_SET_B"], "api_keys_file": str(missing)},
            "pools": {"decode": {"api_key": f"file:{missing}", "ca_file": str(missing)}},
        },
    )
    with pytest.raises(ConfigError) as refused:
        build(Config.model_validate(tree))
    gone, unset = (
        f"{missing} cannot be read: No such file or directory",
        "is empty or not set, and a key should be there",
    )
    assert refused.value.problems == [
        f"configuration: pools.decode.api_key: {gone}",
        f"configuration: pools.decode.ca_file: {gone}",
        f"configuration: pipeline.steps[0].params.api_key: the environment variable NOT_SET_A {unset}",
        f"configuration: server.api_keys[0]: the environment variable NOT_SET_B {unset}",
        f"configuration: server.api_keys_file: {gone}",
    ]


async def test_a_file_of_keys_without_a_key_stops_the_start(fleet, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key, so nobody could ask for anything"):
        build(Config.model_validate(config_tree(fleet, "openai", {}, {"server": {"api_keys_file": str(file)}})))


async def test_no_key_is_in_a_log_line_an_error_or_a_repr(keyed, fleet, caplog, excuse):
    excuse("unread", "decode has stopped")
    with caplog.at_level(logging.DEBUG):
        at = await keyed(
            fleet, server={"api_keys": [KEY]}, pools={role: {"api_key": WORKERS} for role in ("prefill", "decode")}
        )
        answers = [
            await at.chat("a", BEARER),
            await at.chat("b", ("x-api-key", OTHER)),
            await at.get("/metrics", BEARER),
        ]
        await fleet.decode.refuse_connections()
        answers.append(await at.chat("c", BEARER))
    said = "".join(json.dumps([record.getMessage(), str(vars(record))]) for record in caplog.records)
    said += "".join(answer.raw.decode() for answer in answers) + repr(at.upstream.links) + repr(at.config)
    workers = [worker for link in at.upstream.links.values() for worker in link.router.known()]
    said += repr(workers) + str(vars(at.front))
    assert not [key for key in (KEY, OTHER, WORKERS) if key in said]
    assert [answer.status for answer in answers] == [200, 401, 200, 503]

"""Sidecar mode: the router in front names the prefill worker in a header, inside an allow-list."""

import pytest

HEADER = "x-prefiller-host-port"
HELLO = "Hello! How can I help you today?"


@pytest.fixture
def sidecar(coordinator, fleet):
    """Decode is the worker beside us, and prefill whichever the header names."""

    async def start(shape="openai", **pool):
        prefill = {"endpoints": None, "header": HEADER, "allow": ["127.0.0.1"], **pool}
        return await coordinator(fleet, shape, pools={"prefill": prefill})

    return start


def named(worker):
    return HEADER, worker.url.removeprefix("http://")


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_named_worker_prefills(sidecar, fleet, legs, shape, stream):
    """Its hand-over reaches decode; the header itself reaches no worker."""
    at = await sidecar(shape)
    got = await at.chat("Say hello.", named(fleet.prefill), stream=stream)
    assert (got.status, got.text) == (200, HELLO)
    assert (len(legs(fleet.prefill)), len(fleet.store.read)) == (1, 1)
    assert [leg.header(HEADER) for worker in (fleet.prefill, fleet.decode) for leg in legs(worker)] == [None, None]


async def test_the_first_of_several_named_workers_is_taken(sidecar, fleet, legs):
    """A router may list more, best first; also as a URL."""
    at = await sidecar()
    got = await at.chat("Say hello.", (HEADER, f"{fleet.prefill.url}, 127.0.0.1:1"))
    assert (got.status, len(legs(fleet.prefill))) == (200, 1)


@pytest.mark.parametrize("headers", [(), ((HEADER, ""),)], ids=["absent", "empty"])
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_without_the_header_decode_does_both(sidecar, fleet, legs, shape, headers):
    """No prefill leg and no hand-over, and a metric that says why."""
    at = await sidecar(shape)
    got = await at.chat("Say hello.", *headers)
    assert (got.status, got.text) == (200, HELLO)
    [leg] = legs(fleet.decode)
    assert "kv_transfer_params" not in leg.body
    assert legs(fleet.prefill) == []
    assert await at.count("coordinator_prefills_skipped_total", reason="no_worker_named") == 1


async def test_a_prefill_worker_that_is_the_decode_worker_means_decode_alone(sidecar, fleet, legs):
    """A worker cannot fetch from itself: its engine would fail the request."""
    at = await sidecar()
    got = await at.chat("Say hello.", named(fleet.decode))
    assert (got.status, got.text) == (200, HELLO)
    [leg] = legs(fleet.decode)
    assert "kv_transfer_params" not in leg.body


@pytest.mark.parametrize(
    "value", ["127.0.0.2:8000", "10.0.0.1:8000", "localhost:8000", "[::1]:8000", "169.254.169.254", "example.com:80"]
)
async def test_a_worker_outside_the_allow_list_is_a_403_and_is_never_called(sidecar, fleet, legs, value):
    """The header may come from outside, so a name is not even looked up."""
    at = await sidecar()
    got = await at.chat("Say hello.", (HEADER, value))
    assert (got.status, got.error["type"], got.error["param"]) == (403, "PermissionDeniedError", HEADER)
    assert legs(fleet.decode) == []


async def test_a_port_outside_the_allow_list_is_a_403(sidecar, fleet):
    """Naming the host is not enough where the list names a port."""
    at = await sidecar(allow=["127.0.0.1:1"])
    assert (await at.chat("Say hello.", named(fleet.prefill))).status == 403


@pytest.mark.parametrize(
    "value", ["not a host", "http://", "127.0.0.1:99999", "ftp://127.0.0.1:80", "127.0.0.1:80/x?y"]
)
async def test_a_header_that_names_no_worker_is_a_400(sidecar, fleet, legs, value):
    """It names the header as the param at fault."""
    at = await sidecar()
    got = await at.chat("Say hello.", (HEADER, value))
    assert (got.status, got.error["param"]) == (400, HEADER)
    assert legs(fleet.decode) == []


async def test_a_repeated_header_is_a_400(sidecar, fleet, legs):
    """Which one is meant would be a guess."""
    at = await sidecar()
    got = await at.chat("Say hello.", named(fleet.prefill), named(fleet.prefill))
    assert (got.status, got.error["param"]) == (400, HEADER)
    assert legs(fleet.decode) == legs(fleet.prefill) == []


async def test_a_named_worker_that_is_gone_is_a_503(sidecar, fleet, legs):
    """The router in front will name another one next time."""
    at = await sidecar()
    await fleet.prefill.refuse_connections()
    got = await at.chat("Say hello.", named(fleet.prefill))
    assert (got.status, got.headers["Retry-After"]) == (503, "1")
    assert legs(fleet.decode) == []


@pytest.fixture
def named_decode(coordinator, fleet):
    """The request names its decode worker; prefill is ours to pick."""

    async def start():
        decode = {"endpoints": None, "header": "x-decode-host-port", "allow": ["127.0.0.0/8"]}
        return await coordinator(fleet, pools={"decode": decode})

    return start


async def test_decode_may_be_named_by_a_header_too(named_decode, fleet):
    """Another router in front knows where the prompt's prefix is cached."""
    at = await named_decode()
    got = await at.chat("Say hello.", ("x-decode-host-port", named(fleet.decode)[1]))
    assert (got.status, got.text) == (200, HELLO)


async def test_a_prefill_worker_that_is_named_for_decode_does_not_prefill(coordinator, fleet_of, legs):
    """Another one does; where there is none, decode does both."""
    fleet = await fleet_of(prefills=2)
    decode = {"endpoints": None, "header": "x-decode-host-port", "allow": ["127.0.0.0/8"]}
    first, second = fleet.prefills
    at = await coordinator(fleet, pools={"decode": decode})
    for _ in range(2):
        got = await at.chat("Say hello.", ("x-decode-host-port", named(second)[1]))
        assert (got.status, got.text) == (200, HELLO)
    assert (len(legs(first)), len(legs(second)), len(fleet.store.read)) == (2, 2, 2)
    alone = await coordinator(fleet, pools={"decode": decode, "prefill": {"endpoints": [second.url]}})
    got = await alone.chat("Say hello.", ("x-decode-host-port", named(second)[1]))
    assert (got.status, got.text) == (200, HELLO)
    assert "kv_transfer_params" not in legs(second)[-1].body


async def test_both_headers_may_name_one_worker(coordinator, fleet, legs):
    pools = {
        "prefill": {"endpoints": None, "header": HEADER, "allow": ["127.0.0.1"]},
        "decode": {"endpoints": None, "header": "x-decode-host-port", "allow": ["127.0.0.1"]},
    }
    at = await coordinator(fleet, pools=pools)
    address = named(fleet.decode)[1]
    got = await at.chat("Say hello.", (HEADER, address), ("x-decode-host-port", address))
    assert (got.status, got.text) == (200, HELLO)
    [leg] = legs(fleet.decode)
    assert "kv_transfer_params" not in leg.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [((), 400), ((("x-decode-host-port", "no host"),), 400), ((("x-decode-host-port", "10.0.0.1:80"),), 403)],
    ids=["absent", "no name", "outside the allow-list"],
)
async def test_a_decode_worker_that_is_not_to_be_had_costs_no_prefill(named_decode, fleet, legs, headers, status):
    """Blocks would be kept for a decode that cannot come."""
    at = await named_decode()
    got = await at.chat("Say hello.", *headers)
    assert (got.status, got.error["param"]) == (status, "x-decode-host-port")
    assert legs(fleet.prefill) == []

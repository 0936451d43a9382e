"""Gateway mode: one address for every role; the endpoint picker behind it reads the role off ``EPP-Profile``."""

import pytest
from aiohttp import ClientSession, web

REVISION = "x-llm-d-disagg-revision"
HELLO = "Hello! How can I help you today?"


class Gateway:
    """Sends each request to the worker of its profile, and answers with the revision that its picker chose."""

    def __init__(self, fleet):
        self.seen = []
        self.headers = {"prefill": {REVISION: "r7"}, "decode": {}}
        self._fleet = fleet

    def legs(self, profile):
        return [headers for asked, headers in self.seen if asked == [profile]]

    async def handle(self, request):
        if request.path == "/health":
            return web.Response(status=404)  # gateways have no such route
        profiles = request.headers.getall("EPP-Profile", [])
        if "X-Request-Id" in request.headers:  # else the coordinator asks for itself, which models there are
            self.seen.append((profiles, request.headers.copy()))
        worker = {"prefill": self._fleet.prefill, "decode": self._fleet.decode}[profiles[0]]
        body = await request.read()
        async with (
            ClientSession(auto_decompress=False) as session,
            session.post(worker.url + request.path, data=body, headers=request.headers) as answer,
        ):
            kept = {"Content-Type": answer.headers["Content-Type"], **self.headers[profiles[0]]}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


@pytest.fixture
async def gateway(fleet, stack):
    gateway = Gateway(fleet)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = "http://{}:{}".format(*runner.addresses[0][:2])
    return gateway


@pytest.fixture
def behind(coordinator, fleet, gateway):
    async def start(shape="openai", **changes):
        pools = {"prefill": None, "decode": None}
        settings = {"address": gateway.url, **changes.pop("gateway", {})}
        return await coordinator(fleet, shape, pools=pools, gateway=settings, **changes)

    return start


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_leg_carries_its_role_once(behind, gateway, shape, stream):
    """One value per leg, so that no picker has to choose between two."""
    at = await behind(shape)
    got = await at.chat(stream=stream)
    assert (got.status, got.text, got.whole) == (200, HELLO, True)
    assert [profiles for profiles, _ in gateway.seen] == [["prefill"], ["decode"]]


async def test_a_client_cannot_choose_a_profile(behind, gateway):
    """H22: nor any other header by which workers are picked."""
    at = await behind()
    routing = ["EPP-Profile", "x-prefiller-host-port", "x-data-parallel-rank", "x-gateway-destination-endpoint"]
    got = await at.chat("Say hello.", *((name, "mine") for name in routing), ("X-Other", "kept"))
    assert got.status == 200
    assert [profiles for profiles, _ in gateway.seen] == [["prefill"], ["decode"]]
    for _, headers in gateway.seen:
        assert [headers.getall(name, []) for name in routing[1:]] == [[], [], []]
        assert headers["X-Other"] == "kept"


async def test_a_header_that_prefill_answered_with_goes_on_to_decode(behind, gateway):
    """``forward_response_headers``: decode must run on the revision of the fleet that prefill ran on."""
    at = await behind()
    await at.chat()
    assert REVISION not in gateway.legs("prefill")[0]
    assert gateway.legs("decode")[0].getall(REVISION) == ["r7"]


async def test_a_clients_own_value_of_such_a_header_is_discarded(behind, gateway):
    """It would send one leg to a revision that the picker did not choose; also where prefill answered with none."""
    at = await behind()
    await at.chat("Say hello.", (REVISION, "mine"))
    gateway.headers["prefill"] = {}
    await at.chat("Say hello.", (REVISION, "mine"))
    assert [leg.getall(REVISION, []) for leg in gateway.legs("prefill")] == [[], []]
    assert [leg.getall(REVISION, []) for leg in gateway.legs("decode")] == [["r7"], []]


async def test_which_headers_go_on_is_configured(behind, gateway):
    """Any name, in any case, and no other."""
    gateway.headers["prefill"] = {"X-Shard": "s1", REVISION: "r7"}
    at = await behind(pipeline={"forward_response_headers": ["x-shard"]})
    await at.chat("Say hello.", ("X-Shard", "mine"))
    [decode] = gateway.legs("decode")
    assert (decode.getall("X-Shard"), REVISION in decode) == (["s1"], False)


async def test_the_gateways_timeout_is_the_limit_of_a_leg_that_sets_none(behind, fleet, gateway, eventually):
    """``gateway.timeout``, until the first byte: 504."""
    fleet.prefill.behave.first_byte_s = 5.0
    at = await behind(gateway={"timeout": "100ms"})
    got = await at.chat()
    assert (got.status, got.error["message"].partition(":")[0]) == (504, "prefill")
    await eventually(lambda: fleet.prefill.aborted)


async def test_a_probe_carries_the_decode_profile_and_prefer(behind, gateway):
    """The picker answers 412 when no decode worker has the prompt."""
    at = await behind(steps={"conditional-decode": {}})
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    [(profiles, headers)] = gateway.seen
    assert (profiles, headers.getall("Prefer")) == (["decode"], ["if-available"])


async def test_readiness_takes_any_answer_of_a_gateway(behind):
    """It has no /health of its own."""
    at = await behind()
    assert (await at.get("/readyz")).status == 200

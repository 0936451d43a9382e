"""Gateway mode: one address for every role; the endpoint picker behind it reads the role off ``EPP-Profile``."""

import pytest
from aiohttp import ClientSession, web

from tests.flows.media import CAT, DOG, OWL, image, with_media

REVISION = "x-llm-d-disagg-revision"
DECISION = "x-llm-d-revision-decision-id"
HELLO = "Hello! How can I help you today?"


class Gateway:
    """Sends each request to the worker of its profile, and answers with the revision that its picker chose."""

    def __init__(self, fleet):
        self.seen = []
        self.headers = {"prefill": {REVISION: "r7"}, "decode": {}, "encode": {}}
        self.profile = "EPP-Profile"
        self.misses = 0
        self.revisions = {}
        self._fleet = fleet

    def legs(self, profile):
        return [headers for asked, headers in self.seen if asked == [profile]]

    async def handle(self, request):
        if request.method == "GET":
            return web.Response(status=404)  # what is asked beside the legs; gateways have no /health
        profiles = request.headers.getall(self.profile, [])
        self.seen.append((profiles, request.headers.copy()))
        if self.misses and "Prefer" in request.headers:
            self.misses -= 1
            return web.json_response({"error": "no worker has it"}, status=412, headers={REVISION: "of a miss"})
        worker = getattr(self._fleet, profiles[0])
        if revisions := self.revisions.get(profiles[0]):
            self.headers[profiles[0]] = {REVISION: revisions.pop(0)}
        own = self.headers[profiles[0]]
        body = await request.read()
        async with (
            ClientSession(auto_decompress=False) as session,
            session.post(worker.url + request.path, data=body, headers=request.headers) as answer,
        ):
            kept = {"Content-Type": answer.headers["Content-Type"], **own}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


@pytest.fixture
def gateway_of(stack):
    async def start(fleet):
        gateway = Gateway(fleet)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", gateway.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gateway.url = "http://{}:{}".format(*runner.addresses[0][:2])
        return gateway

    return start


@pytest.fixture
async def gateway(fleet, gateway_of):
    return await gateway_of(fleet)


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
    newer = ["x-llm-d-epp-profile", DECISION]
    got = await at.chat("Say hello.", *((name, "mine") for name in (*routing, *newer)), ("X-Other", "kept"))
    assert got.status == 200
    assert [profiles for profiles, _ in gateway.seen] == [["prefill"], ["decode"]]
    for _, headers in gateway.seen:
        assert [headers.getall(name, []) for name in routing[1:]] == [[], [], []]
        assert headers["X-Other"] == "kept"
        assert "x-llm-d-epp-profile" not in headers
        assert "mine" not in headers.getall(DECISION)


async def test_all_legs_of_a_request_carry_one_decision_id(behind, gateway):
    """So that a picker in the middle of a rollout keeps a request on one revision; two requests have two."""
    at = await behind()
    await at.chat()
    await at.chat()
    ids = [headers.getall(DECISION) for _, headers in gateway.seen]
    assert [len(each) for each in ids] == [1, 1, 1, 1]
    assert ids[0] == ids[1] != ids[2] == ids[3]


async def test_the_profile_may_go_by_its_newer_name(behind, gateway):
    gateway.profile = "x-llm-d-epp-profile"
    at = await behind(gateway={"profile_header": "x-llm-d-epp-profile"})
    assert (await at.chat()).status == 200
    assert [profiles for profiles, _ in gateway.seen] == [["prefill"], ["decode"]]
    assert not [headers for _, headers in gateway.seen if "EPP-Profile" in headers]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_probe_that_the_picker_answers_with_412_goes_on_with_the_pipeline(behind, gateway, stream):
    """Nothing of the 412 reaches the client, and its headers no later leg."""
    at = await behind(steps={"conditional-decode": {}})
    gateway.misses = 1
    got = await at.chat(stream=stream)
    assert (got.status, got.text, got.whole) == (200, HELLO, True)
    assert [(profiles, "Prefer" in headers) for profiles, headers in gateway.seen] == [
        (["decode"], True),
        (["prefill"], False),
        (["decode"], False),
    ]
    assert gateway.legs("prefill")[0].getall(REVISION, []) == []


async def test_of_several_answers_what_most_of_them_say_goes_on(coordinator, fleet_of, gateway_of):
    """Encode legs are in flight together: none hears of another's answer, and later legs of what most said."""
    fleet = await fleet_of(encodes=1)
    gateway = await gateway_of(fleet)
    gateway.revisions = {"encode": ["r1", "r2", "r2"]}
    pools = {"prefill": None, "decode": None, "encode": None}
    at = await coordinator(fleet, "openai", steps={"encode": {}}, pools=pools, gateway={"address": gateway.url})
    body = with_media(image(CAT), image(DOG), image(OWL))
    assert (await at.post("/v1/chat/completions", body)).status == 200
    assert [headers.getall(REVISION, []) for headers in gateway.legs("encode")] == [[], [], []]
    assert gateway.legs("prefill")[0].getall(REVISION) == ["r2"]


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

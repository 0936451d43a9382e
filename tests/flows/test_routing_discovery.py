"""Workers that are looked up: who joins gets legs, who leaves gets no more and ends what it has, and nobody is lost."""

import logging
from urllib.parse import urlsplit

import pytest

from coordinator.reload import Reloader
from tests.dns_server import DnsServer
from tests.kubernetes_api import KubernetesApi, endpoint_slice


def port_of(worker):
    return urlsplit(worker.url).port


class ByDns:
    """A name whose SRV records are the workers."""

    def __init__(self, server):
        self.server = server
        self.records = server.records

    def pool(self, role, **more):
        quick = {"min_interval": "20ms", "max_interval": "20ms", "timeout": "2s", **more}
        return {"dns": {"name": f"{role}.test.", "records": "srv", "resolvers": [self.server.address], **quick}}

    def say(self, role, *workers):
        self.records[f"{role}.test.", "SRV"] = (0, [f"0 0 {port_of(worker)} localhost." for worker in workers])

    def fail(self, failing):
        self.server.rcode = "SERVFAIL" if failing else ""


class ByKubernetes:
    """A Service for each role; a slice for each worker, since their ports differ."""

    def __init__(self, api, folder):
        self.api = api
        self.kubeconfig = api.kubeconfig(folder)

    def pool(self, role, **more):
        return {"kubernetes": {"service": role, "port": "http", "kubeconfig": self.kubeconfig, **more}}

    def say(self, role, *workers):
        now = {f"{role}-{port_of(worker)}": port_of(worker) for worker in workers}
        for name in [name for name in self.api.objects if name.startswith(role) and name not in now]:
            self.api.delete(name)
        for name in now.keys() - self.api.objects.keys():
            each = endpoint_slice(name, "127.0.0.1", ports=((now[name], "http"),))
            each["metadata"]["labels"] = {"kubernetes.io/service-name": role}
            self.api.put(each)

    def fail(self, failing):
        self.api.refuse = 500 if failing else None
        self.api.end_watches()


@pytest.fixture(params=["dns", "kubernetes"])
async def by(request, tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.background._FIRST_WAIT_S", 0.02)
    if request.param == "dns":
        async with DnsServer() as server:
            yield ByDns(server)
    else:
        from coordinator.routing import kubernetes

        monkeypatch.setattr(kubernetes, "_LEAST_S", 0.02)
        async with KubernetesApi() as api:
            yield ByKubernetes(api, tmp_path)


@pytest.fixture
def started(coordinator, by):
    """Start a coordinator whose decode workers are looked up, or those of other roles."""

    async def start(fleet, *, roles=("decode",), keep="10m", named=None, **options):
        pools = {role: {"endpoints": None, **by.pool(role, keep=keep)} for role in roles}
        if named is not None:
            pools["prefill"] = named
        if "render" in roles:
            options["pipeline"] = {"steps": [{"type": "render"}, {"type": "prefill"}, {"type": "decode"}]}
        return await coordinator(fleet, "text", pools=pools, **options)

    return start


async def test_every_role_may_be_looked_up(by, started, fleet_of, legs):
    fleet = await fleet_of(decodes=2)
    roles = {"render": [fleet.render], "prefill": fleet.prefills, "decode": fleet.decodes}
    for role, workers in roles.items():
        by.say(role, *workers)
    at = await started(fleet, roles=tuple(roles))
    for _ in range(4):
        assert (await at.chat()).status == 200
    assert [len(legs(worker)) for worker in fleet.decodes] == [2, 2]
    found = await at.metrics("coordinator_discover")
    assert found['coordinator_discovered_workers{role="decode"}'] == 2
    assert found['coordinator_discovered_workers{role="render"}'] == 1
    assert found['coordinator_discovery_last_success_timestamp_seconds{role="prefill"}'] > 1.7e9


async def test_a_worker_that_leaves_ends_its_stream_and_gets_no_new_leg(by, started, fleet_of, legs, ask, eventually):
    """The one that joins in its place gets what comes."""
    fleet = await fleet_of(decodes=2)
    leaving, joining = fleet.decodes
    by.say("decode", leaving)
    at = await started(fleet)
    leaving.behave.itl_s = 0.02
    async with at.open("/v1/chat/completions", ask("Count.", stream=True, max_tokens=40)) as live:
        await live.head()
        by.say("decode", joining)
        members = at.upstream.links["decode"].router.members
        await eventually(lambda: [port_of(worker) for worker in members.workers] == [port_of(joining)])
        leaving.behave.itl_s = 0.0
        for _ in range(3):
            assert (await at.chat()).status == 200
        assert (len(legs(leaving)), len(legs(joining))) == (1, 3)
        assert members.leaving  # its stream is still being answered
        answer = await live.rest()
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    assert not members.leaving


@pytest.mark.parametrize("decodes", [1, 2])
async def test_a_decode_worker_that_is_named_for_prefill_does_both(by, started, fleet_of, legs, decodes):
    """A sidecar's header and workers that are looked up: none can fetch from itself."""
    fleet = await fleet_of(decodes=decodes)
    by.say("decode", *fleet.decodes)
    named = {"endpoints": None, "header": "x-prefiller-host-port", "allow": ["127.0.0.1", "localhost"]}
    at = await started(fleet, named=named)
    for worker in at.upstream.links["decode"].router.known():
        got = await at.chat("Say hello.", ("x-prefiller-host-port", worker.url.removeprefix("http://")))
        assert got.status == 200
    sent = [leg for worker in fleet.decodes for leg in legs(worker)]
    assert (len(sent), [leg for leg in sent if leg.body.get("kv_transfer_params")]) == (decodes, [])
    got = await at.chat("Say hello.", ("x-prefiller-host-port", fleet.prefill.url.removeprefix("http://")))
    assert (got.status, len(legs(fleet.prefill)), len(fleet.store.read)) == (200, 1, 1)


async def test_where_pools_overlap_decode_goes_to_another_worker_than_prefill(by, started, fleet_of, legs):
    """One Service for both, say."""
    fleet = await fleet_of(prefills=2)
    by.say("prefill", *fleet.prefills)
    by.say("decode", *fleet.prefills)
    at = await started(fleet, roles=("prefill", "decode"))
    for _ in range(6):
        assert (await at.chat()).status == 200
    assert len(fleet.store.read) == 6
    assert await at.count("coordinator_retries_total") == 0


async def test_the_only_decode_worker_does_not_prefill(by, started, fleet_of, legs):
    fleet = await fleet_of(prefills=2)
    first, second = fleet.prefills
    by.say("prefill", first, second)
    by.say("decode", second)
    at = await started(fleet, roles=("prefill", "decode"))
    for _ in range(4):
        assert (await at.chat()).status == 200
    assert (len(legs(first)), len(legs(second)), len(fleet.store.read)) == (4, 4, 4)


async def test_a_worker_alone_in_both_pools_does_both(by, started, fleet, legs):
    by.say("prefill", fleet.decode)
    by.say("decode", fleet.decode)
    at = await started(fleet, roles=("prefill", "decode"))
    for _ in range(2):
        assert (await at.chat()).status == 200
    assert [bool(leg.body.get("kv_transfer_params")) for leg in legs(fleet.decode)] == [False, False]
    assert await at.count("coordinator_prefills_skipped_total") == 2


async def test_nobody_found_is_not_ready_and_503_until_somebody_is(
    by, started, fleet, legs, eventually, monkeypatch, caplog
):
    """The role is named by /readyz, and why, before a request is the first to tell."""
    monkeypatch.setattr("coordinator.planning._FIRST_ANSWER_S", 0.3)
    at = await started(fleet, ready=False, server={"readiness_interval": "50ms"})
    await eventually(lambda: "not asked" not in at.front.plan.readiness.problems()[0])
    told = await at.get("/readyz")
    assert (told.status, told.raw.startswith(b"decode: no workers were found")) == (503, True)
    refused = await at.chat()
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert refused.error["message"].startswith("decode: there is no decode worker")
    assert not legs(fleet.prefill)  # whose work would have been for nobody
    with caplog.at_level(logging.INFO, "coordinator"):
        by.say("decode", fleet.decode)
        await eventually(lambda: not at.front.plan.readiness.problems())
    assert (await at.chat()).status == 200
    [joined] = [record.fields["joined"] for record in caplog.records if record.getMessage() == "decode: workers found"]
    assert [urlsplit(url).port for url in joined] == [port_of(fleet.decode)]


async def test_look_ups_that_fail_leave_the_workers_as_they_are(by, started, fleet, eventually):
    by.say("decode", fleet.decode)
    at = await started(fleet)
    by.fail(True)

    async def failed():
        return await at.count("coordinator_discovery_failures_total", role="decode") >= 3

    await eventually(failed)
    assert (await at.chat()).status == 200
    assert (await at.get("/readyz")).status == 200
    by.fail(False)


async def test_look_ups_that_fail_for_too_long_empty_the_pool(by, started, fleet, eventually):
    """By then the addresses may be somebody else's; the same happens to nobody whose look-up succeeds again."""
    by.say("decode", fleet.decode)
    at = await started(fleet, server={"readiness_interval": "50ms"}, keep="200ms")
    by.fail(True)
    await eventually(lambda: at.front.plan.readiness.problems())
    assert at.front.plan.readiness.problems()[0].startswith("decode: no workers were found: ")
    assert (await at.chat()).status == 503
    by.fail(False)
    await eventually(lambda: not at.front.plan.readiness.problems())
    assert (await at.chat()).status == 200


async def test_a_file_that_is_changed_while_nothing_can_be_looked_up_keeps_the_workers(
    by, started, fleet_of, legs, eventually, monkeypatch
):
    """The plan that takes the other's place looks up anew, and goes on with the last answer until it has one."""
    monkeypatch.setattr("coordinator.planning._FIRST_ANSWER_S", 0.1)
    fleet = await fleet_of(decodes=2)
    by.say("decode", fleet.decode)
    at = await started(fleet)
    by.fail(True)
    server = at.config.server.model_copy(update={"queue_size": 7})
    changed = at.config.model_copy(update={"server": server})
    before = at.front.plan
    assert await Reloader(at.app, lambda: changed).reload() == "applied"
    assert at.front.plan is not before
    assert (await at.chat()).status == 200
    by.fail(False)
    by.say("decode", fleet.decodes[1])
    members = at.front.plan.upstream.links["decode"].router.members
    await eventually(lambda: [port_of(worker) for worker in members.workers] == [port_of(fleet.decodes[1])])
    assert (await at.chat()).status == 200
    assert [len(legs(worker)) for worker in fleet.decodes] == [1, 1]

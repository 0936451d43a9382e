"""The file that replaces llm-d's pd-sidecar, as it is shipped, with only its addresses changed."""

from pathlib import Path

import pytest
import yaml

from tests.flows.conftest import chat
from tests.flows.media import CAT, DOG, image, shown, with_media

FILE = Path(__file__).resolve().parents[2] / "pipeline_configs" / "llm-d-sidecar.yaml"
CHAT = "/v1/chat/completions"
HELLO = "Hello! How can I help you today?"


@pytest.fixture
def sidecar(coordinator):
    async def start(fleet):
        tree = yaml.safe_load(FILE.read_text())
        for role in ("encode", "prefill"):
            assert tree["pools"][role]["allow"] == ["10.0.0.0/8:8000"]
            tree["pools"][role] |= {"allow": ["127.0.0.1"], "endpoints": None}
        tree["pools"]["decode"]["endpoints"] = [fleet.decode.url]
        tree["server"]["listen_addr"] = "127.0.0.1:0"
        return await coordinator(fleet, **tree)

    return start


def named(header, *workers):
    return header, ",".join(worker.url.removeprefix("http://") for worker in workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_of_the_endpoint_picker_names_the_prefill_worker(sidecar, fleet_of, legs, stream):
    """One, or a list of which the first is taken and the next tried where it cannot be reached."""
    fleet = await fleet_of(prefills=2)
    at = await sidecar(fleet)
    got = await at.chat("Say hello.", named("x-prefiller-host-port", fleet.prefills[1]), stream=stream)
    assert (got.status, got.text) == (200, HELLO)
    await fleet.prefills[1].refuse_connections()
    got = await at.chat("Say hello.", named("x-prefiller-host-port", *reversed(fleet.prefills)), stream=stream)
    assert (got.status, got.text) == (200, HELLO)
    assert [len(legs(worker)) for worker in (*fleet.prefills, fleet.decode)] == [1, 1, 2]


async def test_the_header_of_the_endpoint_picker_names_the_encode_workers(sidecar, fleet_of, legs):
    fleet = await fleet_of(encodes=2)
    at = await sidecar(fleet)
    headers = named("x-encoder-hosts-ports", *fleet.encodes), named("x-prefiller-host-port", fleet.prefill)
    got = await at.post(CHAT, with_media(image(CAT), image(DOG)), *headers)
    assert (got.status, len(shown(got.text))) == (200, 2)
    assert [len(legs(worker)) for worker in (*fleet.encodes, fleet.prefill)] == [1, 1, 1]
    assert dict(fleet.prefill.core.embedded) == {"remote": 2}
    # The headers go no further: no worker chooses another.
    sent = [leg for worker in fleet.workers for leg in legs(worker)]
    assert not [leg for leg in sent if leg.header("x-encoder-hosts-ports") or leg.header("x-prefiller-host-port")]


async def test_without_headers_the_decode_worker_does_it_all(sidecar, fleet_of, legs):
    fleet = await fleet_of(encodes=1)
    at = await sidecar(fleet)
    assert (await at.chat()).text == HELLO
    assert len(shown((await at.post(CHAT, with_media(image(CAT)))).text)) == 1
    assert (legs(fleet.encode), legs(fleet.prefill), len(legs(fleet.decode))) == ([], [], 2)


@pytest.mark.parametrize("header", ["x-prefiller-host-port", "x-encoder-hosts-ports"])
async def test_a_worker_outside_the_allow_list_is_a_403(sidecar, fleet, legs, header):
    at = await sidecar(fleet)
    body = with_media(image(CAT)) if "encoder" in header else chat()
    assert (await at.post(CHAT, body, (header, "10.9.9.9:8000"))).status == 403
    assert legs(fleet.decode) == []


async def test_the_endpoint_picker_reads_the_workers_metrics_here_and_nobody_else_reaches_the_rest(sidecar, fleet):
    """H24: only what the file lists is passed on."""
    at = await sidecar(fleet)
    assert b"vllm:num_requests_waiting" in (await at.get("/metrics")).raw
    assert (await at.get("/version")).body == {"version": fleet.decode.core.settings.version}
    assert (await at.get("/health")).status == 200
    assert (await at.get("/load")).status == 404
    assert (await at.post("/sleep", {})).status == 404

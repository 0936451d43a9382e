"""Pools whose workers cannot all do the same: a leg goes where what it needs is served."""

import dataclasses

import pytest

from coordinator.sim import Settings

CHAT = "/v1/chat/completions"


@pytest.fixture
def mixed(fleet_of):
    """``await mixed(0, version="0.32.0")`` is a fleet with two decode workers, of which those numbers differ."""

    async def start(*numbers, **settings):
        fleet = await fleet_of(decodes=2)
        for number in numbers:
            core = fleet.decodes[number].core
            core.settings = dataclasses.replace(core.settings, **settings)
        return fleet

    return start


async def test_a_leg_goes_only_to_workers_that_have_its_mode(coordinator, mixed, legs):
    """derender needs 0.33: of a pool in the middle of an upgrade, half is used, and no request fails."""
    fleet = await mixed(0, version="0.32.0")
    at = await coordinator(fleet, "derender")
    old, new = fleet.decodes
    assert {(await at.chat(stream=stream)).status for stream in (False, True) for _ in range(4)} == {200}
    assert (len(legs(old)), len(legs(new))) == (0, 8)
    assert await at.count("coordinator_retries_total") == 0


async def test_what_such_a_worker_has_is_used(coordinator, mixed, legs):
    """Completions are made of text, which 0.32 has: those go to both."""
    fleet = await mixed(0, version="0.32.0")
    at = await coordinator(fleet, "derender")
    body = {"model": "tiny", "prompt": "Say hello.", "max_tokens": 5}
    assert {(await at.post("/v1/completions", body)).status for _ in range(6)} == {200}
    assert [len(legs(worker)) for worker in fleet.decodes] == [3, 3]


async def test_a_misfit_is_named_at_the_start_while_others_serve(coordinator, mixed):
    """In /readyz too, which says ok all the same."""
    fleet = await mixed(1, tokens_only=True)
    at = await coordinator(fleet, "text")
    got = await at.get("/readyz")
    url = fleet.decodes[1].url
    said = (
        f"decode: {url} has no tokenizer, which output_mode text needs: start it without --tokens-only, "
        "or write output_mode: tokens and derender: coordinator"
    )
    assert (got.status, got.raw.decode()) == (200, f"ok\n{said}\n")


async def test_a_worker_that_renders_needs_a_tokenizer(coordinator, fleet_of, eventually):
    fleet = await fleet_of(prefill_settings=dataclasses.replace(Settings(), tokens_only=True))
    url = fleet.prefills[0].url
    at = await coordinator(fleet, "text", steps={"render": {"address": url}}, ready=False)

    async def unready():
        return f"render: {url} has no tokenizer, which ".encode() in (await at.get("/readyz")).raw

    await eventually(unready)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_in_text_goes_only_to_workers_that_have_a_tokenizer(coordinator, fleet_of, role, eventually):
    """vLLM answers 500 there, and to a completion nothing at all."""
    bare = dataclasses.replace(Settings(), tokens_only=True)
    fleet = await fleet_of(**{f"{role}_settings": bare})
    at = await coordinator(fleet, "openai" if role == "prefill" else "alone", ready=False)
    (worker,) = fleet.prefills if role == "prefill" else fleet.decodes
    without = f"{worker.url} has no tokenizer, which {CHAT} needs: start it without --tokens-only"

    async def unready():
        got = await at.get("/readyz")
        return got.status == 503 and f"{role}: {without}" in got.raw.decode()

    await eventually(unready)
    got = await at.chat()
    assert (got.status, without in got.error["message"]) == (502, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_where_no_worker_has_the_mode_the_request_is_told_why(coordinator, mixed, stream, eventually):
    fleet = await mixed(0, 1, version="0.32.0")
    at = await coordinator(fleet, "derender", ready=False)

    async def unready():
        return b"without output_mode derender" in (await at.get("/readyz")).raw

    await eventually(unready)
    got = await at.chat(stream=stream)
    assert got.status == 502
    assert "decode: no decode worker can do this: " in got.error["message"]
    assert "run vLLM 0.33 or later" in got.error["message"]


async def test_an_upgraded_worker_is_used_once_it_is_back(coordinator, mixed, legs, eventually):
    fleet = await mixed(0, version="0.32.0")
    at = await coordinator(fleet, "derender", server={"readiness_interval": "20ms"})
    old = fleet.decodes[0]
    old.core.settings = dataclasses.replace(old.core.settings, version="0.33.0")

    async def ready():
        return (await at.get("/readyz")).raw == b"ok\n"

    await eventually(ready)
    for _ in range(4):
        assert (await at.chat()).status == 200
    assert len(legs(old)) == 2

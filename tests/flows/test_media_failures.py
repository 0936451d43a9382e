"""Encoding that goes wrong: another worker, then the file's policy; never a hang, and never an answer about nothing.

Cases M03 and M04, and their kinds.
"""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sim import ABSENT, Canned, Fault, Settings
from coordinator.sim.faults import encodings, uncached
from tests.flows.media import CAT, DOG, FORMATS, OWL, image, shown, with_media

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
EPD: dict[str, Any] = {"encode": {}}
PREFILL_ENCODES = {"on_encode_failure": "prefill_encodes"}
PICTURES = (image(CAT), image(DOG), image(OWL))

# What is wrong with one of three legs, for ever or once, and the status that the client gets of it.
BROKEN: dict[str, tuple[Fault, int]] = {
    "500": (Fault(canned=Canned(500, '{"error": {"message": "secret"}}')), 502),
    "502": (Fault(canned=Canned(502, "bad gateway")), 502),
    "503": (Fault(canned=Canned(503, "")), 503),
    "no answer at all": (Fault(hang=True), 504),
    "a closed connection": (Fault(drop=True), 502),
    "half an answer": (Fault(truncate="cut"), 502),
    "no JSON": (Fault(canned=Canned(200, "<html>")), 502),
}
LIMITS = {"encode": {"first_byte_timeout": "200ms"}}


@pytest.mark.parametrize(("fault", "status"), BROKEN.values(), ids=BROKEN)
async def test_one_leg_that_fails_once_is_made_again_elsewhere(
    fault: Fault, status: int, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=3)
    at = await coordinator(fleet, "text", steps=LIMITS)
    fleet.encode.behave.next(Fault(**{**vars_of(fault), "path": GENERATE}))
    got = await at.post(CHAT, with_media(*PICTURES))
    assert (got.status, len(shown(got.text))) == (200, 3)
    assert sum(len(legs(worker)) for worker in fleet.encodes) == 4
    assert await at.count("coordinator_retries_total", step="encode") == 1
    ids = [leg.header("x-request-id") for worker in fleet.encodes for leg in legs(worker)]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(("fault", "status"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_one_that_fails_everywhere_fails_the_request_and_ends_the_others(
    shape: str, fault: Fault, status: int, fleet_of: Any, coordinator: Any, legs: Any, eventually: Any
) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, shape, steps=LIMITS)
    for worker in fleet.encodes:
        worker.behave.fault = Fault(**{**vars_of(fault), "path": GENERATE if shape == "text" else CHAT})
    got = await at.post(CHAT, with_media(*PICTURES))
    assert got.status == status
    assert got.error["message"].startswith("encode: ")
    assert b"secret" not in got.raw
    await eventually(lambda: not any(worker.in_flight for worker in fleet.encodes))
    assert legs(fleet.prefill) == legs(fleet.decode) == []
    assert await at.count("coordinator_encodings_missing_total", policy="fail") >= 1


async def test_a_leg_that_fails_cancels_those_that_are_still_waited_for(
    fleet_of: Any, coordinator: Any, legs: Any, eventually: Any
) -> None:
    fleet = await fleet_of(encodes=3)
    at = await coordinator(fleet, "openai", steps={"encode": {"max_attempts": 1}})
    for worker in fleet.encodes[:2]:
        worker.behave.fault = Fault(path=CHAT, hang=True)
    fleet.encodes[2].behave.fault = Fault(path=CHAT, first_byte_s=0.1, canned=Canned(500, "{}"))
    got = await at.post(CHAT, with_media(*PICTURES))
    assert got.status == 502
    await eventually(lambda: [len(worker.aborted) for worker in fleet.encodes] == [1, 1, 0])


@pytest.mark.parametrize("shape", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
async def test_or_prefill_encodes_just_that_one(
    shape: str, stream: bool, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={"encode": {"max_parallel": 1}}, pipeline=PREFILL_ENCODES)
    path = CHAT if shape == "openai" else GENERATE
    fleet.encode.behave.next(Fault(), Fault(path=path, canned=Canned(500, "{}")))
    got = await at.post(CHAT, with_media(*PICTURES, stream=stream))
    assert (got.status, len(shown(got.text))) == (200, 3)
    assert dict(fleet.prefill.core.embedded) == {"remote": 2, "local": 1}
    if shape != "openai":
        tensors = legs(fleet.prefill)[0].body["features"]["kwargs_data"]["image"]
        assert [item is None for item in tensors] == [True, False, True]
    assert await at.count("coordinator_encodings_missing_total", reason="LegFailed", policy="prefill_encodes") == 1
    assert await at.count("coordinator_leg_seconds_count", step="encode", outcome="failed_over") == 1


async def test_or_prefill_encodes_all_of_them_when_nobody_else_can(fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, "text", steps=EPD, pipeline=PREFILL_ENCODES)
    for worker in fleet.encodes:
        await worker.refuse_connections()
    got = await at.post(CHAT, with_media(*PICTURES))
    assert (got.status, len(shown(got.text))) == (200, 3)
    assert dict(fleet.prefill.core.embedded) == {"local": 3}


# What an encode leg leaves, with a 200, that leads nowhere.
NOTHING: dict[str, tuple[Any, str]] = {
    "null": (encodings(None), "absent"),
    "missing": (encodings(ABSENT), "absent"),
    "a list": (encodings([]), "absent"),
    "an empty object": (encodings({}), "absent"),
    "a text": (encodings("x"), "absent"),
    "not cached, so without an address": (uncached, "incomplete"),
    "another's": (encodings({"f" * 32: {"peer_host": "127.0.0.1", "peer_port": 1}}), "other_hash"),
    "aborted": (lambda body: {**body, "choices": [{**body["choices"][0], "finish_reason": "abort"}]}, "bad_finish"),
}


@pytest.mark.parametrize(("rewrite", "reason"), NOTHING.values(), ids=NOTHING)
async def test_an_encode_leg_that_leaves_nothing_is_a_failure(
    rewrite: Any, reason: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    fleet.encode.behave.next(Fault(path=GENERATE, rewrite=rewrite))
    got = await at.post(CHAT, with_media(image(CAT)))
    assert got.status == 502
    assert "left nothing for prefill to fetch" in got.error["message"]
    assert legs(fleet.prefill) == []
    assert await at.count("coordinator_encodings_missing_total", reason=reason, policy="fail") == 1


@pytest.mark.parametrize(("rewrite", "reason"), NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_or_prefill_is_sent_the_tensors_and_the_loss_is_counted(
    shape: str, rewrite: Any, reason: str, fleet_of: Any, coordinator: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={"render": {}, **EPD}, pipeline=PREFILL_ENCODES)
    fleet.encode.behave.next(Fault(path=CHAT if shape == "openai" else GENERATE, rewrite=rewrite))
    got = await at.post(CHAT, with_media(image(CAT)))
    assert (got.status, len(shown(got.text))) == (200, 1)
    assert dict(fleet.prefill.core.embedded) == {"local": 1}
    assert await at.count("coordinator_encodings_missing_total", reason=reason, policy="prefill_encodes") == 1


async def test_in_a_shared_folder_nothing_need_be_left(fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of(encodes=1, settings=Settings(ec_connector="shared_storage"))
    at = await coordinator(fleet, "text", steps=EPD, pipeline={"ec_connector": "ec-shared-storage"})
    fleet.encode.behave.next(Fault(path=GENERATE, rewrite=encodings(None)))
    assert (await at.post(CHAT, with_media(image(CAT)))).status == 200
    assert dict(fleet.prefill.core.embedded) == {"remote": 1}


async def test_two_workers_that_contradict_one_another_fail_the_request(
    fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, "openai", steps=EPD)
    for port, worker in enumerate(fleet.encodes, 1):
        worker.behave.fault = Fault(path=CHAT, rewrite=encodings({"h": {"peer_host": "a", "peer_port": port}}))
    got = await at.post(CHAT, with_media(image(CAT), image(DOG)))
    assert got.status == 502
    assert "contradict one another" in got.error["message"]
    assert legs(fleet.prefill) == []


class Gone:
    """An encoder that forgets what it made before anybody fetches it, as one that was restarted."""

    def __init__(self, fleet: Any) -> None:
        self._store = fleet.encodings

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        for item in body.get("ec_transfer_params") or {}:
            self._store.evict(item)
        return body


async def test_an_embedding_that_is_gone_fails_the_request(
    fleet_of: Any, coordinator: Any, excuse: Any, legs: Any
) -> None:
    excuse("violations", "prefill is sent after an embedding that its encoder has lost")
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    fleet.encode.behave.next(Fault(path=GENERATE, rewrite=Gone(fleet)))
    got = await at.post(CHAT, with_media(image(CAT)))
    assert got.status == 502
    assert got.error["message"].startswith("prefill: ")
    assert [violation.reason for violation in fleet.encodings.violations] == ["unknown"]
    assert legs(fleet.decode) == []


async def test_or_prefill_is_asked_once_more_with_the_tensors(
    fleet_of: Any, coordinator: Any, excuse: Any, legs: Any
) -> None:
    excuse("violations", "prefill is sent after an embedding that its encoder has lost")
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD, pipeline=PREFILL_ENCODES)
    fleet.encode.behave.next(Fault(path=GENERATE, rewrite=Gone(fleet)))
    got = await at.post(CHAT, with_media(image(CAT)))
    assert (got.status, len(shown(got.text))) == (200, 1)
    first, second = legs(fleet.prefill)
    assert "ec_transfer_params" in first.body
    assert "ec_transfer_params" not in second.body
    assert dict(fleet.prefill.core.embedded) == {"local": 1}
    assert await at.count("coordinator_encodings_missing_total", reason="not_fetched", policy="prefill_encodes") == 1


def changed(features: dict[str, Any], change: Any) -> dict[str, Any]:
    """Return features with each of their lists changed; without a tokens-in leg there are no payloads."""
    return {name: change(row["image"]) for name, row in features.items() if row is not None}


# What a renderer may say that does not fit the tokens or the request.
LIES: dict[str, Any] = {
    "none": lambda features: None,
    "one too few": lambda features: changed(features, lambda row: {"image": row[:-1]}),
    "one too many": lambda features: changed(features, lambda row: {"image": [*row, row[0]]}),
    "other kinds": lambda features: changed(features, lambda row: {"video": row}),
    "behind the prompt": lambda features: {
        **features, "mm_placeholders": {"image": [{"offset": 10**6, "length": 3}] * 2}},
    "one place for all": lambda features: {
        **features, "mm_placeholders": {"image": [features["mm_placeholders"]["image"][0]] * 2}},
    "an empty hash": lambda features: {**features, "mm_hashes": {"image": ["", "h"]}},
    "no tensors for one": lambda features: {**features, "kwargs_data": {"image": ["x"]}},
}  # fmt: skip


@pytest.mark.parametrize("shape", FORMATS)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_renderer_that_lies_is_a_502_and_no_worker_is_asked(
    lie: Any, shape: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={"render": {}, **EPD})
    fleet.render.behave.next(
        Fault(path=f"{CHAT}/render", rewrite=lambda body: {**body, "features": lie(body["features"])})
    )
    got = await at.post(CHAT, with_media(image(CAT), image(DOG)))
    assert got.status == 502
    assert got.error["message"].startswith("render: the render service's answer does not fit the request: ")
    assert legs(fleet.encode) == legs(fleet.prefill) == legs(fleet.decode) == []


async def test_a_renderer_without_tensors_is_found_out_before_a_leg_is_made(
    fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    fleet.render.behave.next(
        Fault(path="/render", rewrite=lambda body: {**body, "features": {**body["features"], "kwargs_data": None}})
    )
    got = await at.post(CHAT, with_media(image(CAT)))
    assert (got.status, legs(fleet.encode), legs(fleet.prefill)) == (502, [], [])
    assert "sent no tensors" in got.error["message"]


@pytest.mark.parametrize("policy", ["fail", "prefill_encodes"])
async def test_media_that_no_worker_can_read_is_the_client_s_mistake(
    policy: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, "openai", steps=EPD, pipeline={"on_encode_failure": policy})
    empty = {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}
    got = await at.post(CHAT, with_media(image(CAT), empty))
    assert got.status == 400
    assert "not base64" in got.error["message"]
    assert legs(fleet.prefill) == []
    assert await at.count("coordinator_retries_total") == 0


def vars_of(fault: Fault) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in Fault.__dataclass_fields__}

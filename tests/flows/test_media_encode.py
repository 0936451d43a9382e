"""Pictures, sound and video through encode, prefill and decode: each piece is encoded once, and none is lost.

Simulated workers tell what they were shown, find every wrong order, and fail a request whose descriptor leads nowhere.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.sim import Behaviour, Fault, Settings
from tests.flows.media import CAT, DOG, FORMATS, OWL, film, image, shown, sound, uri, with_media

CHAT = "/v1/chat/completions"
EPD: dict[str, Any] = {"encode": {}}

# What a picture, a sound and a film become: the worker's own name for each.
ALL = (image(CAT), sound(), image(DOG), film(), image(CAT))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", FORMATS)
async def test_each_piece_is_encoded_once_and_the_answer_is_about_all_of_them(
    shape: str, stream: bool, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, shape, steps=EPD)
    got = await at.post(CHAT, with_media(*ALL, stream=stream))
    assert (got.status, got.whole) == (200, True), got.raw
    seen = shown(got.text)
    assert [piece.split(" ")[0] for piece in seen] == ["image", "audio", "image", "video", "image"]
    assert (seen[0] == seen[4], len(set(seen))) == (True, 4)
    assert len(legs(fleet.encodes[0])) == len(legs(fleet.encodes[1])) == 2
    assert len(set(fleet.encodings.encoded)) == len(fleet.encodings.encoded) == 4
    assert set(fleet.encodings.fetched) == set(fleet.encodings.encoded)
    assert dict(fleet.prefill.core.embedded) == {"remote": 5}
    assert dict(fleet.decode.core.embedded) == {}


@pytest.mark.parametrize("shape", FORMATS)
async def test_the_answer_is_the_one_of_a_single_worker(shape: str, fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of(encodes=1)
    split = await coordinator(fleet, shape, steps=EPD)
    alone = await coordinator(fleet, "alone")
    body = with_media(*ALL, text="Say hello in French.", seed=7)
    assert (await split.post(CHAT, body)).text == (await alone.post(CHAT, body)).text


async def test_without_a_render_step_media_is_told_apart_by_its_data(
    fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "openai", steps=EPD)
    assert len(shown((await at.post(CHAT, with_media(*ALL))).text)) == 5
    assert [leg.path for leg in legs(fleet.encode)] == [CHAT] * 4
    assert legs(fleet.render) == []


async def test_with_a_render_step_it_is_told_apart_by_its_hash(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    """A picture that is named ``image/PNG`` here and ``image/png`` there is one picture."""
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "openai", steps={"render": {}, **EPD})
    again = {"type": "input_image", "image_url": uri(CAT, "image/x-png")}
    assert len(shown((await at.post(CHAT, with_media(image(CAT), again))).text)) == 2
    assert len(legs(fleet.encode)) == 1


@pytest.mark.parametrize("shape", FORMATS)
@pytest.mark.parametrize("content", ["text", "text parts", "no parts"])
async def test_text_makes_no_encode_leg(shape: str, content: str, fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps=EPD)
    body = with_media()
    body["messages"][0]["content"] = {
        "text": "Say hello.", "text parts": [{"type": "text", "text": "Say hello."}], "no parts": []
    }[content]  # fmt: skip
    assert (await at.post(CHAT, body)).status == 200
    assert legs(fleet.encode) == []
    assert "ec_transfer_params" not in legs(fleet.prefill)[0].body


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_pictures_of_every_api_are_encoded(shape: str, fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps=EPD)
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": uri(data)} for data in (CAT, DOG)]}]
    got = await at.post("/v1/responses", {"model": "tiny", "input": items, "reasoning": {"effort": "none"}})
    (message,) = [item for item in got.body["output"] if item["type"] == "message"]
    assert len(shown(message["content"][0]["text"])) == 2

    def block(data: bytes) -> dict[str, Any]:
        payload = uri(data).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}}

    # vLLM shows the pictures of a tool's result before those of the message that it came in.
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(OWL)]}
    messages = [{"role": "user", "content": [block(CAT), result, {"type": "text", "text": "Say hello."}]}]
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    got = await at.post("/v1/messages", {"model": "tiny", "max_tokens": 99, "messages": messages, **fields})
    assert got.status == 200, got.raw
    owl, cat = shown(next(block["text"] for block in got.body["content"] if block["type"] == "text"))
    assert owl != cat
    assert (len(fleet.encodings.encoded), len(set(fleet.encodings.encoded))) == (4, 3)
    assert fleet.prefill.core.embedded["local"] == 0


async def test_tensors_that_were_encoded_are_not_sent_to_prefill_again(
    fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    """A picture is sent to its encoder, and to decode, which may have to compute the prompt anew; no third time."""
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    await at.post(CHAT, with_media(image(CAT), image(DOG)))
    (prefill,), (decode,) = legs(fleet.prefill), legs(fleet.decode)
    assert prefill.body["features"]["kwargs_data"] is None
    assert len(prefill.body["features"]["mm_metadata"]["image"]) == 2
    assert set(prefill.body["ec_transfer_params"]) == set(prefill.body["features"]["mm_hashes"]["image"])
    assert all(decode.body["features"]["kwargs_data"]["image"])
    assert "ec_transfer_params" not in decode.body
    for leg in legs(fleet.encode):
        assert len(leg.body["features"]["mm_hashes"]["image"]) == 1
        assert leg.body["sampling_params"]["max_tokens"] == 1
        assert leg.body["stream"] is False


async def test_the_file_may_have_them_sent_all_the_same(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps={**EPD, "prefill": {"mm_features": "full"}})
    assert (await at.post(CHAT, with_media(image(CAT)))).status == 200
    assert all(legs(fleet.prefill)[0].body["features"]["kwargs_data"]["image"])
    assert dict(fleet.prefill.core.embedded) == {"remote": 1}


@pytest.mark.parametrize("shape", FORMATS)
async def test_in_a_shared_folder_prefill_finds_them_and_keeps_the_tensors_to_fall_back_on(
    shape: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1, settings=Settings(ec_connector="shared_storage"))
    at = await coordinator(fleet, shape, steps=EPD, pipeline={"ec_connector": "ec-shared-storage"})
    assert len(shown((await at.post(CHAT, with_media(image(CAT), image(DOG)))).text)) == 2
    assert dict(fleet.prefill.core.embedded) == {"remote": 2}
    if shape != "openai":
        assert all(legs(fleet.prefill)[0].body["features"]["kwargs_data"]["image"])
    fleet.encodings.evict(fleet.encodings.encoded[0])
    fleet.encode.behave.next(Fault(rewrite=lambda body: {**body, "ec_transfer_params": None}), times=2)
    assert (await at.post(CHAT, with_media(image(CAT), image(DOG)))).status == 200


@pytest.mark.parametrize("shape", FORMATS)
async def test_without_an_encode_step_prefill_encodes(shape: str, fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of()
    at = await coordinator(fleet, shape)
    assert len(shown((await at.post(CHAT, with_media(*ALL))).text)) == 5
    assert dict(fleet.prefill.core.embedded) == {"local": 5}


@pytest.mark.parametrize("shape", FORMATS)
async def test_without_a_prefill_step_decode_fetches(shape: str, fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={**EPD, "prefill": None})
    assert len(shown((await at.post(CHAT, with_media(image(CAT), image(DOG)))).text)) == 2
    assert dict(fleet.decode.core.embedded) == {"remote": 2}


@pytest.mark.parametrize("shape", FORMATS)
async def test_a_request_that_has_no_prefill_is_still_encoded_elsewhere(
    shape: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps=EPD)
    got = await at.post(CHAT, with_media(image(CAT), n=2))
    assert (got.status, len(got.body["choices"])) == (200, 2)
    assert legs(fleet.prefill) == []
    assert dict(fleet.decode.core.embedded) == {"remote": 1}


async def test_no_more_legs_than_allowed_are_under_way(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    fleet.encode.behave = Behaviour(first_byte_s=0.02)
    at = await coordinator(fleet, "openai", steps={"encode": {"max_parallel": 3}})
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, fleet.encode.in_flight)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    pictures = [image(CAT + bytes([65 + i])) for i in range(9)]
    assert len(shown((await at.post(CHAT, with_media(*pictures))).text)) == 9
    watching.cancel()
    assert (most, len(legs(fleet.encode))) == (3, 9)


async def test_legs_that_meet_on_one_worker_have_ids_of_their_own(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    got = await at.post(CHAT, with_media(image(CAT), image(DOG), image(OWL)), ("X-Request-Id", "mine"))
    assert got.headers["X-Request-Id"] == "mine"
    ids = [leg.header("x-request-id") for leg in legs(fleet.encode)]
    (prefill,) = [leg.header("x-request-id") for leg in legs(fleet.prefill)]
    assert sorted(ids) == [f"{prefill}-e{number}" for number in (1, 2, 3)]
    assert prefill.startswith("mine-")


async def test_a_router_in_front_may_name_the_encoders(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=2)
    header = {"endpoints": None, "header": "x-encoder-hosts-ports", "allow": ["127.0.0.1"]}
    at = await coordinator(fleet, "openai", steps=EPD, pools={"encode": header})
    hosts = ",".join(worker.url.removeprefix("http://") for worker in fleet.encodes)
    pictures = [image(CAT + bytes([65 + i])) for i in range(4)]
    assert (await at.post(CHAT, with_media(*pictures), ("X-Encoder-Hosts-Ports", hosts))).status == 200
    assert [len(legs(worker)) for worker in fleet.encodes] == [2, 2]
    assert (await at.post(CHAT, with_media(image(CAT)))).status == 200
    assert dict(fleet.prefill.core.embedded) == {"remote": 4, "local": 1}
    assert await at.count("coordinator_encodes_skipped_total", reason="no_worker_named") == 1
    refused = await at.post(CHAT, with_media(image(CAT)), ("x-encoder-hosts-ports", "192.0.2.1:80"))
    assert refused.status == 403
    for worker in fleet.workers:
        assert all(leg.header("x-encoder-hosts-ports") is None for leg in legs(worker))


async def test_behind_a_gateway_encode_legs_have_a_profile_of_their_own(
    fleet_of: Any, coordinator: Any, scripted: Any
) -> None:
    entry = {"modality": "image", "item_indices": [0], "metadata": {}, "peer_host": "10.0.0.9", "peer_port": 5502}
    gateway = await scripted(
        scripted.json({"choices": [], "ec_transfer_params": {"h": entry}}), scripted.json({"choices": []})
    )
    fleet = await fleet_of()
    at = await coordinator(
        fleet,
        "alone",
        steps=EPD,
        pools=None,
        gateway={"address": gateway.url},
    )
    assert (await at.post(CHAT, with_media(image(CAT)))).status == 200
    assert [headers["EPP-Profile"] for headers, _ in gateway.received] == ["encode", "decode"]
    assert gateway.received[1][1]["ec_transfer_params"] == {"h": entry}


async def test_a_client_that_leaves_frees_the_encoders(fleet_of: Any, coordinator: Any, eventually: Any) -> None:
    fleet = await fleet_of(encodes=2)
    at = await coordinator(fleet, "openai", steps=EPD)
    for worker in fleet.encodes:
        worker.behave.fault = Fault(path=CHAT, hang=True)
    async with at.open(CHAT, with_media(image(CAT), image(DOG), image(OWL))) as live:
        await eventually(lambda: sum(worker.in_flight for worker in fleet.encodes) == 3)
        live.cut()
        await eventually(lambda: sum(len(worker.aborted) for worker in fleet.encodes) == 3)
    await eventually(lambda: not at.in_flight())


async def test_encode_legs_are_seen_in_the_metrics(fleet_of: Any, coordinator: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    await at.post(CHAT, with_media(image(CAT)))
    await at.chat()
    for outcome in ("ok", "skipped"):
        assert await at.count("coordinator_leg_seconds_count", step="encode", outcome=outcome) == 1

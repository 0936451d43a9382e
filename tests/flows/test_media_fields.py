"""What travels beside media, on every leg and in every format; and what of it is refused, and never dropped.

Cases M02, M06, M07 and M10, and their kinds.
"""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sim import Settings
from tests.flows.client import exchange
from tests.flows.media import CAT, DOG, FORMATS, film, image, shown, sound, uri, with_media

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
EPD: dict[str, Any] = {"encode": {}}
OPTIONS = {"mm_processor_kwargs": {"max_pixels": 2, "big": 2**53 + 1}, "media_io_kwargs": {"image": {"x": 1.5}}}


@pytest.mark.parametrize("shape", FORMATS)
async def test_options_of_media_are_on_every_leg_as_the_client_wrote_them(
    shape: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    """They change the hash: a leg that lacked them would look for an embedding that nobody has made."""
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={"render": {}, **EPD})
    got = await at.post(CHAT, with_media(image(CAT), image(DOG), **OPTIONS))
    assert (got.status, len(shown(got.text))) == (200, 2)
    every = [leg for worker in fleet.workers for leg in legs(worker)]
    assert [leg.path.endswith("/render") for leg in every] == [True, False, False, False, False]
    for leg in every:
        assert {name: leg.body[name] for name in OPTIONS} == OPTIONS
    assert dict(fleet.prefill.core.embedded) == {"remote": 2}


async def test_a_server_that_trusts_no_client_tells_the_client_so(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1, settings=Settings(trust_mm_kwargs=False))
    at = await coordinator(fleet, "text", steps=EPD)
    got = await at.post(CHAT, with_media(image(CAT), **OPTIONS))
    assert (got.status, got.error["param"]) == (400, "mm_processor_kwargs")
    assert legs(fleet.encode) == []


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("part", [sound(), film()], ids=["sound", "film"])
async def test_sound_and_films_are_encoded_as_pictures_are(
    shape: str, part: dict[str, Any], fleet_of: Any, coordinator: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps=EPD)
    got = await at.post(CHAT, with_media(part))
    assert (got.status, len(shown(got.text))) == (200, 1)
    assert dict(fleet.prefill.core.embedded) == {"remote": 1}


UNREADABLE: dict[str, tuple[str, Any]] = {
    "a document": (
        "/v1/messages",
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
    ),
    "a file": ("/v1/responses", {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}),
    "an unknown type": (CHAT, {"type": "hologram", "hologram": "x"}),
    "an empty part": (CHAT, {"type": "image_url"}),
}


@pytest.mark.parametrize(("path", "part"), UNREADABLE.values(), ids=UNREADABLE)
async def test_media_that_no_worker_makes_anything_of_is_refused_by_name(
    path: str, part: Any, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    """vLLM's messages route would leave a document out, and answer as if there had been none."""
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "openai", steps={"render": {}, **EPD})
    key = "input" if path == "/v1/responses" else "messages"
    got = await at.post(path, {"model": "tiny", "max_tokens": 9, key: [{"role": "user", "content": [part]}]})
    assert got.status == 400
    assert f"{key}[0].content[0]" in str(got.body)
    assert all(legs(worker) == [] for worker in fleet.workers)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_media_is_never_left_out_for_tokens(shape: str, fleet_of: Any, coordinator: Any, legs: Any) -> None:
    """Workers leave ids unread beside media, and media unread beside ids that are read."""
    fleet = await fleet_of(encodes=1)
    decode = {"use_openai_format": True, "send_prompt_token_ids": True, "wrap": None, "output_mode": None}
    at = await coordinator(fleet, shape, steps={"render": {}, **EPD, "decode": decode})
    body = with_media(image(CAT))
    got = await at.post(CHAT, body)
    assert (got.status, len(shown(got.text))) == (200, 1)
    (leg,) = legs(fleet.decode)
    assert leg.body["messages"] == body["messages"]
    assert "prompt_token_ids" not in leg.body["kv_transfer_params"]
    assert "ec_transfer_params" not in leg.body


async def test_a_picture_that_workers_know_by_its_name_stays_as_it_was_sent(
    fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of()
    at = await coordinator(fleet, "openai", steps={"decode": {"send_prompt_token_ids": True}, "render": {}})
    body = with_media(image(CAT, uuid="tom"))
    assert (await at.post(CHAT, body)).status == 200
    assert all(leg.body["messages"] == body["messages"] for leg in (*legs(fleet.prefill), *legs(fleet.decode)))


async def rendered(fleet: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a client makes of a chat request who has it rendered himself; no worker remembers it."""
    async with exchange(fleet.render.url, f"{CHAT}/render", body) as live:
        await live.head()
        prompt = (await live.rest()).body
    fleet.render.received.clear()
    return {key: prompt[key] for key in ("token_ids", "sampling_params", "features", "parse_context")}


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_client_may_render_media_itself(shape: str, fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps=EPD)
    prompt = await rendered(fleet, with_media(image(CAT), image(DOG)))
    got = await at.post(GENERATE, {**prompt, "output_mode": "text"})
    assert got.status == 200, got.raw
    assert len(shown(got.body["choices"][0]["text"])) == 2
    assert legs(fleet.encode) == []
    assert legs(fleet.prefill)[0].body["features"] == legs(fleet.decode)[0].body["features"] == prompt["features"]
    assert fleet.prefill.core.embedded["local"] == 2


BAD: dict[str, tuple[Any, str]] = {
    "both forms": (
        lambda body: {**body, "content_parts": [{"type": "image_url", "url": uri(CAT)}]}, "content_parts"),
    "metadata alone": (
        lambda body: {**body, "features": {**body["features"], "kwargs_data": None}},
        "features.kwargs_data.image[0]"),
    "metadata alone, with params of its own": (
        lambda body: {**body, "features": {**body["features"], "kwargs_data": None},
                      "ec_transfer_params": {"h": {"peer_host": "192.0.2.1", "peer_port": 1}}},
        "features.kwargs_data.image[0]"),
    "a hash too few": (
        lambda body: {**body, "features": {**body["features"], "mm_hashes": {"image": ["h"]}}},
        "features.mm_placeholders.image"),
    "behind the prompt": (
        lambda body: {**body, "token_ids": body["token_ids"][:5]}, "features.mm_placeholders.image[0]"),
    "no object": (lambda body: {**body, "features": "x"}, "features"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD.values(), ids=BAD)
async def test_a_client_s_own_features_are_held_to_the_same_rules(
    change: Any, param: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of()
    at = await coordinator(fleet, "text")
    prompt = await rendered(fleet, with_media(image(CAT), image(DOG)))
    got = await at.post(GENERATE, change(prompt))
    assert (got.status, got.error["param"]) == (400, param)
    assert all(legs(worker) == [] for worker in fleet.workers)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_client_cannot_say_where_embeddings_are_fetched(
    path: str, fleet_of: Any, coordinator: Any, legs: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    steered = {"ec_transfer_params": {"f" * 32: {"peer_host": "192.0.2.1", "peer_port": 1}}}
    body = with_media(image(CAT)) if path == CHAT else await rendered(fleet, with_media(image(CAT)))
    got = await at.post(path, {**body, **steered})
    assert got.status == 200
    for worker in fleet.workers:
        assert all(b"192.0.2.1" not in leg.raw for leg in legs(worker))


@pytest.mark.parametrize("asked", [{"mm_payload": "none"}, {"return_mm_kwargs": False}])
async def test_a_client_cannot_have_its_media_rendered_by_halves(
    asked: dict[str, Any], fleet_of: Any, coordinator: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, "text", steps=EPD)
    got = await at.post(CHAT, with_media(image(CAT), **asked))
    assert (got.status, len(shown(got.text))) == (200, 1)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_what_a_client_gets_tells_nothing_of_where_embeddings_are(
    shape: str, fleet_of: Any, coordinator: Any
) -> None:
    fleet = await fleet_of(encodes=1)
    at = await coordinator(fleet, shape, steps={**EPD, "prefill": None})
    got = await at.post(CHAT, with_media(image(CAT)))
    assert got.status == 200
    assert b"peer_" not in got.raw


async def test_a_probe_for_a_cached_prompt_is_left_out_beside_media(fleet_of: Any, coordinator: Any, legs: Any) -> None:
    fleet = await fleet_of(encodes=1)
    fleet.decode.behave.cache_rule = "always_hit"
    at = await coordinator(fleet, "openai", steps={"conditional-decode": {}, **EPD})
    got = await at.post(CHAT, with_media(image(CAT)))
    assert (got.status, len(shown(got.text))) == (200, 1)
    assert [leg.header("prefer") for leg in legs(fleet.decode)] == [None]

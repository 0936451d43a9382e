"""Media in prompts: the same identity everywhere, tokens by its size, and an encoder cache that finds every mistake."""

from __future__ import annotations

import base64
import copy
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.sim import Settings, SimFleet
from coordinator.sim.media import PADS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
ONE = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


CAT, DOG = b"a cat in the sun", b"a dog in the rain, from behind"


def image(data: bytes = CAT, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}, **more}


def ask(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "Say hello."}, *parts]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **thinking, **fields}


@pytest.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    async with SimFleet(encodes=1) as fleet:
        yield fleet


async def rendered(fleet: SimFleet, client: Any, *parts: Any, **fields: Any) -> dict[str, Any]:
    got = await client.post(fleet.render, f"{CHAT}/render", ask(*parts, **fields))
    assert got.status == 200, got.text
    answer: dict[str, Any] = got.body
    return answer


def hashes(answer: dict[str, Any]) -> list[str]:
    return [hash for row in answer["features"]["mm_hashes"].values() for hash in row]


async def test_render_says_what_stands_where(fleet: SimFleet, client: Any) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"la la la").decode(), "format": "wav"}}
    film = {"type": "video_url", "video_url": {"url": "https://example.com/film.mp4"}}
    answer = await rendered(fleet, client, image(CAT), sound, image(DOG), film)
    features, token_ids = answer["features"], answer["token_ids"]
    assert {name: len(row) for name, row in features["mm_hashes"].items()} == {"image": 2, "audio": 1, "video": 1}
    for name in ("mm_placeholders", "kwargs_data", "mm_metadata"):
        assert features[name].keys() == features["mm_hashes"].keys()
    lengths = [place["length"] for place in features["mm_placeholders"]["image"]]
    assert lengths == [1 + len(CAT) // 8, 1 + len(DOG) // 8]
    for modality, row in features["mm_placeholders"].items():
        for place in row:
            inside = token_ids[place["offset"] : place["offset"] + place["length"]]
            assert set(inside) == {PADS[modality]}
    assert sum(id in PADS.values() for id in token_ids) == sum(
        place["length"] for row in features["mm_placeholders"].values() for place in row
    )


async def test_text_has_no_features(fleet: SimFleet, client: Any) -> None:
    assert (await rendered(fleet, client))["features"] is None


@pytest.mark.parametrize("asked", [{"mm_payload": "none"}, {"return_mm_kwargs": False}])
async def test_payloads_can_be_left_out(asked: dict[str, Any], fleet: SimFleet, client: Any) -> None:
    features = (await rendered(fleet, client, image(), **asked))["features"]
    assert (features["kwargs_data"], features["mm_metadata"]) == (None, None)
    assert len(features["mm_hashes"]["image"]) == 1


async def test_the_identity_is_of_the_bytes_and_of_what_changes_them(fleet: SimFleet, client: Any) -> None:
    (usual,) = hashes(await rendered(fleet, client, image()))
    assert hashes(await rendered(fleet, client, image(), image(DOG)))[0] == usual
    small = await rendered(fleet, client, image(), mm_processor_kwargs={"max_pixels": 2})
    others = [
        await rendered(fleet, client, image(CAT + b"!")),
        small,
        await rendered(fleet, client, image(), media_io_kwargs={"image": {"x": 1}}),
        await rendered(fleet, client, image(CAT, uuid="tom")),
    ]
    assert len({usual, *(hashes(other)[0] for other in others)}) == 5
    assert hashes(await rendered(fleet, client, image(), media_io_kwargs={"video": {"x": 1}})) == [usual]
    assert small["features"]["mm_placeholders"]["image"][0]["length"] == 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "not base64, or empty"),
        ({"type": "image_url", "image_url": None}, "holds no media"),
        ({"type": "image_url", "uuid": "tom"}, "is not in this server's cache"),
        ({"type": "hologram"}, "Unsupported chat content part type"),
    ],
)
async def test_media_that_cannot_be_read_is_refused(part: Any, message: str, fleet: SimFleet, client: Any) -> None:
    got = await client.post(fleet.render, f"{CHAT}/render", ask(part))
    assert got.status == 400
    assert message in got.body["error"]["message"]


async def test_options_of_media_need_a_server_that_trusts_its_clients(client: Any) -> None:
    async with SimFleet(settings=Settings(trust_mm_kwargs=False)) as fleet:
        got = await client.post(fleet.decode, CHAT, ask(image(), mm_processor_kwargs={"max_pixels": 2}))
        assert (got.status, got.body["error"]["param"]) == (400, "mm_processor_kwargs")


async def test_an_answer_tells_what_was_seen_in_which_order(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(DOG), image(CAT))
    dog, cat = (hash[:6] for hash in hashes(answer))
    got = await client.post(fleet.decode, CHAT, ask(image(DOG), image(CAT)))
    assert got.body["choices"][0]["message"]["content"].startswith(f"I see image {dog}, image {cat}. Hello!")
    native = got.body["choices"][0]["message"]["content"]
    got = await client.post(fleet.decode, GENERATE, {**answer, "output_mode": "text"})
    assert got.body["choices"][0]["text"].removeprefix("<think>\n\n</think>\n\n") == native


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_every_route_that_takes_pictures_sees_the_same(path: str, fleet: SimFleet, client: Any) -> None:
    (cat,) = hashes(await rendered(fleet, client, image()))
    picture: dict[str, Any] = {"type": "input_image", "image_url": uri(CAT)}
    body: dict[str, Any] = {"model": "tiny", "input": [{"role": "user", "content": [picture]}]}
    if path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
        body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    got = await client.post(fleet.render, f"{path}/render", body)
    assert hashes(got.body) == [cat]


async def encoded(fleet: SimFleet, client: Any, *parts: Any) -> dict[str, Any]:
    got = await client.post(fleet.encode, CHAT, ask(*parts, **ONE))
    assert got.status == 200
    params: dict[str, Any] = got.body["ec_transfer_params"]
    return params


async def test_an_encode_worker_tells_where_its_work_is(fleet: SimFleet, client: Any) -> None:
    (cat,) = hashes(await rendered(fleet, client, image()))
    params = await encoded(fleet, client, image(), image())
    assert params == {
        cat: {
            "modality": "image",
            "item_indices": [0, 1],
            "metadata": {"rows": 3},
            "peer_host": "127.0.0.1",
            "peer_port": int(fleet.encode.url.rpartition(":")[2]),
            "size_bytes": 384,
            "shape": [3, 64],
        }
    }
    assert fleet.encodings.encoded == [cat]
    text = await client.post(fleet.encode, CHAT, ask(**ONE))
    elsewhere = await client.post(fleet.prefill, CHAT, ask(image(), **ONE))
    assert (text.body["ec_transfer_params"], elsewhere.body["ec_transfer_params"]) == (None, None)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
async def test_every_route_gives_the_entries(path: str, fleet: SimFleet, client: Any) -> None:
    body: dict[str, Any] = ask(image(), **ONE)
    if path == "/v1/responses":
        body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(CAT)}]}]}
        body["max_output_tokens"] = 1
    elif path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
        body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}
    got = await client.post(fleet.encode, path, body)
    assert len(got.body["ec_transfer_params"]) == 1


def prefill(answer: dict[str, Any], params: Any, **features: Any) -> dict[str, Any]:
    """Return a prefill leg of a rendered prompt, with some lists of its features in place of the rendered ones."""
    changed = {**answer["features"], **features}
    return {**answer, "features": changed, "sampling_params": ONE, "ec_transfer_params": params}


async def test_metadata_is_enough_for_a_prefill_that_can_fetch(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT), image(DOG))
    params = {**await encoded(fleet, client, image(CAT)), **await encoded(fleet, client, image(DOG))}
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, params, kwargs_data=None))
    assert got.status == 200
    assert fleet.encodings.fetched == hashes(answer)
    assert fleet.prefill.core.embedded == {"remote": 2}
    assert fleet.encodings.violations == []


async def test_tensors_are_enough_for_a_prefill_that_cannot(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT))
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, None))
    assert (got.status, fleet.prefill.core.embedded["local"], fleet.encodings.violations) == (200, 1, [])


async def test_metadata_without_params_is_refused_as_by_vllm(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT))
    for features in ({"kwargs_data": None}, {"kwargs_data": {"image": [None]}}):
        got = await client.post(fleet.prefill, GENERATE, prefill(answer, None, **features))
        assert got.status == 400
        assert "metadata-only multimodal items require ec_transfer_params" in got.body["error"]["message"]


async def test_what_comes_by_its_hash_alone_must_have_been_here(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT))
    by_hash = prefill(answer, None, kwargs_data=None, mm_metadata=None)
    got = await client.post(fleet.prefill, GENERATE, by_hash)
    assert (got.status, got.body["error"]["type"]) == (500, "InternalServerError")
    await client.post(fleet.prefill, GENERATE, prefill(answer, None))
    params = await encoded(fleet, client, image(CAT))
    assert (await client.post(fleet.prefill, GENERATE, {**by_hash, "ec_transfer_params": params})).status == 200


def stale(params: dict[str, Any], fleet: SimFleet) -> dict[str, Any]:
    fleet.encodings.evict(next(iter(params)))
    return params


def without(params: dict[str, Any], fleet: SimFleet) -> dict[str, Any]:
    return {hash: {**entry, "peer_host": None} for hash, entry in params.items()}


def altered(params: dict[str, Any], fleet: SimFleet) -> dict[str, Any]:
    return {hash: {**entry, "size_bytes": 7} for hash, entry in params.items()}


def elsewhere(params: dict[str, Any], fleet: SimFleet) -> dict[str, Any]:
    return {hash: {**entry, "peer_port": 1} for hash, entry in params.items()}


def foreign(params: dict[str, Any], fleet: SimFleet) -> dict[str, Any]:
    return {**params, "f" * 32: next(iter(params.values()))}


BREACHES = {"unknown": stale, "incomplete": without, "altered": altered, "foreign": foreign}


@pytest.mark.parametrize(("reason", "change"), [*BREACHES.items(), ("unknown", elsewhere)])
@pytest.mark.parametrize("tensors", [True, False])
async def test_a_descriptor_that_leads_nowhere_is_a_breach(
    reason: str, change: Any, tensors: bool, fleet: SimFleet, client: Any
) -> None:
    answer = await rendered(fleet, client, image(CAT))
    params = change(await encoded(fleet, client, image(CAT)), fleet)
    features = {} if tensors else {"kwargs_data": None}
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, params, **features))
    assert got.status == 500
    assert [violation.reason for violation in fleet.encodings.violations] == [reason]


async def test_an_item_that_nobody_encoded_is_a_breach(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT), image(DOG))
    params = await encoded(fleet, client, image(CAT))
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, params, kwargs_data=None))
    assert (got.status, [violation.reason for violation in fleet.encodings.violations]) == (500, ["no_input"])


async def test_in_a_shared_folder_the_hash_is_all_it_takes(client: Any) -> None:
    async with SimFleet(encodes=1, settings=Settings(ec_connector="shared_storage")) as fleet:
        answer = await rendered(fleet, client, image(CAT))
        params = await encoded(fleet, client, image(CAT))
        assert "peer_host" not in next(iter(params.values()))
        for body in (prefill(answer, None), prefill(answer, params, kwargs_data=None)):
            assert (await client.post(fleet.prefill, GENERATE, body)).status == 200
        assert fleet.encodings.fetched == hashes(answer) * 2
        fleet.encodings.evict(hashes(answer)[0])
        got = await client.post(fleet.prefill, GENERATE, prefill(answer, None))
        assert (got.status, fleet.prefill.core.embedded["local"]) == (200, 1)
        got = await client.post(fleet.prefill, GENERATE, prefill(answer, params, kwargs_data=None))
        assert (got.status, fleet.prefill.dead) == (500, True)


def swapped(features: dict[str, Any], name: str) -> dict[str, Any]:
    return {**features, name: {"image": features[name]["image"][::-1]}}


@pytest.mark.parametrize("name", ["mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata"])
async def test_a_list_in_the_wrong_order_is_refused(name: str, fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT), image(DOG))
    wrong = swapped(answer["features"], name)
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, None, **wrong))
    assert got.status == 400
    assert "does not match" in got.body["error"]["message"]


async def test_a_placeholder_stands_on_tokens_of_its_kind(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT))
    moved = copy.deepcopy(answer["features"])
    moved["mm_placeholders"]["image"][0]["offset"] += 1
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, None, **moved))
    assert got.status == 400
    assert "are not those of that modality" in got.body["error"]["message"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"mm_hashes": {"image": "h"}}, "Input should be a valid dictionary"),
    "no text": ({"mm_hashes": {"image": [7]}}, "Input should be a valid string"),
    "modalities": ({"mm_placeholders": {}}, "mm_hashes and mm_placeholders must use the same modalities"),
    "their tensors": ({"kwargs_data": {}}, "kwargs_data must use the same modalities as mm_hashes"),
    "their metadata": ({"mm_metadata": {"image": [None], "audio": []}}, "mm_metadata must use the same modalities"),
    "lengths": ({"mm_hashes": {"image": ["a", "b"]}}, "mm_hashes and mm_placeholders must have the same length"),
    "tensors' lengths": ({"kwargs_data": {"image": []}}, "kwargs_data and mm_hashes must have the same length"),
    "no tensors": ({"kwargs_data": {"image": ["x"]}}, "could not be decoded"),
}


@pytest.mark.parametrize(("features", "message"), WRONG.values(), ids=WRONG)
async def test_features_are_checked_as_vllm_does(
    features: dict[str, Any], message: str, fleet: SimFleet, client: Any
) -> None:
    answer = await rendered(fleet, client, image(CAT))
    got = await client.post(fleet.prefill, GENERATE, prefill(answer, None, **features))
    assert got.status == 400
    assert message in got.body["error"]["message"]


async def test_a_decode_must_see_what_its_prefill_saw(fleet: SimFleet, client: Any) -> None:
    other = CAT[::-1]
    answer = await rendered(fleet, client, image(CAT))
    got = await client.post(fleet.prefill, GENERATE, {**prefill(answer, None), "kv_transfer_params": PREFILL})
    swapped_in = await rendered(fleet, client, image(other))
    assert swapped_in["token_ids"] == answer["token_ids"]
    body = {**swapped_in, "kv_transfer_params": got.body["kv_transfer_params"]}
    assert (await client.post(fleet.decode, GENERATE, body)).status == 500
    assert [violation.reason for violation in fleet.store.violations] == ["other_media"]


async def test_a_decode_that_was_handed_the_prompt_needs_no_embedding(fleet: SimFleet, client: Any) -> None:
    answer = await rendered(fleet, client, image(CAT), return_token_ids=True)
    got = await client.post(fleet.prefill, GENERATE, {**prefill(answer, None), "kv_transfer_params": PREFILL})
    body = {**answer, "kv_transfer_params": got.body["kv_transfer_params"]}
    got = await client.post(fleet.decode, GENERATE, body)
    assert (got.status, dict(fleet.decode.core.embedded)) == (200, {})
    assert got.body["mm_placeholders"] == answer["features"]["mm_placeholders"]


async def test_two_pictures_of_one_size_do_not_share_a_prefix_cache(fleet: SimFleet, client: Any) -> None:
    for data in (CAT * 20, CAT[::-1] * 20):
        await client.post(fleet.decode, CHAT, ask(image(data), **ONE))
    cached = fleet.decode.core.prompt_tokens["local_cache_hit"]
    await client.post(fleet.decode, CHAT, ask(image(CAT * 20), **ONE))
    assert cached == 0
    assert fleet.decode.core.prompt_tokens["local_cache_hit"] > 0

"""explain tells the exact legs that a request would make, without sending anything."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from coordinator import registry
from coordinator.cli import NoEvents
from coordinator.config import load
from coordinator.explain import (
    STAND_IN_ENCODING,
    STAND_IN_HANDOVER,
    STAND_IN_PLACEHOLDER,
    STAND_IN_TOKENS,
    SentLeg,
    explain,
    guess_api,
)
from coordinator.links import discarded, links, routing_headers
from coordinator.security.credentials import Closed
from envelope.errors import BadRequest, Forbidden
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI, "max_tokens": 50, "seed": 2**53 + 1, "stream": True}
GENERATE = {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 5}, "output_mode": "derender"}

RENDER = {"type": "render", "params": {"address": "http://r:8000"}}
POOLS = {"prefill": {"endpoints": ["http://p:8000"]}, "decode": {"endpoints": ["http://d:8000"]}}
ONE = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
ASK_BOTH = {"kv_transfer_params": ASK, "sampling_params": {**ONE, "extra_args": {"kv_transfer_params": ASK}}}

Legs = list[SentLeg]


@pytest.fixture
def legs(tmp_path: Path) -> Callable[..., Any]:
    """Return the legs of a request in a configuration; nothing that went in may have changed."""

    async def made(body: Any, *steps: Any, api: Format = Format.CHAT, headers: Any = (), **sections: Any) -> Legs:
        pipeline = {"kv_connector": "kv-nixl", **sections.pop("pipeline", {}), "steps": [*steps]}
        tree = {"pools": POOLS, **sections, "pipeline": pipeline}
        file = tmp_path / "pd.yaml"
        file.write_text(json.dumps(tree))
        config = load(str(file), {})
        built = registry.build(config, NoEvents())
        before = copy.deepcopy(body)
        sent = await explain(
            built, links(config, built, Closed()), NoEvents(), api, body, tuple(headers), routing_headers(config),
            discarded(config),
        )  # fmt: skip
        assert repr(body) == repr(before)
        return sent

    return made


def told(sent: Legs) -> list[tuple[str, str, str, Any]]:
    return [(leg.step, leg.method, leg.url, leg.body) for leg in sent]


async def test_in_openai_format_both_legs_go_to_the_client_s_own_route(legs: Any) -> None:
    one = {"model": "m", "messages": HI, "max_tokens": 1, "seed": 2**53 + 1, "stream": False, "ignore_eos": True}
    assert told(await legs(CHAT, {"type": "prefill"}, {"type": "decode"})) == [
        ("prefill", "POST", "http://p:8000/v1/chat/completions", {**one, "kv_transfer_params": ASK}),
        ("decode", "POST", "http://d:8000/v1/chat/completions", {**CHAT, "kv_transfer_params": STAND_IN_HANDOVER}),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_legs_in_flight_together_are_told_with_what_ties_them(legs: Any, stream: bool) -> None:
    """SGLang's room, and for Mooncake an engine that only a bootstrap server would know."""
    body = {**CHAT, "stream": stream}
    prefill, decode = await legs(body, {"type": "prefill-decode"}, pipeline={"kv_connector": "kv-sglang"})
    room = {name: decode.body[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    assert (room["bootstrap_host"], room["bootstrap_port"]) == ("p", 8998)
    assert [(leg.url, leg.body) for leg in (prefill, decode)] == [
        ("http://p:8000/v1/chat/completions", {**body, "stream": False, **room}),
        ("http://d:8000/v1/chat/completions", {**body, **room}),
    ]
    _, decode = await legs(body, {"type": "prefill-decode"}, pipeline={"kv_connector": "kv-mooncake"})
    assert decode.body["kv_transfer_params"]["remote_engine_id"] == "<prefill's engine>"


CAT, DOG = ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in ("AAAA", "BBBB"))
PICTURES = {"model": "m", "messages": [{"role": "user", "content": [CAT, DOG, CAT]}], "max_tokens": 50}
EPD = {name: {"endpoints": [f"http://{name[0]}:8000"]} for name in ("encode", "prefill", "decode")}


async def test_each_distinct_piece_of_media_has_an_encode_leg_on_the_chat_route(legs: Any) -> None:
    steps = [{"type": name} for name in ("encode", "prefill", "decode")]
    sent = await legs(PICTURES, *steps, pools=EPD, pipeline={"ec_connector": "ec-nixl"})
    one = {"model": "m", "max_tokens": 1, "stream": False, "ignore_eos": True}
    entries = {f"hash of messages[0].content[{i}]": STAND_IN_ENCODING for i in (0, 1)}
    assert told(sent) == [
        *(
            ("encode", "POST", "http://e:8000/v1/chat/completions",
             {**one, "messages": [{"role": "user", "content": [part]}]})
            for part in (CAT, DOG)
        ),
        ("prefill", "POST", "http://p:8000/v1/chat/completions",
         {**one, "messages": PICTURES["messages"], "kv_transfer_params": ASK, "ec_transfer_params": entries}),
        ("decode", "POST", "http://d:8000/v1/chat/completions", {**PICTURES, "kv_transfer_params": STAND_IN_HANDOVER}),
    ]  # fmt: skip
    ids = [dict(leg.headers)["X-Request-Id"] for leg in sent]
    assert ids == [f"{ids[2]}-e1", f"{ids[2]}-e2", ids[2], ids[2]]


async def test_tokens_in_an_encode_leg_is_one_item_and_prefill_is_sent_no_tensors_again(legs: Any) -> None:
    steps = [RENDER, *({"type": name} for name in ("encode", "prefill", "decode"))]
    sent = await legs(PICTURES, *steps, pools=EPD, pipeline={"ec_connector": "ec-nixl", "use_openai_format": False})
    render, cat, dog, prefill, decode = sent
    assert render.body == PICTURES
    for leg, name in ((cat, "hash of messages[0].content[0]"), (dog, "hash of messages[0].content[1]")):
        assert leg.url == "http://e:8000/inference/v1/generate"
        assert leg.body["token_ids"] == [STAND_IN_TOKENS[0], STAND_IN_PLACEHOLDER]
        assert leg.body["features"] == {
            "mm_hashes": {"image": [name]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
            "kwargs_data": {"image": [f"<tensors of {name}>"]},
            "mm_metadata": {"image": [f"<metadata of {name}>"]},
        }
    assert prefill.body["token_ids"] == [*STAND_IN_TOKENS, *[STAND_IN_PLACEHOLDER] * 3]
    assert prefill.body["features"]["kwargs_data"] is None
    assert len(prefill.body["ec_transfer_params"]) == 2
    assert len(decode.body["features"]["kwargs_data"]["image"]) == 3
    assert "ec_transfer_params" not in decode.body


async def test_a_videos_sound_is_a_piece_of_its_own(legs: Any) -> None:
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [film]}], "mm_processor_kwargs": {"use_audio_in_video": True}}
    sent = await legs(body, RENDER, {"type": "decode"}, pools={"decode": EPD["decode"]},
                      pipeline={"use_openai_format": False})  # fmt: skip
    assert sent[-1].body["features"]["mm_hashes"].keys() == {"video", "audio"}


async def test_tokens_in_the_client_s_body_goes_to_render_and_its_answer_to_the_generate_route(legs: Any) -> None:
    decode = {"type": "decode", "params": {"output_mode": "text", "wrap": "all"}}
    sent = await legs(CHAT, RENDER, {"type": "prefill"}, decode, pipeline={"use_openai_format": False})
    rendered = {"token_ids": STAND_IN_TOKENS, "model": "m", "request_id": sent[1].body["request_id"]}
    params = {"seed": 2**53 + 1, "max_tokens": 50, "output_kind": 2}
    assert told(sent) == [
        ("render", "POST", "http://r:8000/v1/chat/completions/render", CHAT),
        ("prefill", "POST", "http://p:8000/inference/v1/generate",
         {**rendered, "output_mode": "tokens", "stream": False, **ASK_BOTH}),
        ("decode", "POST", "http://d:8000/inference/v1/generate",
         {**rendered, "output_mode": "text", "stream": True, "stream_options": {"include_usage": True},
          "parse_context": {}, "kv_transfer_params": STAND_IN_HANDOVER,
          "sampling_params": {**params, "extra_args": {"kv_transfer_params": STAND_IN_HANDOVER}}}),
    ]  # fmt: skip


async def test_how_each_worker_is_picked_is_told_and_prefill_is_shown_though_it_may_be_left_out(legs: Any) -> None:
    pools = {
        "prefill": {"endpoints": ["http://p:8000", "http://q:8000"], "policy": "least_inflight"},
        "decode": {"endpoints": ["http://d:8000", "http://e:8000"], "policy": "prefix_affinity"},
    }
    steps = RENDER, {"type": "prefill", "params": {"min_uncached_tokens": 500}}, {"type": "decode"}
    sent = await legs(CHAT, *steps, pools=pools, pipeline={"use_openai_format": False})
    told = [leg.as_json()["picked"] for leg in sent]
    loaded = "0 legs and 0 tokens in flight"
    assert told == [
        "the only worker",
        f"by least_inflight: the least loaded, with {loaded}",
        f"by prefix_affinity: the prompt is shorter than a block, with {loaded}",
    ]


async def test_a_generate_client_s_body_goes_on_as_it_is(legs: Any) -> None:
    extra = {"kv_transfer_params": STAND_IN_HANDOVER}
    handed = {**extra, "sampling_params": {"max_tokens": 5, "extra_args": extra}}
    assert told(await legs(GENERATE, {"type": "prefill"}, {"type": "decode"}, api=Format.GENERATE)) == [
        ("prefill", "POST", "http://p:8000/inference/v1/generate",
         {"model": "m", "token_ids": [1, 2], "output_mode": "tokens", "stream": False, **ASK_BOTH}),
        ("decode", "POST", "http://d:8000/inference/v1/generate", {**GENERATE, **handed}),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_probe_is_told_as_a_miss_so_that_the_rest_is_told_too(legs: Any, stream: bool) -> None:
    body = {**CHAT, "stream": stream}
    sent = await legs(body, {"type": "conditional-decode"}, {"type": "prefill"}, {"type": "decode"})
    assert [leg.step for leg in sent] == ["conditional-decode", "prefill", "decode"]
    assert (sent[0].body, ("Prefer", "if-available") in sent[0].headers) == (body, True)


BODIES = {
    Format.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Format.RESPONSES: {"model": "m", "input": "hi"},
    Format.MESSAGES: {"model": "m", "messages": HI, "max_tokens": 9},
}


@pytest.mark.parametrize("openai", [True, False])
@pytest.mark.parametrize("api", BODIES)
async def test_every_api_can_be_told_in_both_formats(legs: Any, api: Format, openai: bool) -> None:
    steps = [RENDER, {"type": "prefill"}, {"type": "decode"}]
    sent = await legs(BODIES[api], *steps, api=api, pipeline={"use_openai_format": openai})
    assert [leg.step for leg in sent] == ["render", "prefill", "decode"]


async def test_every_leg_has_the_client_s_headers_and_ours(legs: Any) -> None:
    headers = [("Authorization", "Bearer sk-1"), ("X-Request-Id", "r1"), ("X-Tag", "a"), ("Host", "x"),
               ("Connection", "close"), ("EPP-Profile", "x")]  # fmt: skip
    sent = await legs(CHAT, {"type": "prefill"}, {"type": "decode"}, headers=headers)
    assert len({leg.headers[-1] for leg in sent}) == 1, "one id for all legs"
    for leg, accept in zip(sent, ("application/json", "text/event-stream"), strict=True):
        *others, (name, leg_id) = leg.headers
        assert others == [
            ("Content-Type", "application/json"),
            ("Authorization", "Bearer sk-1"),
            ("X-Tag", "a"),
            ("Accept", accept),
            ("Accept-Encoding", "identity"),
        ]
        assert name == "X-Request-Id"
        assert leg_id.startswith("r1-")


async def test_without_a_request_id_the_example_has_one(legs: Any) -> None:
    (leg,) = await legs(CHAT, {"type": "decode"}, pools=None, gateway={"address": "http://g"})
    assert dict(leg.headers)["X-Request-Id"].startswith("example-")
    assert (leg.url, dict(leg.headers)["EPP-Profile"]) == ("http://g/v1/chat/completions", "decode")


SIDECAR = {"prefill": {"header": "X-Prefiller-Host-Port", "allow": ["10.0.0.0/8"]}, "decode": POOLS["decode"]}


NAMED = (("x-prefiller-HOST-port", "10.0.0.1:8000"),)


@pytest.mark.parametrize(("headers", "steps"), [((), ["decode"]), (NAMED, ["prefill", "decode"])])
async def test_a_header_that_names_a_worker_is_read_and_not_sent(legs: Any, headers: Any, steps: list[str]) -> None:
    sent = await legs(CHAT, {"type": "prefill"}, {"type": "decode"}, headers=headers, pools=SIDECAR)
    assert [leg.step for leg in sent] == steps
    assert all("prefiller" not in name.lower() for leg in sent for name, _ in leg.headers)
    if headers:
        assert sent[0].url == "http://10.0.0.1:8000/v1/chat/completions"


async def test_what_would_be_refused_is_refused(legs: Any) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        await legs({**CHAT, "max_tokens": 0}, {"type": "decode"}, pools={"decode": POOLS["decode"]})
    with pytest.raises(Forbidden):
        await legs(CHAT, {"type": "prefill"}, {"type": "decode"}, pools=SIDECAR,
                   headers=[("x-prefiller-host-port", "192.0.2.1:8000")])  # fmt: skip


async def test_transfer_params_of_a_client_are_not_in_it(legs: Any) -> None:
    (leg,) = await legs({**CHAT, "kv_transfer_params": {"a": 1}}, {"type": "decode"}, pools={"decode": POOLS["decode"]})
    assert leg.body == CHAT


async def test_media_is_told_as_fetched_and_a_stand_in_goes_on_in_its_place(legs: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://media.example/a.png"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
    fetched, decode = await legs(body, {"type": "replace-media-urls"}, {"type": "decode"},
                                 pools={"decode": POOLS["decode"]})  # fmt: skip
    assert (fetched.step, fetched.method, fetched.url) == ("replace-media-urls", "GET", "http://media.example/a.png")
    assert decode.body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


GUESSES = [
    ({"token_ids": [1]}, Format.GENERATE),
    ({"prompt": "hi"}, Format.COMPLETIONS),
    ({"input": "hi"}, Format.RESPONSES),
    ({"messages": []}, Format.CHAT),
    ({}, Format.CHAT),
    ([], Format.CHAT),
]


@pytest.mark.parametrize(("body", "api"), GUESSES)
def test_the_api_is_guessed_from_the_body(body: Any, api: Format) -> None:
    assert guess_api(body) is api


async def test_a_cap_that_only_render_knows_is_said_to_be_that(legs: Any) -> None:
    body = {"model": "m", "messages": HI}
    sent = await legs(body, RENDER, {"type": "decode"}, pipeline={"use_openai_format": False},
                      pools={"decode": POOLS["decode"]})  # fmt: skip
    assert sent[-1].body["sampling_params"]["max_tokens"] == "<the rest of the context>"


async def test_a_header_that_only_workers_may_set_is_not_sent(legs: Any) -> None:
    sent = await legs(CHAT, {"type": "decode"}, pools={"decode": POOLS["decode"]},
                      headers=[("X-LLM-D-Disagg-Revision", "7"), ("X", "1")])  # fmt: skip
    assert [name for name, _ in sent[0].headers if name.startswith("X")] == ["X", "X-Request-Id"]


async def test_an_id_that_is_not_safe_is_replaced_as_the_server_does(legs: Any) -> None:
    (leg,) = await legs(CHAT, {"type": "decode"}, pools={"decode": POOLS["decode"]}, headers=[("X-Request-Id", "a b")])
    assert " " not in dict(leg.headers)["X-Request-Id"]


MASKED = [
    ("Authorization", "Bearer sk-1", "Bearer ***"),
    ("authorization", "Basic abc def", "Basic ***"),
    ("Authorization", "sk-1", "***"),
    ("X-API-Key", "sk-ant-1", "***"),
    ("api-key", "sk 1", "***"),
    ("Cookie", "a=b; c=d", "***"),
    ("X-Tag", "Bearer of news", "Bearer of news"),
]


@pytest.mark.parametrize(("name", "value", "shown"), MASKED)
def test_keys_are_masked_where_a_leg_is_shown(name: str, value: str, shown: str) -> None:
    """A terminal is a log."""
    leg = SentLeg("decode", "POST", "http://d/x", ((name, value),), {})
    assert (leg.as_json()["headers"], leg.headers) == ([[name, shown]], ((name, value),))


def test_a_leg_is_written_as_json() -> None:
    leg = SentLeg("decode", "POST", "http://d/x", (("A", "1"), ("A", "2")), {"n": 10**30})
    assert leg.as_json() == {
        "step": "decode",
        "method": "POST",
        "url": "http://d/x",
        "headers": [["A", "1"], ["A", "2"]],
        "body": {"n": 10**30},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [Format.CHAT, Format.COMPLETIONS])
@pytest.mark.parametrize("by", ["service", "coordinator"])
async def test_a_leg_that_stop_strings_may_end_from_here_is_told_none_and_listened_to(
    legs: Any, by: str, api: Format, stream: bool
) -> None:
    params = {"derender": "service"}
    if by == "coordinator":
        params = {"derender": "coordinator", "output_mode": "tokens", "tokenizer": "/models/tiny"}
    derender = {"type": "derender", "params": {"address": "http://r:8000"}}
    last = [derender] if by == "service" else []
    steps = (RENDER, {"type": "prefill"}, {"type": "decode", "params": params}, *last)
    asked = CHAT if api is Format.CHAT else {"model": "m", "prompt": "hi"}
    body = {**asked, "stop": ["###"], "stream": stream}
    sent = await legs(body, *steps, api=api, pipeline={"use_openai_format": False})
    texts = ["derender"] * 2 if by == "service" else []
    assert [leg.step for leg in sent] == ["render", "prefill", "decode", *texts]
    assert sent[2].body["stream"] and "stop" not in sent[2].body["sampling_params"]
    if by == "service":
        paths = [leg.url.removeprefix("http://r:8000") for leg in sent[3:]]
        whole = "/v1/chat/completions/derender" if api is Format.CHAT else "/v1/completions/derender"
        assert paths == ["/v1/completions/derender", whole]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_derender_service_is_asked_once_for_what_decode_says(legs: Any, stream: bool) -> None:
    decode, derender = {"type": "decode", "params": {"derender": "service"}}, {"address": "http://r:8000"}
    steps = (RENDER, {"type": "prefill"}, decode, {"type": "derender", "params": derender})
    sent = await legs({**CHAT, "stream": stream}, *steps, pipeline={"use_openai_format": False})
    assert [leg.step for leg in sent] == ["render", "prefill", "decode", "derender"]
    assert sent[2].body["output_mode"] == "tokens"
    assert (sent[3].url, sent[3].body.get("stream", False)) == ("http://r:8000/v1/chat/completions/derender", stream)

"""encode: one leg for each distinct piece of media, several at a time; what they leave is prefill's to fetch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.step import LegLimits, Reply
from envelope.ec_transfer import EC_CONNECTORS
from envelope.errors import BadRequest, LegBusy, LegFailed, LegRejected, LegTimeout, NoWorker
from envelope.formats import Format
from steps.encode import Encode, Params

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.step import Leg

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

TEXT = {"type": "text", "text": "what is this?"}
OPENAI, TOKENS_IN = {"use_openai_format": True}, {"use_openai_format": False}
NIXL, SHARED = {"ec": EC_CONNECTORS["ec-nixl"]}, {"ec": EC_CONNECTORS["ec-shared-storage"]}
OPTIONS = {"mm_processor_kwargs": {"max_pixels": 10}, "media_io_kwargs": {"video": {"num_frames": 4}}}


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [TEXT, *parts]}], "max_tokens": 50, **fields}


def rendered(*hashes: str, **fields: Any) -> dict[str, Any]:
    """Return a prompt of one token, then two for each image."""
    row = [{"offset": 1 + 2 * i, "length": 2} for i in range(len(hashes))]
    features = {
        "mm_hashes": {"image": list(hashes)},
        "mm_placeholders": {"image": row},
        "kwargs_data": {"image": [f"tensors of {each}" for each in hashes]},
        "mm_metadata": {"image": [f"grid of {each}" for each in hashes]},
    }
    prompt = {"token_ids": [1, *(90 + i // 2 for i in range(2 * len(hashes)))], "sampling_params": {"max_tokens": 50}}
    return {**prompt, "features": features if hashes else None, **fields}


def entry(item: str, host: str = "10.0.0.9") -> dict[str, Any]:
    return {"modality": "image", "item_indices": [0], "metadata": {"of": item}, "peer_host": host, "peer_port": 5502}


def item_of(leg: Leg) -> str:
    """Return which piece a leg is about: its hash, or the name in its data."""
    if "features" in leg.body:
        return str(leg.body["features"]["mm_hashes"]["image"][0])
    (part,) = leg.body["messages"][0]["content"]
    url = part["image_url"]
    return str((url["url"] if isinstance(url, dict) else url).rpartition(",")[2])


class Encoders:
    """Implements ``coordinator.step.Upstream``: each leg is answered by its media, however many are under way.

    Args:
        say: by piece: an answer, an error to raise, or an event to wait for; ``None`` is the usual answer.
    """

    media: Any = None

    def __init__(self, say: Callable[[str], Any] | None = None, *, serves: bool = True) -> None:
        self._say = say or (lambda item: None)
        self._serves = serves
        self.legs: list[Leg] = []
        self.running = self.most = 0
        self.cancelled: list[str] = []

    def serves(self, ctx: Any, role: str) -> bool:
        assert role == "encode"
        return self._serves

    async def stream(self, ctx: Any, leg: Leg, *, accept: tuple[int, ...] = ()) -> Any:
        raise AssertionError("encode legs are not streamed")

    async def post_json(self, ctx: Any, leg: Leg, *, accept: tuple[int, ...] = ()) -> Reply:
        self.legs.append(leg)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            return await self._answer(item_of(leg))
        except asyncio.CancelledError:
            self.cancelled.append(item_of(leg))
            raise
        finally:
            self.running -= 1

    async def _answer(self, item: str) -> Reply:
        said = self._say(item)
        if isinstance(said, asyncio.Event):
            await said.wait()
            said = None
        if isinstance(said, Exception):
            raise said
        body = {"choices": [{"finish_reason": "length"}], "ec_transfer_params": {item: entry(item)}}
        return Reply(200, b"", body if said is None else said)

    @property
    def items(self) -> list[str]:
        return [item_of(leg) for leg in self.legs]


@pytest.fixture
def encode(settings: Any) -> Callable[..., Encode]:
    def made(params: Any = None, **changes: Any) -> Encode:
        return Encode(Params.model_validate(params or {}), settings(**{**NIXL, **changes}))

    return made


async def test_on_the_chat_route_a_leg_is_one_part_and_what_changes_its_hash(encode: Any, context: Any) -> None:
    body = chat(image("A"), image("B"), **OPTIONS, stream=True, n=2, tools=[{"type": "function"}])
    ctx, up = context("chat", body), Encoders()
    assert await encode(OPENAI).run(ctx, up) == "ok"
    one = {"model": "m", "max_tokens": 1, "stream": False, "ignore_eos": True, **OPTIONS}
    assert [leg.body for leg in up.legs] == [
        {**one, "messages": [{"role": "user", "content": [image(name)]}]} for name in ("A", "B")
    ]
    for leg in up.legs:
        assert (leg.step, leg.role, leg.path) == ("encode", "encode", "/v1/chat/completions")
        assert (leg.idempotent, leg.single_use, leg.headers) == (True, False, ())
    assert ctx.ec_params == {"A": entry("A"), "B": entry("B")}


async def test_on_the_generate_route_a_leg_is_one_item_behind_the_first_token(encode: Any, context: Any) -> None:
    prompt = rendered("h1", "h2", model="m", cache_salt="s", priority=0, parse_context={}, **OPTIONS)
    ctx, up = context("chat", chat(image("A"), image("B")), rendered=prompt), Encoders()
    assert await encode(TOKENS_IN).run(ctx, up) == "ok"
    assert [leg.path for leg in up.legs] == ["/inference/v1/generate"] * 2
    assert [leg.body["token_ids"] for leg in up.legs] == [[1, 90, 90], [1, 91, 91]]
    assert up.legs[1].body == {
        "token_ids": [1, 91, 91],
        "features": {
            "mm_hashes": {"image": ["h2"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
            "kwargs_data": {"image": ["tensors of h2"]},
            "mm_metadata": {"image": ["grid of h2"]},
        },
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "output_mode": "tokens",
        "stream": False,
        "model": "m",
        "cache_salt": "s",
        "priority": 0,
        **OPTIONS,
    }
    assert ctx.ec_params == {"h1": entry("h1"), "h2": entry("h2")}


async def test_legs_of_one_request_have_ids_of_their_own(encode: Any, context: Any) -> None:
    up = Encoders()
    await encode(OPENAI).run(context("chat", chat(*map(image, "ABC"))), up)
    assert [leg.id_suffix for leg in up.legs] == ["-e1", "-e2", "-e3"]


# (format, parts, hashes that render gave, pieces that are encoded)
DISTINCT = {
    "by their data": (OPENAI, "ABA", None, ["A", "B"]),
    "by render's hashes, which know more": (OPENAI, "ABA", ("h1", "h1", "h1"), ["A"]),
    "as many as render told apart": (OPENAI, "AA", ("h1", "h2"), ["A", "A"]),
    "by their data, where render names other modalities": (OPENAI, "AAB", ("h1", "h1"), ["A", "B"]),
    "tokens-in, by hash": (TOKENS_IN, "ABA", ("h1", "h2", "h1"), ["h1", "h2"]),
}


@pytest.mark.parametrize(("params", "parts", "hashes", "encoded"), DISTINCT.values(), ids=DISTINCT)
async def test_the_same_piece_is_encoded_once(
    encode: Any, context: Any, params: Any, parts: str, hashes: Any, encoded: list[str]
) -> None:
    prompt = None if hashes is None else rendered(*hashes)

    def named_as_rendered(item: str) -> Any:
        return {"ec_transfer_params": {each: entry(each) for each in hashes or (item,)}}

    ctx, up = context("chat", chat(*map(image, parts)), rendered=prompt), Encoders(named_as_rendered)
    assert await encode(params).run(ctx, up) == "ok"
    assert up.items == encoded


SKIPPED: dict[str, tuple[Format, dict[str, Any], Any, Any]] = {
    "chat, text": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, None, OPENAI),
    "chat, text parts": (CHAT, chat(), None, OPENAI),
    "chat, no content": (CHAT, {"messages": [{"role": "user", "content": []}]}, None, OPENAI),
    "chat, tokens-in": (CHAT, chat(), rendered(), TOKENS_IN),
    "completions": (COMPLETIONS, {"prompt": "hi"}, None, OPENAI),
    "completions, tokens-in": (COMPLETIONS, {"prompt": [1]}, {"token_ids": [1], "sampling_params": {}}, TOKENS_IN),
    "generate": (GENERATE, rendered("h1"), rendered("h1"), TOKENS_IN),
    "generate, in OpenAI format": (GENERATE, rendered("h1"), None, OPENAI),
    "generate, raw media": (
        GENERATE,
        {"token_ids": [1], "sampling_params": {}, "content_parts": [{"type": "image_url", "url": "https://a/b.png"}]},
        None,
        TOKENS_IN,
    ),
}


@pytest.mark.parametrize(("api", "body", "prompt", "params"), SKIPPED.values(), ids=SKIPPED)
async def test_where_there_is_nothing_to_encode_nobody_is_asked(
    encode: Any, context: Any, counted: Any, api: Format, body: Any, prompt: Any, params: Any
) -> None:
    ctx, up = context(api, body, rendered=prompt), Encoders()
    step = encode(params)
    step.admit(ctx)
    assert await step.run(ctx, up) == "skipped"
    assert (up.legs, ctx.ec_params, counted.all) == ([], None, [])


async def test_where_the_router_named_no_encoder_prefill_encodes(encode: Any, context: Any, counted: Any) -> None:
    ctx, up = context("chat", chat(image("A"))), Encoders(serves=False)
    assert await encode(OPENAI).run(ctx, up) == "skipped"
    assert (up.legs, ctx.ec_params, counted.all) == ([], None, [("encode_skipped", "no_worker_named")])


@pytest.mark.parametrize("most", [1, 3, 8])
async def test_so_many_legs_are_under_way_at_a_time_and_no_more(encode: Any, context: Any, most: int) -> None:
    ctx, up = context("chat", chat(*map(image, "ABCDEFGH"))), Encoders()
    assert await encode({**OPENAI, "max_parallel": most}).run(ctx, up) == "ok"
    assert (up.most, up.running, len(ctx.ec_params)) == (most, 0, 8)


RESPONSES_PART = {"type": "input_image", "image_url": "data:image/png;base64,A"}
MESSAGES_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
OTHER_APIS = {
    "responses": ({"input": [{"role": "user", "content": [RESPONSES_PART]}]}, RESPONSES_PART),
    "messages": ({"messages": [{"role": "user", "content": [MESSAGES_PART]}], "max_tokens": 9}, image("A")),
}


@pytest.mark.parametrize("api", OTHER_APIS)
async def test_media_of_every_api_is_encoded_on_the_chat_route(encode: Any, context: Any, api: str) -> None:
    body, part = OTHER_APIS[api]
    ctx, up = context(api, {"model": "m", **body}), Encoders()
    assert await encode(OPENAI).run(ctx, up) == "ok"
    (leg,) = up.legs
    assert (leg.path, leg.body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": [part]}])
    assert ctx.ec_params == {"A": entry("A")}


ERRORS = [
    LegFailed("encode", "the worker answered 500"),
    LegTimeout("encode", "the worker did not answer in time"),
    NoWorker("encode", "there is no encode worker"),
    LegBusy("encode", "the worker answered 503"),
]
NOTHING: dict[str, tuple[Any, str]] = {
    "null": ({"ec_transfer_params": None}, "absent"),
    "missing": ({"choices": []}, "absent"),
    "a list": ({"ec_transfer_params": []}, "absent"),
    "not cached": ({"ec_transfer_params": {"B": {"metadata": {}, "modality": "image"}}}, "incomplete"),
    "aborted": ({"choices": [{"finish_reason": "abort"}], "ec_transfer_params": {"B": entry("B")}}, "bad_finish"),
    "a list for an answer": ([], "not_an_object"),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_leg_that_fails_ends_the_others_and_the_request(
    encode: Any, context: Any, counted: Any, error: Exception
) -> None:
    never = asyncio.Event()
    ctx, up = context("chat", chat(*map(image, "ABC"))), Encoders({"A": never, "B": error, "C": never}.get)
    with pytest.raises(type(error)) as caught:
        await encode(OPENAI).run(ctx, up)
    assert caught.value is error
    assert (sorted(up.cancelled), up.running, ctx.ec_params) == (["A", "C"], 0, None)
    assert counted.all == [("encoding_missing", type(error).__name__, "fail")]


@pytest.mark.parametrize(("answer", "reason"), NOTHING.values(), ids=NOTHING)
async def test_a_leg_that_leaves_nothing_has_failed(
    encode: Any, context: Any, counted: Any, answer: Any, reason: str
) -> None:
    ctx, up = context("chat", chat(image("A"), image("B"))), Encoders({"B": answer}.get)
    with pytest.raises(LegFailed, match="left nothing for prefill to fetch") as caught:
        await encode(OPENAI).run(ctx, up)
    assert "EC connector that ec-nixl stands for" in caught.value.message
    assert counted.all == [("encoding_missing", reason, "fail")]


async def test_prefill_encodes_what_could_not_be_where_the_file_says_so(
    encode: Any, context: Any, counted: Any
) -> None:
    bad = {"A": ERRORS[0], "C": {"ec_transfer_params": None}}
    ctx, up = context("chat", chat(*map(image, "ABC"))), Encoders(bad.get)
    assert await encode(OPENAI, on_encode_failure="prefill_encodes").run(ctx, up) == "failed_over"
    assert ctx.ec_params == {"B": entry("B")}
    assert up.cancelled == []
    assert sorted(counted.all) == [
        ("encoding_missing", "LegFailed", "prefill_encodes"),
        ("encoding_missing", "absent", "prefill_encodes"),
    ]


async def test_with_nothing_left_prefill_is_told_nothing(encode: Any, context: Any) -> None:
    ctx = context("chat", chat(image("A")))
    step = encode(OPENAI, on_encode_failure="prefill_encodes")
    assert await step.run(ctx, Encoders({"A": ERRORS[1]}.get)) == "failed_over"
    assert ctx.ec_params is None


@pytest.mark.parametrize("policy", ["fail", "prefill_encodes"])
async def test_media_that_a_worker_refuses_is_the_client_s_mistake(
    encode: Any, context: Any, counted: Any, policy: str
) -> None:
    refused = LegRejected("encode", 400, {"message": "broken image", "type": "BadRequestError"})
    ctx, up = context("chat", chat(image("A"), image("B"))), Encoders({"B": refused}.get)
    with pytest.raises(LegRejected) as caught:
        await encode(OPENAI, on_encode_failure=policy).run(ctx, up)
    assert caught.value is refused
    assert counted.all == []


async def test_a_client_that_leaves_takes_all_legs_with_it(encode: Any, context: Any) -> None:
    never = asyncio.Event()
    up = Encoders(lambda item: never)
    task = asyncio.create_task(encode(OPENAI).run(context("chat", chat(image("A"), image("B"))), up))
    while up.running < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sorted(up.cancelled), up.running) == (["A", "B"], 0)


async def test_two_descriptors_of_one_item_fail_the_request(encode: Any, context: Any) -> None:
    answers = iter(("10.0.0.9", "10.0.0.8"))

    def conflicting(item: str) -> Any:
        return {"ec_transfer_params": {"h": entry("h", next(answers))}}

    ctx = context("chat", chat(image("A"), image("B")))
    with pytest.raises(
        LegFailed, match="encode workers contradict one another: ec_transfer_params of h was given twice"
    ):
        await encode(OPENAI).run(ctx, Encoders(conflicting))
    assert ctx.ec_params is None


async def test_descriptors_of_other_media_are_not_passed_on(encode: Any, context: Any) -> None:
    def said(item: str) -> Any:
        return {"ec_transfer_params": {item: entry(item), "stale": entry("stale")}}

    ctx = context("chat", chat(image("A")), rendered=rendered("h1"))
    await encode(TOKENS_IN).run(ctx, Encoders(said))
    assert ctx.ec_params == {"h1": entry("h1")}
    with pytest.raises(LegFailed, match="other media than the renderer saw"):
        await encode(TOKENS_IN).run(ctx, Encoders(lambda item: {"ec_transfer_params": {"stale": entry("stale")}}))


async def test_a_shared_folder_needs_no_descriptor_and_passes_on_what_there_is(encode: Any, context: Any) -> None:
    ctx = context("chat", chat(image("A"), image("B")))
    said = {"A": {"ec_transfer_params": None}, "B": {"ec_transfer_params": {"B": {"modality": "image"}}}}
    assert await encode(OPENAI, **SHARED).run(ctx, Encoders(said.get)) == "ok"
    assert ctx.ec_params == {"B": {"modality": "image"}}
    ctx = context("chat", chat(image("A")))
    assert await encode({**OPENAI, "ec_connector": "ec-shared-storage"}).run(ctx, Encoders(said.get)) == "ok"
    assert ctx.ec_params is None


async def test_tensors_that_render_did_not_send_are_missed_before_any_leg(encode: Any, context: Any) -> None:
    prompt = rendered("h1")
    prompt["features"]["kwargs_data"] = None
    up = Encoders()
    with pytest.raises(LegFailed, match="the render service sent no tensors for image h1"):
        await encode(TOKENS_IN).run(context("chat", chat(image("A")), rendered=prompt), up)
    assert up.legs == []


def test_media_that_cannot_be_encoded_is_refused_before_the_first_leg(encode: Any, context: Any) -> None:
    document = {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}
    for api, part in (("messages", document), ("chat", {"type": "hologram"})):
        with pytest.raises(BadRequest) as caught:
            encode().admit(context(api, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 9}))
        assert caught.value.param == "messages[0].content[0]"


async def test_the_step_s_time_limits_are_each_leg_s_and_none_waits_for_ever(encode: Any, context: Any) -> None:
    up = Encoders()
    await encode(OPENAI).run(context("chat", chat(image("A"))), up)
    limits = {"first_byte_timeout": "5s", "request_timeout": "20s", "max_attempts": 3, "connect_timeout": 0}
    await encode({**OPENAI, **limits}).run(context("chat", chat(image("A"))), up)
    assert [leg.limits for leg in up.legs] == [
        LegLimits(first_byte_s=60.0),
        LegLimits(connect_s=None, first_byte_s=5.0, request_s=20.0, attempts=3),
    ]


@pytest.mark.parametrize("api", Format)
def test_what_it_does_for_an_api_is_told_without_a_request(encode: Any, api: Format) -> None:
    row = encode(use_openai_format=False).plan(api)
    if api in (COMPLETIONS, GENERATE):
        assert (row.role, row.format, row.path) == (None, None, None)
        assert len(row.notes) == 1
        return
    assert (row.role, row.format, row.path) == ("encode", GENERATE, "/inference/v1/generate")
    assert row.notes == ("one leg for each piece of media", "results by ec-nixl")
    assert encode(OPENAI, use_openai_format=False).plan(api).path == "/v1/chat/completions"

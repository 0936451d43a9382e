"""Media URLs become data: URIs in a new body, each fetched once; every fault is the client's and names its part."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from coordinator.step import Fetched, FetchFailed, FetchLimits
from envelope.errors import BadRequest
from envelope.formats import Format
from envelope.json_codec import dumps
from envelope.media_types import Kind
from steps.decode import Decode
from steps.decode import Params as DecodeParams
from steps.prefill import Params as PrefillParams
from steps.prefill import Prefill
from steps.render import Params as RenderParams
from steps.render import Render
from steps.replace_media_urls import Params, ReplaceMediaUrls
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable

URL = "http://media.example/"
MEDIA = {
    Kind.IMAGE: Fetched("image/png", b"\x89PNG"),
    Kind.AUDIO: Fetched("audio/wav", b"RIFF"),
    Kind.VIDEO: Fetched("video/mp4", b"ftyp"),
    Kind.DOCUMENT: Fetched("application/pdf", b"%PDF-"),
}


def uri(kind: Kind) -> str:
    return f"data:{MEDIA[kind].media_type};base64,{base64.b64encode(MEDIA[kind].data).decode()}"


class FakeFetcher:
    """Implements ``coordinator.step.MediaFetcher``: what a URL's last part says happens."""

    def __init__(self) -> None:
        self.asked: list[tuple[Kind, str]] = []
        self.limits: list[FetchLimits] = []
        self.running = self.most = 0
        self.cancelled = 0

    async def fetch(self, url: str, kind: Kind, limits: FetchLimits) -> Fetched:
        self.asked.append((kind, url))
        self.limits.append(limits)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            return await self._answer(url, kind)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, url: str, kind: Kind) -> Fetched:
        if "missing" in url:
            raise FetchFailed("its server answered 404")
        if "hang" in url:
            await asyncio.sleep(60)
        if "broken" in url:
            raise RuntimeError("a fault of ours")
        if "large" in url:
            return Fetched("image/png", bytes(700_000))
        return MEDIA[kind]


@pytest.fixture
def fetcher() -> FakeFetcher:
    return FakeFetcher()


@pytest.fixture
def replace(fetcher: FakeFetcher, upstream: Any, settings: Any, context: Any) -> Callable[..., Any]:
    """``await replace(body)`` runs the step on a request and returns the outcome and the body that later steps see."""

    async def run(body: dict[str, Any], api: Format = Format.CHAT, **params: Any) -> tuple[str, dict[str, Any]]:
        step, up, ctx = ReplaceMediaUrls(Params(**params), settings()), upstream(), context(api, body)
        up.media = fetcher
        step.admit(ctx)
        outcome = await step.run(ctx, up)
        assert up.legs == []
        return outcome, ctx.body

    return run


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}],
    }


REPLACED: dict[str, tuple[Format, Any, Kind, Any]] = {
    "chat image": (
        Format.CHAT,
        chat({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}),
        Kind.IMAGE,
        chat({"type": "image_url", "image_url": {"url": uri(Kind.IMAGE), "detail": "high"}}),
    ),
    "chat audio": (
        Format.CHAT,
        chat({"type": "audio_url", "audio_url": {"url": URL}}),
        Kind.AUDIO,
        chat({"type": "audio_url", "audio_url": {"url": uri(Kind.AUDIO)}}),
    ),
    "chat video": (
        Format.CHAT,
        chat({"type": "video_url", "video_url": {"url": URL}}),
        Kind.VIDEO,
        chat({"type": "video_url", "video_url": {"url": uri(Kind.VIDEO)}}),
    ),
    "responses image": (
        Format.RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        Kind.IMAGE,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(Kind.IMAGE)}]}]},
    ),
    "responses file": (
        Format.RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": URL}]}]},
        Kind.DOCUMENT,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": uri(Kind.DOCUMENT)}]}]},
    ),
    "messages image": (
        Format.MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}]},
        Kind.IMAGE,
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}
        ]}]},
    ),
    "generate": (
        Format.GENERATE,
        {"token_ids": [1], "sampling_params": {}, "content_parts": [{"type": "image_url", "url": URL}]},
        Kind.IMAGE,
        {"token_ids": [1], "sampling_params": {}, "content_parts": [{"type": "image_url", "url": uri(Kind.IMAGE)}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "kind", "new"), REPLACED.values(), ids=list(REPLACED))
async def test_a_url_becomes_a_data_uri_in_a_new_body(
    replace: Any, fetcher: FakeFetcher, api: Format, body: Any, kind: Kind, new: Any
) -> None:
    before = copy.deepcopy(body)
    assert await replace(body, api) == ("ok", new)
    assert fetcher.asked == [(kind, URL)]
    assert body == before


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Format.CHAT, {"messages": [{"role": "user", "content": "see http://media.example/"}]}),
        (Format.CHAT, chat()),
        (Format.CHAT, {"messages": [{"role": "user", "content": []}]}),
        (Format.COMPLETIONS, {"prompt": "see http://media.example/"}),
        (Format.RESPONSES, {"input": "see http://media.example/"}),
        (Format.MESSAGES, {"messages": [{"role": "user", "content": "hello"}]}),
        (Format.GENERATE, {"token_ids": [1], "sampling_params": {}}),
    ],
)
async def test_text_passes_as_it_is(replace: Any, fetcher: FakeFetcher, api: Format, body: Any) -> None:
    outcome, new = await replace(body, api)
    assert (outcome, fetcher.asked) == ("skipped", [])
    assert new is body


async def test_what_is_inline_is_checked_and_stays(replace: Any, fetcher: FakeFetcher) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    body = chat(image(uri(Kind.IMAGE)), audio)
    outcome, new = await replace(body)
    assert (outcome, fetcher.asked) == ("ok", [])
    assert new is body


async def test_a_url_that_stands_several_times_is_fetched_once(replace: Any, fetcher: FakeFetcher) -> None:
    body = chat(image(URL), image(URL + "2"), image(URL))
    body["messages"].append({"role": "user", "content": [image(URL)]})
    _, new = await replace(body)
    assert sorted(fetcher.asked) == [(Kind.IMAGE, URL), (Kind.IMAGE, URL + "2")]
    assert dumps(new).count(uri(Kind.IMAGE).encode()) == 4 and b"http" not in dumps(new)


async def test_a_url_of_two_kinds_is_fetched_as_each(replace: Any, fetcher: FakeFetcher) -> None:
    """An MP4 may be a video or its sound, and is named by its kind."""
    body = chat({"type": "audio_url", "audio_url": {"url": URL}}, {"type": "video_url", "video_url": {"url": URL}})
    _, new = await replace(body)
    assert sorted(fetcher.asked) == [(Kind.AUDIO, URL), (Kind.VIDEO, URL)]
    content = new["messages"][0]["content"]
    assert content[1]["audio_url"]["url"] == uri(Kind.AUDIO) and content[2]["video_url"]["url"] == uri(Kind.VIDEO)


async def test_the_limits_are_those_of_the_file(replace: Any, fetcher: FakeFetcher) -> None:
    await replace(chat(image(URL)))
    assert fetcher.limits == [FetchLimits(10.0, 10 * 2**20)]
    await replace(
        chat(image(URL)),
        download_timeout="500ms",
        max_download_size=3,
        allow_private_networks=True,
        allowed_domains="Images.Example., 192.0.2.1",
        trust_env_proxy=True,
    )
    assert fetcher.limits[1] == FetchLimits(0.5, 3 * 2**20, True, frozenset({"images.example", "192.0.2.1"}), True)
    await replace(chat(image(URL)), download_timeout=0)
    assert fetcher.limits[2].timeout_s is None


# Faults.


async def refusal(asking: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await asking
    assert caught.value.status == 400
    return caught.value


FAULTS = {
    "not there": (image(URL + "missing"), "image_url", "its server answered 404"),
    "an unknown type": ({"type": "foo"}, "foo", "parts of this type are not handled here"),
    "no base64": (image("data:image/png;base64,AA!A"), "image_url",
                  "its data is not base64 (the standard alphabet, padded, without white space)"),
    "no media type": (image("data:;base64,AAAA"), "image_url",
                      "a data: URI must name its media type, such as data:image/png;base64,DATA"),
    "another kind": (image("data:text/html;base64,AAAA"), "image_url",
                     "'text/html' is not the media type of image (image/...)"),
    "empty": (image("data:image/png;base64,"), "image_url", "its data is empty"),
    "bad audio": ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "input_audio",
                  "its data is not base64 (the standard alphabet, padded, without white space)"),
}  # fmt: skip


@pytest.mark.parametrize(("part", "part_type", "why"), FAULTS.values(), ids=list(FAULTS))
async def test_a_fault_names_the_part(replace: Any, part: Any, part_type: str, why: str) -> None:
    error = await refusal(replace(chat("text", part)))
    assert error.message == f"messages[0].content[2] ({part_type}): {why}"
    assert error.param == "messages[0].content[2]"


async def test_the_first_failure_ends_the_other_downloads(replace: Any, fetcher: FakeFetcher) -> None:
    parts = [image(f"{URL}hang{i}") for i in range(3)]
    async with asyncio.timeout(HANG_S):
        error = await refusal(replace(chat(*parts, image(URL + "missing"))))
    assert error.param == "messages[0].content[4]"
    assert (fetcher.cancelled, fetcher.running) == (3, 0)


async def test_whoever_cancels_the_request_ends_its_downloads(replace: Any, fetcher: FakeFetcher) -> None:
    request = asyncio.create_task(replace(chat(*[image(f"{URL}hang{i}") for i in range(3)])))
    async with asyncio.timeout(HANG_S):
        while fetcher.running < 3:
            await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (fetcher.cancelled, fetcher.running) == (3, 0)


async def test_a_fault_of_ours_is_not_told_as_the_clients(replace: Any) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await replace(chat(image(URL + "broken")))
    assert isinstance(caught.value.exceptions[0], RuntimeError)


@pytest.mark.parametrize(("most", "urls", "seen"), [(10, 30, 10), (3, 30, 3), (1, 4, 1), (10, 2, 2)])
async def test_so_many_downloads_run_at_a_time(
    replace: Any, fetcher: FakeFetcher, most: int, urls: int, seen: int
) -> None:
    await replace(chat(*[image(f"{URL}{i}") for i in range(urls)]), max_concurrent_downloads=most)
    assert (fetcher.most, len(fetcher.asked)) == (seen, urls)


async def test_too_many_media_are_refused_before_any_download(replace: Any, fetcher: FakeFetcher) -> None:
    """Inline media counts, and a URL counts as often as it stands there."""
    body = chat(image(URL), image(URL), image(uri(Kind.IMAGE)))
    error = await refusal(replace(body, max_multimodal_entries=2))
    assert error.message == "the request has 3 media parts; at most 2 are accepted here"
    assert (error.param, fetcher.asked) == ("messages[0].content[3]", [])
    await replace(body, max_multimodal_entries=3)


async def test_unknown_parts_are_refused_before_any_download(replace: Any, fetcher: FakeFetcher) -> None:
    await refusal(replace(chat(image(URL), {"type": "foo"})))
    assert fetcher.asked == []


TOO_MUCH = "(image_url): with it, the media of this request are more than 1 MB together"


async def test_media_together_have_a_limit(replace: Any) -> None:
    """A URL counts as often as its media will stand in the body."""
    await replace(chat(image(URL + "large")), max_total_size=1)
    for parts in ((image(URL + "large"), image(URL + "large")), (image(URL + "large"), image(URL + "large2"))):
        error = await refusal(replace(chat(*parts), max_total_size=1, max_concurrent_downloads=1))
        assert error.message == f"messages[0].content[2] {TOO_MUCH}"


async def test_inline_media_counts_as_what_it_decodes_to(replace: Any, fetcher: FakeFetcher) -> None:
    def inline(size: int) -> dict[str, Any]:
        return image("data:image/png;base64," + base64.b64encode(bytes(size)).decode())

    await replace(chat(inline(2**20)), max_total_size=1)
    error = await refusal(replace(chat(image(URL), inline(2**20), inline(1)), max_total_size=1))
    assert (error.message, fetcher.asked) == (f"messages[0].content[3] {TOO_MUCH}", [])
    error = await refusal(replace(chat(image(URL + "large"), inline(700_000)), max_total_size=1))
    assert error.message == f"messages[0].content[1] {TOO_MUCH}"


# Every later leg sees the new body.


async def test_no_leg_is_sent_a_url(fetcher: FakeFetcher, upstream: Any, settings: Any, context: Any) -> None:
    plain = settings()
    steps = [
        ReplaceMediaUrls(Params(), plain),
        Render(RenderParams(address="http://render:8000"), plain),
        Prefill(PrefillParams(), plain),
        Decode(DecodeParams(), plain),
    ]
    handover = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
                "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1}  # fmt: skip
    places = [{"offset": 0, "length": 1}, {"offset": 1, "length": 1}]
    rendered = {"token_ids": [1, 2], "sampling_params": {},
                "features": {"mm_hashes": {"image": ["h", "h"]}, "mm_placeholders": {"image": places}}}  # fmt: skip
    up = upstream(rendered, {"kv_transfer_params": handover}, {"choices": []})
    up.media = fetcher
    body = chat(image(URL), image(URL)) | {"mm_processor_kwargs": {"max_pixels": 10}}
    ctx = context(Format.CHAT, body)
    for step in steps:
        step.admit(ctx)
    for step in steps:
        await step.run(ctx, up)
    assert [leg.role for leg in up.legs] == ["render", "prefill", "decode"]
    for leg in up.legs:
        assert URL not in json.dumps(leg.body)
        assert leg.body["messages"] == chat(image(uri(Kind.IMAGE)), image(uri(Kind.IMAGE)))["messages"]
        assert leg.body["mm_processor_kwargs"] == {"max_pixels": 10}
    assert len(fetcher.asked) == 1


# The file.


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ([], ()),
        (["A.Example"], ("a.example",)),
        ("a.example, b.example.", ("a.example", "b.example")),
        (
            ["bücher.example", "127.0.0.1", "2001:DB8::1", "[::1]"],
            ("xn--bcher-kva.example", "127.0.0.1", "2001:db8::1", "::1"),
        ),
    ],
)
def test_allowed_hosts_are_kept_as_they_are_compared(given: Any, hosts: tuple[str, ...]) -> None:
    assert Params(allowed_domains=given).allowed_domains == hosts


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"allowed_domains": ["https://a.example"]}, "'https://a.example' is a URL, write only its host"),
        ({"allowed_domains": ["a.example/x"]}, "'a.example/x' is a URL, write only its host"),
        ({"allowed_domains": ["*.a.example"]}, "'*.a.example' has a wildcard, and hosts are compared exactly"),
        ({"allowed_domains": ["a.example:80"]}, "'a.example:80' is not a host, write a name without a port"),
        ({"allowed_domains": ["127.1"]}, "'127.1' is not a host"),
        ({"allowed_domains": [":::1"]}, "':::1' is not a host"),
        ({"max_concurrent_downloads": 0}, "greater than or equal to 1"),
        ({"max_concurrent_downloads": True}, "true is not a whole number"),
        ({"max_multimodal_entries": -1}, "greater than or equal to 0"),
        ({"max_download_size": 0}, "0 is too small, write at least 1 (megabyte)"),
        ({"max_total_size": 0}, "0 is too small, write at least 1 (megabyte)"),
        ({"download_timeout": 10}, "10 has no unit, write 10s"),
        ({"unknown": 1}, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Params(**params)
    assert sentence in str(caught.value)


def test_the_plan_says_what_it_does(settings: Any) -> None:
    step = ReplaceMediaUrls(Params(), settings())
    assert step.role is None
    for api in Format:
        row = step.plan(api)
        media = "this API has no media" if api is Format.COMPLETIONS else "media is fetched here, each URL once"
        assert (row.api, row.step, row.path, row.notes) == (api, "replace-media-urls", None, (media,))

"""Pictures through real encode, prefill and decode workers: what one of them encoded, another answers about.

The encoder cache is vLLM's shared folder: one file for each picture, by its hash.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.e2e.conftest import BOOT_S, VLLM_VERSION
from tests.e2e.servers import MODEL_NAME, Process, vllm
from tests.e2e.wire import post

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Coordinator

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION != "0.33", reason="metadata and entries as vLLM 0.33 writes them"),
]

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"


class Fleet(NamedTuple):
    """Four workers, and the folder through which the encoder cache goes."""

    render: Process
    encode: Process
    prefill: Process
    decode: Process
    folder: Path

    def config(self, *, openai_format: bool) -> dict:
        answer = {} if openai_format else {"output_mode": "text", "wrap": "all"}
        roles = {"encode": self.encode, "prefill": self.prefill, "decode": self.decode}
        return {
            "pools": {role: {"endpoints": [worker.url]} for role, worker in roles.items()},
            "pipeline": {
                "kv_connector": "kv-nixl",
                "ec_connector": "ec-shared-storage",
                "use_openai_format": openai_format,
                "steps": [
                    {"type": "render", "params": {"address": self.render.url}},
                    {"type": "encode"},
                    {"type": "prefill"},
                    {"type": "decode", "params": answer},
                ],
            },
        }

    def encoded(self) -> set[str]:
        """Return the hashes of what has been encoded."""
        return {file.parent.name for file in self.folder.glob("*/*.safetensors")}


@pytest.fixture(scope="module")
def fleet(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model, folder, logs = (tmp_path_factory.mktemp(name) for name in ("vision", "ec", "vllm-vision"))
    subprocess.run([vllm_python, Path(__file__).with_name("vision_model.py"), model], check=True, capture_output=True)

    def start(role: str, ec_role: str | None = None) -> Process:
        flags = {"model_impl": "transformers"}
        if role == "render":
            flags["dtype"] = "float32"  # the workers', or they get tensors that were rounded for another
        else:
            flags["limit_mm_per_prompt"] = '{"image": 4}'
        if ec_role is not None:
            extra = {"shared_storage_path": str(folder)}
            connector = {"ec_connector": "ECExampleConnector", "ec_role": ec_role, "ec_connector_extra_config": extra}
            flags["ec_transfer_config"] = json.dumps(connector)
        return vllm(role, vllm_python, logs, model=model, **flags)

    # A producer alone has no language model, and transformers' code does not run without one.
    servers = [start("render"), start("encode", "ec_both"), start("prefill", "ec_consumer"), start("decode")]
    try:
        yield Fleet(*(server.wait_until_ready("/health", BOOT_S) for server in servers), folder)
        assert all(server.alive for server in servers)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()


def picture(red: int, green: int, blue: int) -> dict[str, Any]:
    """Return the part of a picture of one colour."""
    row = b"\0" + bytes((red, green, blue)) * 28
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 28, 28, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * 28)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


def ask(*pictures: dict[str, Any], text: str = "Look:", **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, *pictures]
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
            "logprobs": True} | fields  # fmt: skip


def tokens(body: Any) -> list[str]:
    return [token["token"] for token in body["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("openai_format", [True, False], ids=["openai", "text"])
def test_the_answer_is_the_one_of_a_single_worker(
    coordinator: Callable[[dict], Coordinator], fleet: Fleet, openai_format: bool
) -> None:
    front = coordinator(fleet.config(openai_format=openai_format))
    before = fleet.encoded()
    shade = 40 + openai_format  # pictures that no other test has shown
    one, other = picture(250, shade, 0), picture(0, shade, 250)
    body = ask(one, other, one)

    got = post(front.url + CHAT, body)

    alone = post(fleet.decode.url + CHAT, body | {"cache_salt": "alone"})
    assert (got.status, alone.status) == (200, 200), got.raw
    assert tokens(got.body) == tokens(alone.body)
    assert got.body["usage"]["prompt_tokens"] == alone.body["usage"]["prompt_tokens"]
    assert tokens(post(front.url + CHAT, ask(other, one, other)).body) != tokens(got.body)
    assert len(fleet.encoded() - before) == 2


@pytest.mark.parametrize("openai_format", [True, False], ids=["openai", "text"])
def test_prefill_takes_the_embedding_that_the_encoder_left(
    coordinator: Callable[[dict], Coordinator], fleet: Fleet, openai_format: bool
) -> None:
    """Where another picture's embedding lies in the place of a picture's, the answer is about the other one."""
    front = coordinator(fleet.config(openai_format=openai_format))
    shade = 80 + openai_format
    cat, dog = picture(250, shade, 0), picture(0, shade, 250)
    about_dog = tokens(post(front.url + CHAT, ask(dog)).body)
    hashes = [
        post(fleet.render.url + f"{CHAT}/render", ask(part)).body["features"]["mm_hashes"]["image"][0]
        for part in (cat, dog)
    ]
    assert fleet.encoded() >= {hashes[1]}
    shutil.copytree(fleet.folder / hashes[1], fleet.folder / hashes[0])

    mistaken = tokens(post(front.url + CHAT, ask(cat)).body)

    assert mistaken == about_dog
    assert tokens(post(fleet.decode.url + CHAT, ask(cat, cache_salt="alone")).body) != about_dog


def test_a_generate_client_may_render_pictures_itself(coordinator: Callable[[dict], Coordinator], fleet: Fleet) -> None:
    front = coordinator(fleet.config(openai_format=False))
    body = ask(picture(9, 9, 200), logprobs=False)
    prompt = post(fleet.render.url + f"{CHAT}/render", body).body
    got = post(front.url + GENERATE, prompt | {"output_mode": "text"})
    assert got.status == 200, got.raw
    alone = post(fleet.decode.url + GENERATE, prompt | {"output_mode": "text", "cache_salt": "alone"})
    assert got.body["choices"][0]["text"] == alone.body["choices"][0]["text"] != ""


def test_what_a_worker_refuses_of_features_is_refused_before_it_is_asked(
    coordinator: Callable[[dict], Coordinator], fleet: Fleet
) -> None:
    front = coordinator(fleet.config(openai_format=False))
    prompt = post(fleet.render.url + f"{CHAT}/render", ask(picture(9, 200, 9))).body
    features = prompt["features"]
    wrong = [
        {"content_parts": [{"type": "image_url", "url": picture(1, 2, 3)["image_url"]["url"]}]},
        {"features": features | {"mm_hashes": {"image": []}}},
        {"features": features | {"mm_placeholders": {"image": [{"offset": 9999, "length": 4}]}}},
        {"features": features | {"mm_placeholders": {"audio": features["mm_placeholders"]["image"]}}},
        {"features": features | {"kwargs_data": {"image": []}}},
        {"features": features | {"kwargs_data": None, "mm_metadata": features["kwargs_data"]}},
    ]
    for change in wrong:
        asked = prompt | change
        statuses = [post(url + GENERATE, asked).status for url in (front.url, fleet.decode.url)]
        assert statuses == [400, 400], change.keys()


def test_a_picture_that_a_worker_has_never_seen_cannot_come_by_its_hash_alone(fleet: Fleet) -> None:
    """Which is why decode is sent tensors, though a hand-over covers the prompt."""
    prompt = post(fleet.render.url + f"{CHAT}/render", ask(picture(200, 200, 9))).body
    by_hash = prompt | {"features": prompt["features"] | {"kwargs_data": None, "mm_metadata": None}}
    assert post(fleet.decode.url + GENERATE, by_hash).status == 500
    assert post(fleet.decode.url + GENERATE, prompt).status == 200
    assert post(fleet.decode.url + GENERATE, by_hash).status == 200


def test_options_of_pictures_need_a_server_that_trusts_its_clients(
    coordinator: Callable[[dict], Coordinator], fleet: Fleet
) -> None:
    front = coordinator(fleet.config(openai_format=False))
    got = post(front.url + CHAT, ask(picture(7, 7, 7), mm_processor_kwargs={"do_normalize": False}))
    assert (got.status, got.body["error"]["param"]) == (400, "mm_processor_kwargs")

"""What a client of each API asks, reads, and would call wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.chaos.faults import SECRET
from tests.flows.client import Got
from tests.flows.conftest import chat
from tests.flows.media import image, shown, uri, with_media

if TYPE_CHECKING:
    from tests.chaos.cells import Cell
    from tests.chaos.oracle import Expected
    from tests.flows.client import Live

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def body_of(cell: Cell, text: str) -> dict[str, Any]:
    """Return a request whose answer is ``text``."""
    question = f"Repeat: {text}"
    if cell.setup.encodes:
        return _with_pictures(cell, text, question)
    own: dict[str, Any] = {"model": "tiny", "stream": cell.stream}
    match cell.api:
        case "completions":
            return {**own, "prompt": question, "max_tokens": 100}
        case "responses":
            return {**own, "input": question, "chat_template_kwargs": {"enable_thinking": False}}
        case "messages":
            message = {"role": "user", "content": question}
            return {**own, "messages": [message], "max_tokens": 100, "chat_template_kwargs": {"enable_thinking": False}}
    return chat(question, stream=cell.stream)


def _with_pictures(cell: Cell, text: str, question: str) -> dict[str, Any]:
    """Return a request with pictures that nobody has seen before."""
    datas = [f"{text} {n}".encode() for n in range(_pictures(cell))]
    body = with_media(*map(image, datas), text=question, stream=cell.stream)
    match cell.api:
        case "responses":
            pictures = [{"type": "input_image", "image_url": uri(data)} for data in datas]
            content = [{"type": "input_text", "text": question}, *pictures]
            body["input"] = [{"role": "user", "content": content}]
            del body["messages"]
        case "messages":
            sources = [{"type": "base64", "media_type": "image/png", "data": uri(data)[22:]} for data in datas]
            content = [{"type": "text", "text": question}, *({"type": "image", "source": each} for each in sources)]
            body |= {"messages": [{"role": "user", "content": content}], "max_tokens": 100}
    return body


def _pictures(cell: Cell) -> int:
    """Return how many pictures a request has: one, where its only leg is to meet a connection that was kept."""
    return 1 if cell.row.kept else 2


async def read(live: Live, *, slowly: bool) -> Got | None:
    """Read an answer to its end, proper or not; None if there was not even a head."""
    try:
        await live.head()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    while await live.read():
        if slowly:
            await asyncio.sleep(0.0005)
    return Got(live.status, live.headers, live.raw, live.whole)


def wrong(cell: Cell, text: str, got: Got, expected: Expected) -> str:
    """Return what is wrong with what the client got, or ""."""
    if SECRET.encode() in got.raw or b"<html" in got.raw:
        return "it tells what a worker said for us alone"
    if cell.leaves and not got.whole:
        return "" if got.status == 200 or not got.raw else f"a broken {got.status}"  # it hung up itself
    if expected.kind == "error":
        return _wrong_error(cell, got, expected)
    said = _said(got, streamed=cell.stream) if got.status == 200 else ""
    if cell.setup.encodes:
        said = _after_the_pictures(cell, said)
    if expected.kind == "answer":
        if (got.status, got.whole, said) != (200, True, text):
            return f"{got.status} {got.raw[-300:]!r} and not the whole text"
        return "" if not cell.stream or _ended(cell, got) else "no end mark"
    if got.status != 200 or got.whole:
        return f"{got.status}, whole: {got.whole}; not a broken stream: {got.raw[-300:]!r}"
    if not text.startswith(said):
        return f"it says {said!r}"
    return _wrong_event(cell, got, expected)


def _ended(cell: Cell, got: Got) -> bool:
    """Say whether a stream has the end mark of its API; an envelope that passes through has generate's."""
    last = got.events[-1]
    native = cell.setup.format != "unwrapped" or b'"output_mode"' not in got.raw
    if native and cell.api in ("responses", "messages"):
        return bool(last["type"] in ("response.completed", "message_stop"))
    return bool(last == "[DONE]")


def _wrong_event(cell: Cell, got: Got, expected: Expected) -> str:
    """Look at how a broken stream tells of its failure; the last thing in it, in the grammar of its API."""
    told = [event for event in got.chunks if event.get("error") or event.get("type") in ("error", "response.failed")]
    if not told:
        return f"no error event: {got.raw[-300:]!r}"
    if cell.api in ("responses", "messages"):
        return ""
    code = told[0]["error"].get("code")
    return "" if len(told) == 1 and code == expected.status else f"error events: {told}"


def _wrong_error(cell: Cell, got: Got, expected: Expected) -> str:
    if got.status != expected.status or not got.whole:
        return f"{got.status} {got.raw[:300]!r} and not {expected.status}"
    if not got.headers["Content-Type"].startswith("application/json"):
        return f"an error as {got.headers['Content-Type']}"
    error = got.error
    if not {"message", "type"} <= set(error) or (cell.api != "messages" and error["code"] != expected.status):
        return f"the error is {error}"
    if expected.word != "rejected" and not error["message"].startswith(f"{expected.by}: "):
        return f"the error does not name {expected.by}: {error['message']}"
    if expected.status in (429, 503) and "Retry-After" not in got.headers:
        return "no Retry-After"
    return ""


def _said(got: Got, *, streamed: bool) -> str:
    """Return the model's text, of whichever envelope."""
    if streamed:
        return "".join(_said_by(event) for event in got.chunks)
    body = got.body
    if "output" in body:
        items = [item for item in body["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])
    if "content" in body:
        return "".join(block.get("text", "") for block in body["content"])
    [choice] = body["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _after_the_pictures(cell: Cell, said: str) -> str:
    """Return what an answer says beside what was seen, or all of it if not every picture was."""
    return said.partition(". ")[2] if len(set(shown(said))) == _pictures(cell) else said


def _said_by(event: dict[str, Any]) -> str:
    """Return the text that one event of a stream adds."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    choices = event.get("choices") or ()
    return "".join((one["text"] if "text" in one else one["delta"].get("content")) or "" for one in choices)

"""Where the parts of a message stand in each API's body, and how one is replaced without changing the body.

Source: OpenAI's chat completions and responses, Anthropic's messages, vLLM's ``content_parts`` of the generate route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envelope.errors import BadRequest
from envelope.formats import Format

if TYPE_CHECKING:
    from envelope.json_codec import Json

Visit = Callable[[str, Any], Any]
"""Takes a part's path, such as ``messages[0].content[1]``, and the part; returns the part or another in its place."""

_TOOL_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output", "computer_call_output"))
_DEEPEST = 2  # a tool's result holds a document that holds blocks


def wrong(where: str, part_type: str, why: str) -> BadRequest:
    """Return the error of a part; ``why`` begins in lower case."""
    return BadRequest(f"{where} ({part_type}): {why}", param=where)


def map_parts(api: Format, body: Json, visit: Visit) -> Json:
    """Return the body with each part replaced by what ``visit`` returns for its path and itself.

    What changes is copied on the way down to it, and the body itself is left as it is.

    Raises:
        BadRequest: blocks are nested deeper than any API says; also whatever ``visit`` raises.
    """

    def message(where: str, entry: Any) -> Any:
        return _mapped(entry, "content", f"{where}.", block if api is Format.MESSAGES else visit)

    def block(where: str, entry: Any) -> Any:
        return _block(where, entry, visit, 0)

    def item(where: str, entry: Any) -> Any:
        return _response_item(where, entry, visit)

    mapped: Json = body
    match api:
        case Format.CHAT:
            mapped = _mapped(body, "messages", "", message)
        case Format.RESPONSES:
            mapped = _mapped(body, "input", "", item)
        case Format.MESSAGES:
            mapped = _mapped(_mapped(body, "system", "", block), "messages", "", message)
        case Format.GENERATE:
            mapped = _mapped(body, "content_parts", "", visit)
    return mapped


def _mapped(holder: Any, key: str, where: str, visit: Visit) -> Any:
    """Return a mapping with each entry of the list under ``key`` visited; itself where nothing changes."""
    entries = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(entries, list):
        return holder
    visited = [visit(f"{where}{key}[{i}]", entry) for i, entry in enumerate(entries)]
    if all(new is old for new, old in zip(visited, entries, strict=True)):
        return holder
    return {**holder, key: visited}


def _response_item(where: str, item: Any, visit: Visit) -> Any:
    """Visit a message's content, and what a tool returned: a list of parts, or one screenshot."""
    item = _mapped(item, "content", f"{where}.", visit)
    if not isinstance(item, dict) or str(item.get("type")) not in _TOOL_OUTPUTS:
        return item
    item = _mapped(item, "output", f"{where}.", visit)
    if not isinstance(output := item.get("output"), dict):
        return item
    visited = visit(f"{where}.output", output)
    return item if visited is output else {**item, "output": visited}


def _block(where: str, block: Any, visit: Visit, depth: int) -> Any:
    """Visit a block and the blocks inside it: what a tool returned, and a document that is written out."""
    block = visit(where, block)
    if not isinstance(block, dict):
        return block
    source = block.get("source")
    inside = [block.get("content")] if block.get("type") == "tool_result" else []
    inside += [source.get("content")] if isinstance(source, dict) else []
    if depth == _DEEPEST and any(isinstance(content, list) for content in inside):
        raise wrong(where, str(block.get("type")), "blocks are nested deeper here than any API says")

    def nested(at: str, entry: Any) -> Any:
        return _block(at, entry, visit, depth + 1)

    if block.get("type") == "tool_result":
        block = _mapped(block, "content", f"{where}.", nested)
    written = _mapped(source, "content", f"{where}.source.", nested)
    return block if written is source else {**block, "source": written}

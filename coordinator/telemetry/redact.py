"""What a log at trace may show of a body: its shape and its numbers, and no word of a prompt, an answer or a key.

A string is shown where its key says that it is a choice out of a few (``role``, ``finish_reason``), or an id of the
hand-over; of any other the length is told. Lists of numbers are counted, as they may be token ids or a text's bytes.
What holds keys that a client has named (tools' parameters, metadata) is counted too.
"""

from __future__ import annotations

import re
from typing import Any

from envelope.token_ids import TokenIds

_WORDS = frozenset(
    (
        *("role", "type", "object", "finish_reason", "output_mode", "modality"),
        *("request_id", "remote_engine_id", "remote_request_id", "remote_host", "transfer_id"),
    )
)
_CLOSED = frozenset(
    (
        *("metadata", "parameters", "input_schema", "json_schema", "schema", "arguments", "logit_bias", "features"),
        *("logprobs", "prompt_logprobs", "top_logprobs"),
    )
)
_BLOCKS = frozenset(("remote_block_ids",))
_KEY = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)

_DEEPEST = 8
_LONGEST = 16


def redacted(value: Any, key: str = "", depth: int = 0) -> Any:
    """Return a copy of parsed JSON that may be logged."""
    if isinstance(value, str):
        return value if key in _WORDS and _WORD.fullmatch(value) else f"<{len(value)} characters>"
    if isinstance(value, TokenIds):
        return f"<{len(value)} numbers>"
    if not isinstance(value, (dict, list)):
        return value
    if key in _CLOSED or depth >= _DEEPEST:
        return f"<{len(value)} entries>"
    if isinstance(value, dict):
        return {_name(name): redacted(item, name, depth + 1) for name, item in value.items()}
    if value and key not in _BLOCKS and all(isinstance(item, (int, float)) for item in value):
        return f"<{len(value)} numbers>"
    shown = [redacted(item, key, depth + 1) for item in value[:_LONGEST]]
    return shown if len(value) <= _LONGEST else [*shown, f"<{len(value) - _LONGEST} more>"]


def _name(key: str) -> str:
    return key if _KEY.fullmatch(key) else f"<{len(key)} characters>"

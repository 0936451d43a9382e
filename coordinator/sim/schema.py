"""The checks that FastAPI and pydantic make on a body before vLLM's own code sees it.

Written by hand, in pydantic's words as vLLM repeats them: it is what a client has to get past, and nothing here is
shared with the code that has to pass it.

Source: recordings ``errors/*_error_*``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim.refusals import SCHEMA, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INT64 = 2**63


@dataclass(slots=True)
class Schema:
    """Collects what is wrong with one body; ``done`` raises it all together."""

    body: Mapping[str, Any]
    errors: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _required: set[str] = field(default_factory=set)  # a null in these is a value, and wrong

    def wrong(self, loc: str, kind: str, message: str, value: Any, **ctx: Any) -> None:
        error = {"type": kind, "loc": loc, "msg": message, "input": _shown(value)}
        self.errors.append((loc, {**error, "ctx": ctx} if ctx else error))

    def invalid(self, loc: str, message: str, value: Any) -> None:
        """Report what a validator of vLLM's own model says."""
        self.wrong(loc, "value_error", f"Value error, {message}", value, error=ValueError(message))

    def done(self) -> None:
        """
        Raises:
            Refusal: something was reported.
        """
        if not self.errors:
            return
        count = f"{len(self.errors)} validation error{'s' if len(self.errors) > 1 else ''}"
        lines = "\n".join(f"  {error}" for _, error in self.errors)
        raise Refusal(f"{count}:\n{lines}", type=SCHEMA, param=self.errors[0][0])

    def required(self, *names: str) -> None:
        """Report what is not there; call it before whatever looks at these."""
        self._required.update(names)
        for name in names:
            if name not in self.body:
                self.wrong(f"body.{name}", "missing", "Field required", self.body)

    def strings(self, *names: str) -> None:
        for name, value in self._given(names):
            if not isinstance(value, str):
                self.wrong(f"body.{name}", "string_type", "Input should be a valid string", value)

    def booleans(self, *names: str) -> None:
        for name, value in self._given(names):
            if not isinstance(value, bool):
                self.wrong(
                    f"body.{name}", "bool_parsing", "Input should be a valid boolean, unable to interpret input", value
                )

    def objects(self, *names: str) -> None:
        for name, value in self._given(names):
            if not isinstance(value, dict):
                self.wrong(f"body.{name}", "dict_type", "Input should be a valid dictionary", value)

    def lists(self, *names: str) -> None:
        for name, value in self._given(names):
            if not isinstance(value, list):
                self.wrong(f"body.{name}", "list_type", "Input should be a valid list", value)

    def objects_in(self, *names: str) -> None:
        """Check lists of objects."""
        self.lists(*names)
        for name, value in self._given(names):
            for at, item in enumerate(value if isinstance(value, list) else ()):
                if not isinstance(item, dict):
                    self.wrong(f"body.{name}.{at}", "dict_type", "Input should be a valid dictionary", item)

    def text_or_objects(self, *names: str) -> None:
        self.objects_in(*(name for name in names if not isinstance(self.body.get(name), str)))

    def integers(self, *names: str) -> None:
        for name, value in self._given(names):
            self.integer(f"body.{name}", value)

    def integer(self, loc: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(loc, "int_type", "Input should be a valid integer", value)
        elif value != int(value):
            self.wrong(
                loc, "int_from_float", "Input should be a valid integer, got a number with a fractional part", value
            )

    def numbers(self, *names: str) -> None:
        for name, value in self._given(names):
            self.number(f"body.{name}", value)

    def number(self, loc: str, value: Any) -> None:
        if isinstance(value, str):
            self.wrong(
                loc,
                "float_parsing",
                "Input should be a valid number, unable to parse string as a number",
                value,
            )
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(loc, "float_type", "Input should be a valid number", value)

    def priority(self) -> None:
        value = self.body.get("priority")
        if value is None:
            return
        self.integer("body.priority", value)
        if isinstance(value, int) and value >= _INT64:
            self.wrong(
                "body.priority",
                "less_than_equal",
                f"Input should be less than or equal to {_INT64 - 1}",
                value,
                le=_INT64 - 1,
            )

    def _given(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        there = [(name, self.body[name]) for name in names if name in self.body]
        return [(name, value) for name, value in there if value is not None or name in self._required]


def parse_object(raw: bytes, content_type: str) -> dict[str, Any]:
    """Read a request body.

    Raises:
        Refusal: another content type, no JSON, or no object.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise Refusal("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", type=SCHEMA)
    schema = Schema({})
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        schema.wrong(f"body.{error.pos}", "json_invalid", "JSON decode error", {}, error=error.msg)
    except UnicodeDecodeError:
        schema.wrong("body.0", "json_invalid", "JSON decode error", {}, error="invalid utf-8")
    else:
        if isinstance(body, dict):
            return body
        message = "Input should be a valid dictionary or object to extract fields from"
        schema.wrong("body", "model_attributes_type", message, body)
    schema.done()
    raise AssertionError("unreachable")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)

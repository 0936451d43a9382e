"""What every section of the file has in common: the model of a mapping, header names, and names of a later release."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from coordinator.headers import FRAMING, HOP_BY_HOP
from coordinator.settings.problems import Faults

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
# What belongs to one connection or one body (RFC 9110, section 7.6.1, and the framing fields), what is
# somebody's key, and what is set here on every leg.
_OWN_HEADERS = (
    HOP_BY_HOP
    | FRAMING
    | {"accept", "authorization", "x-api-key", "cookie", "set-cookie"}
    | {"x-request-id", "epp-profile", "x-llm-d-epp-profile", "x-llm-d-revision-decision-id", "prefer"}
)


def _header_name(value: str) -> str:
    """Return a header's name in lower case."""
    name = value.strip().lower()
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{value!r} is not a header name, write one such as x-prefiller-host-port")
    if name in _OWN_HEADERS:
        raise ValueError(f"{value!r} belongs to one connection, one body or one leg, write another header")
    return name


HeaderName = Annotated[str, AfterValidator(_header_name)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused, keys without a value dropped, nothing changes later.

    ``later`` has a sentence for each key that llm-d has, or a later release will have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    later: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: object) -> object:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _check(self) -> Section:
        if faults := tuple(self._faults()):
            raise Faults(faults)
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with keys taken together: the key ("" for the section) and a sentence."""
        return iter(())

"""What the configuration says of servers that legs are sent to: what we prove ourselves with, and what they must."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from coordinator.security.secret import ApiKey


class Outbound(BaseModel):
    """Base of a gateway, a pool, and a step that has an address of its own."""

    api_key: ApiKey | None = Field(
        None,
        description="key that every leg and health probe carries as Authorization: Bearer, in place of the client's; "
        "the key, env:NAME or file:PATH",
    )
    ca_file: str | None = Field(None, description="authorities of https addresses, in PEM form; unset is the system's")
    insecure_skip_verify: bool = Field(
        False, description="do not verify https addresses: whoever is in between can read and change everything"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Outbound:
        if self.insecure_skip_verify and self.ca_file is not None:
            raise ValueError("with insecure_skip_verify nothing is verified by ca_file: take one of the two out")
        return self

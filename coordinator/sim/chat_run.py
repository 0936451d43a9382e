"""A chat-like request on its way through the engine: what chat, messages and responses have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.sim import tokenizer
from coordinator.sim.core import Core, Generation, Job
from coordinator.sim.parsers import Parsing, reasoning_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.sim.answers import Call
    from coordinator.sim.prompts import Prepared
    from coordinator.sim.settings import Settings


@dataclass(slots=True)
class Run:
    core: Core
    call: Call
    prepared: Prepared
    job: Job
    parsing: Parsing

    @property
    def settings(self) -> Settings:
        return self.core.settings

    def admit(self) -> Generation:
        return self.core.admit(self.job)

    def thought(self, token_ids: Sequence[int]) -> int:
        """Count the tokens of the thought."""
        return reasoning_tokens(token_ids, tokenizer.load().id_of, self.parsing)

    def details(self, token_ids: Sequence[Sequence[int]]) -> dict[str, int] | None:
        """Return ``completion_tokens_details`` of some choices; null without a reasoning parser."""
        return {"reasoning_tokens": sum(map(self.thought, token_ids))} if self.settings.parsers else None


def prepared_run(core: Core, call: Call, prepared: Prepared, *, id: str | None = None) -> Run:
    job = Job(
        id=id or f"chatcmpl-{call.id}",
        prompt_ids=prepared.token_ids,
        sampling=prepared.sampling,
        kv_params=connector_params(call.body),
        media=prepared.media,
        ec_params=call.body.get("ec_transfer_params"),
        cache_salt=call.body.get("cache_salt"),
        itl_s=call.itl_s,
        tokens_per_step=call.tokens_per_step if call.wants_stream else 1,
        reasoning_ended=prepared.reasoning_ended,
        dp_rank=call.received.header("x-data-parallel-rank"),
    )
    return Run(core, call, prepared, job, Parsing.of(prepared.context, parsers=core.settings.parsers))


def connector_params(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the transfer params as the connector sees them: the reused prompt is taken out before."""
    params = dict(body.get("kv_transfer_params") or {})
    params.pop("prompt_token_ids", None)
    return params or None


def weights(run: Run, count: int) -> list[dict[str, Any]] | None:
    """Return ``weight_versions``, which a chat client has to ask for."""
    asked = run.call.body.get("return_weight_versions")
    return [{"version": "default", "start": 0, "end": count}] if asked else None

"""The engine's SamplingParams: defaults, value refusals, and which of its fields render leaves out.

Source: vLLM 0.33.0 ``SamplingParams``; recordings ``render/`` and ``errors/generate_error_*``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from coordinator.sim.refusals import Refusal, value_error

MAX_N = 16384
_INT64 = 2**63
# msgspec leaves a field out by identity with its default, so floats and fresh lists stay in.
_ALWAYS = {"stop", "stop_token_ids", "bad_words", "skip_clone", "output_kind", "skip_reading_prefix_cache"}
_FLOATS = {"presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"}
_GREEDY_EPSILON = 1e-5


@dataclass(slots=True)
class Sampling:
    """Every field that the simulated engine reads or that render writes, in vLLM's order.

    ``max_tokens`` is 16 where nothing was said, as in the engine: render drops that value, and generate
    replaces an absent one by the rest of the context.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 2
    skip_clone: bool = True
    output_text_buffer_length: int = 0
    structured_outputs: Mapping[str, Any] | None = None
    logit_bias: Mapping[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    bad_words: list[str] = field(default_factory=list)
    thinking_token_budget: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Take the known fields of a JSON object whose types have been checked.

        Raises:
            Refusal: a value is out of range.
        """
        known = {f.name for f in fields(cls)}
        given = {name: value for name, value in body.items() if name in known}
        for name in _FLOATS & given.keys():
            given[name] = float(given[name])
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        for name in ("stop", "stop_token_ids", "bad_words"):
            given[name] = list(given.get(name) or [])
        sampling = cls(**given)
        sampling._finish()
        return sampling

    def rendered(self) -> dict[str, Any]:
        """Return it as render does: without the fields that are the engine's defaults."""
        plain = Sampling()
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) != getattr(plain, f.name)
            or f.name in _ALWAYS
            or (f.name in _FLOATS and not (self.greedy and f.name in ("top_p", "min_p")))
        }

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_EPSILON

    def _finish(self) -> None:
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        self._check()

    def _check(self) -> None:
        if self.n < 1:
            raise Refusal(f"n must be at least 1, got {self.n}.")
        if self.n > MAX_N:
            raise Refusal(
                f"n must be at most {MAX_N}, got {self.n}. To increase this limit, "
                "set the VLLM_MAX_N_SEQUENCES environment variable."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise value_error(f"{name} must be in [-2, 2], got {getattr(self, name)}.", param=name)
        if self.repetition_penalty <= 0:
            raise value_error(
                f"repetition_penalty must be greater than zero, got {self.repetition_penalty}.",
                param="repetition_penalty",
                value=self.repetition_penalty,
            )
        if not 0.0 <= self.temperature <= 2.0:
            raise value_error(
                f"temperature must be in [0, 2], got {self.temperature}.",
                param="temperature",
                value=self.temperature,
            )
        if not 0.0 < self.top_p <= 1.0:
            raise value_error(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p", value=self.top_p)
        if self.top_k < -1:
            raise value_error(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.", param="top_k")
        if not 0.0 <= self.min_p <= 1.0:
            raise value_error(f"min_p must be in [0, 1], got {self.min_p}.", param="min_p", value=self.min_p)
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise value_error(
                f"max_tokens must be at least 1, got {self.max_tokens}.",
                param="max_tokens",
                value=self.max_tokens,
            )
        if self.min_tokens < 0:
            raise value_error(
                f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.",
                param="min_tokens",
                value=self.min_tokens,
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise value_error(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
                param="min_tokens",
                value=self.min_tokens,
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < -1:
                raise value_error(f"{name} must be non-negative or -1, got {count}.", param=name, value=count)
        if any(not text for text in self.stop):
            raise Refusal("stop cannot contain an empty string.")
        if self.stop and not self.detokenize:
            raise Refusal("stop strings are only supported when detokenize is True. Set detokenize=True to use stop.")
        if self.greedy and self.n > 1:
            raise Refusal(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.extra_args and _has_huge_int(self.extra_args):
            raise value_error("extra_args integers must be between -2**63 and 2**64 - 1.", param="extra_args")


def check_engine_limits(sampling: Sampling, *, vocab_size: int, max_logprobs: int) -> None:
    """Refuse what only the engine checks; in a stream these come as an event.

    Raises:
        Refusal: a count is above the server's cap, a token id outside the vocabulary, or a grammar is bad.
    """
    for name, called in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        count = getattr(sampling, name)
        if count is not None and count > max_logprobs:
            raise value_error(
                f"Requested {called} logprobs of {count}, which is greater than max allowed: {max_logprobs}",
                param=name,
                value=count,
                late=True,
            )
    outside = [int(id) for id in sampling.logit_bias or () if not 0 <= int(id) < vocab_size]
    if outside:
        raise value_error(
            f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids. Vocabulary size: {vocab_size}",
            param="logit_bias",
            value=outside,
            late=True,
        )
    if sampling.structured_outputs and sampling.structured_outputs.get("regex") == "(":
        raise Refusal(
            'Grammar error: at 1(8): invalid regex "(" (in regex): regex parse error:\n    (\n    ^\n'
            "error: unclosed group\n   1 | start: /(/\n              ^",
            late=True,
        )


def check_transfer_ints(params: Mapping[str, Any] | None) -> None:
    if params and _has_huge_int(params):
        raise Refusal("can't serialize ints < -2**63 or > 2**64 - 1")


def _has_huge_int(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_huge_int(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_huge_int(item) for item in value)
    if isinstance(value, float):
        return math.isinf(value)
    return isinstance(value, int) and not -_INT64 <= value < 2 * _INT64

"""What a simulated server was started with: the flags that change its protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        version: ``0.33.0``, or an older one whose differences are simulated: 0.32 has no derender and no
            ``parse_context``, 0.31 has no ``output_mode`` at all.
        parsers: ``--tool-call-parser hermes --reasoning-parser qwen3 --enable-auto-tool-choice``.
        scale_out: ``--enable-scale-out``; without it the tokens-in routes answer 403.
        tokens_only: ``--tokens-only``: no tokenizer on this server.
        connector: a KV connector is configured.
        kv: which; ``sglang`` makes it an SGLang server, which has the client's routes and no others.
        dp_size: data-parallel ranks.
        ec_connector: the encoder-cache connector, on encode workers as producer and elsewhere as consumer.
        trust_mm_kwargs: ``--trust-request-mm-kwargs``.
        strict_kv: a hand-over that does not fit its prompt is answered 500; otherwise, as on a real GPU, with
            wrong text.
        die_of_bad_kv: an incomplete hand-over ends the process, as it does the real one.
    """

    model: str = "tiny"
    version: str = "0.33.0"
    max_model_len: int = 8192
    max_logprobs: int = 20
    max_num_seqs: int = 128
    parsers: bool = True
    scale_out: bool = True
    tokens_only: bool = False
    api_key: str | None = None
    request_id_headers: bool = False
    prompt_tokens_details: bool = False
    connector: bool = True
    kv: Literal["nixl", "nixl-push", "mooncake", "sglang"] = "nixl"
    dp_size: int = 1
    ec_connector: Literal["nixl", "shared_storage"] | None = "nixl"
    trust_mm_kwargs: bool = True
    strict_kv: bool = True
    die_of_bad_kv: bool = True

    @property
    def nixl(self) -> bool:
        return self.connector and self.kv in ("nixl", "nixl-push")

    def at_least(self, *release: int) -> bool:
        return tuple(int(part) for part in self.version.split(".")[:2]) >= release

    @property
    def output_modes(self) -> tuple[str, ...]:
        """The modes that ``output_mode`` may name; empty where the field is unknown."""
        if self.at_least(0, 33):
            return ("tokens", "text", "derender")
        return ("tokens", "text") if self.at_least(0, 32) else ()

    @property
    def fingerprint(self) -> str:
        return f"vllm-{self.version}-51a1a7ed"

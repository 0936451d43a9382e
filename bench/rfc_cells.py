"""What the RFC's latency table has in it: ways to make text of tokens, clients at a time, and lengths of answers.

Source: the RFC "output_mode on generate", section 12.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Site = Literal["simulator", "vLLM"]

TEXT, TEXT_HERE = "text", "text, rendered here"
INLINE, KEPT, SERVICE, COUPLED = "derender inline", "derender in the coordinator", "derender service", "chat route"


@dataclass(frozen=True)
class Mode:
    """A way in which tokens become what a chat client reads.

    Attributes:
        does: one sentence for readers.
        streams: a client's stream comes token by token.
        needs_vllm: the coordinator runs where vLLM's parsers are, or a derender service does.
    """

    name: str
    does: str
    decode: dict[str, Any]
    openai: bool = False
    streams: bool = True
    needs_vllm: bool = False
    render_here: bool = False
    parses_here: bool = False
    derender_step: bool = False

    def config(self, site: Workers, port: int) -> dict[str, Any]:
        """Return the coordinator's file for it."""
        render: dict[str, Any] = {"address": site.render}
        if self.render_here:
            render = {"tokenizer": site.model, "max_model_len": site.max_model_len, **site.parsers}
        ids = {"send_prompt_token_ids": True} if self.openai else {}
        decode = self.decode | ({"tokenizer": site.model, **site.parsers} if self.parses_here else {})
        steps = [
            {"type": "render", "params": render},
            {"type": "prefill", "params": ids},
            {"type": "decode", "params": {**ids, **decode}},
        ]
        if self.derender_step:
            steps.append({"type": "derender", "params": {"address": site.derender, "timeout": "0"}})
        return {
            "log_level": "warning",
            "server": {"listen_addr": f"127.0.0.1:{port}"},
            "pools": {"prefill": {"endpoints": [site.prefill]}, "decode": {"endpoints": [site.decode]}},
            "pipeline": {"kv_connector": "kv-nixl", "use_openai_format": self.openai, "steps": steps},
        }


@dataclass(frozen=True)
class Workers:
    """Where the workers of a site are; ``model`` is the folder with their tokenizer."""

    render: str
    prefill: str
    decode: str
    derender: str | None
    model: str
    max_model_len: int

    @property
    def parsers(self) -> dict[str, str]:
        return {"tool_parser": "hermes", "reasoning_parser": "qwen3"}


MODES = (
    Mode(COUPLED, "decode on the worker's own `/v1/chat/completions`, with render's token ids", {}, openai=True),
    Mode(TEXT, "tokens in, `output_mode: text`; nobody parses", {"output_mode": "text", "wrap": ["chat"]}),
    Mode(
        TEXT_HERE,
        "the same, and the coordinator renders in the place of a service",
        {"output_mode": "text", "wrap": ["chat"]},
        render_here=True,
    ),
    Mode(
        INLINE,
        "tokens in, `output_mode: derender`: the worker parses, and does not stream",
        {"output_mode": "derender", "wrap": ["chat"]},
        streams=False,
    ),
    Mode(
        KEPT,
        "tokens in, text out, parsed by vLLM's parsers in a process of the coordinator's",
        {"derender": "coordinator", "output_mode": "text"},
        needs_vllm=True,
        parses_here=True,
    ),
    Mode(
        SERVICE,
        "tokens in, tokens out, and one call of vLLM's derender route per chunk",
        {"derender": "service", "output_mode": "tokens"},
        needs_vllm=True,
        derender_step=True,
    ),
)


@dataclass(frozen=True)
class Cell:
    """One load: so many clients at a time, each asking again when it was answered, for so many tokens each.

    Attributes:
        requests: in all.
        begin_s: none begins after so long.
        limit_s: after so long answers are cut, and what was seen of them until then is told.
        slow_s: the same where every token waits for a call of the derender service, which ends no long answer in time.
    """

    site: Site
    length: int
    clients: int
    requests: int
    begin_s: float
    limit_s: float
    slow_s: float

    def measures(self, mode: Mode) -> bool:
        """Say whether a mode belongs here: who renders moves the first token alone, which short answers tell."""
        return self.length <= 64 or not mode.render_here

    def limit_of(self, mode: Mode) -> float:
        return self.slow_s if mode.derender_step else self.limit_s


def _cells(
    site: Site, length: int, clients: tuple[int, ...], begin_s: float, limit_s: float, slow_s: float
) -> tuple[Cell, ...]:
    return tuple(Cell(site, length, count, max(16, 2 * count), begin_s, limit_s, slow_s) for count in clients)


# The most telling first: a budget that ends leaves out the last.
SIMULATED = (
    *_cells("simulator", 64, (1, 8, 32, 64), 6.0, 60.0, 60.0),
    *_cells("simulator", 512, (1, 64, 8, 32), 1.0, 60.0, 40.0),
    *_cells("simulator", 4096, (1, 64, 8, 32), 1.0, 90.0, 30.0),
)
REAL = (
    *_cells("vLLM", 64, (1, 8, 32, 64), 10.0, 60.0, 60.0),
    *_cells("vLLM", 512, (1, 8, 32, 64), 5.0, 60.0, 40.0),
    *_cells("vLLM", 4096, (1, 8), 1.0, 130.0, 30.0),
    # To the end they take four minutes and more on two cores, each way, by the attention to what there is already.
    *_cells("vLLM", 4096, (64,), 1.0, 70.0, 30.0),
    *_cells("vLLM", 4096, (32,), 1.0, 100.0, 30.0),
)
# Streams on the generate route of the decode worker itself, with and without clients of the modes beside them.
TOKENS_CLIENTS, TOKENS_LENGTH, TOKENS_REQUESTS = 8, 64, 64
OTHERS_FIRST_S = 3.0  # so that they all generate when the tokens requests begin

# All of it is asked, however long that takes.
SMOKE = tuple(
    replace(cell, length=8, clients=min(cell.clients, 2), requests=2, begin_s=600.0, limit_s=600.0, slow_s=600.0)
    for cell in SIMULATED[:2]
)

# A token every 10 ms for each stream, as a model on one node gives them; an answer of 4,096 tokens takes 41 s so.
SIMULATED_ITL_S = 0.01

# Of the real workers: 64 requests at a time, each with room for 4,096 tokens and its prompt, at 4 KiB a token.
MAX_MODEL_LEN = 8192
ENGINE = {"max_model_len": str(MAX_MODEL_LEN), "max_num_seqs": "64", "kv_cache_memory_bytes": str(1280 << 20)}

LEFT_OUT = (
    "The simulator's front end is Python of ours, so its CPU time says nothing and is not shown; neither are `tokens` "
    "requests beside others, which contend in a real worker's front end.",
    "`text, rendered here` has answers of 64 tokens alone: who renders moves the first token, and not those after it.",
    "`derender inline` does not stream in vLLM 0.33: its first token comes with its last, and of an answer that was "
    "cut the worker's own count of tokens is all there is to tell.",
)

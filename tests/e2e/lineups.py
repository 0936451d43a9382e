"""The pipelines that the tests run, as configurations: both wire formats, and each way to get text out of tokens."""

from __future__ import annotations

from typing import NamedTuple


class Lineup(NamedTuple):
    """One pipeline of static pools with the NIXL connector."""

    openai_format: bool
    render: bool = True
    output_mode: str | None = None  # of a decode leg in generate format
    prompt_token_ids: bool = False  # in OpenAI format: render's tokens travel beside the hand-over

    @property
    def parsed(self) -> bool:
        """Whether the worker's parsers take reasoning and tool calls out of the text."""
        return self.output_mode != "text"

    def config(self, render: str, prefill: str, decode: str, kv_connector: str = "kv-nixl") -> dict:
        """Return the configuration, for workers at these addresses."""
        leg = {"send_prompt_token_ids": True} if self.prompt_token_ids else {}
        answer = {} if self.openai_format else {"output_mode": self.output_mode, "wrap": "all"}
        steps = [
            {"type": "render", "params": {"address": render}},
            {"type": "prefill", "params": leg},
            {"type": "decode", "params": leg | answer},
        ]
        return {
            "pools": {"prefill": {"endpoints": [prefill]}, "decode": {"endpoints": [decode]}},
            "pipeline": {
                "kv_connector": kv_connector,
                "use_openai_format": self.openai_format,
                "steps": steps if self.render else steps[1:],
            },
        }


LINEUPS = {
    "openai": Lineup(openai_format=True, render=False),
    "openai-ids": Lineup(openai_format=True, prompt_token_ids=True),
    "text": Lineup(openai_format=False, output_mode="text"),
    "derender": Lineup(openai_format=False, output_mode="derender"),
}

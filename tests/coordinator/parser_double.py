"""What stands for vLLM's parsers in a parser process: it parses nothing, and misbehaves by the text that it is given.

It is loaded by ``process_main`` in a process of its own, so it imports nothing that a test has.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


class Unusable(Exception):
    pass


class Refused(Exception):
    pass


class Parsers:
    def __init__(self, *, tokenizer: str, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self.name = tool_parser
        self.facts = {"eos_token_id": 7}
        if tool_parser == "unknown":
            raise Unusable("tool_parser: there is no 'unknown', did you mean upper?")
        if tool_parser == "broken":
            raise RuntimeError("secret text")
        if tool_parser == "dead":
            os._exit(3)

    def stream(self, job: dict[str, Any]) -> Stream:
        if job.get("refuse"):
            raise Refused("no such tool")
        return Stream(job)

    def whole(self, job: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        misbehave(reply["text"])
        return {**reply, "text": reply["text"].upper(), "parsed by": os.getpid()}


class Stream:
    def __init__(self, job: dict[str, Any]) -> None:
        self.over = False
        self.said = 0

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        text = chunk.get("text", "")
        misbehave(text)
        self.over = text == "enough"
        self.said += 1
        return None if text == "nothing" else {**chunk, "text": text.upper()}

    def usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {"usage": self.said}


def print_to_the_coordinator(data: bytes) -> None:
    """Write to its socket, whose number the process was started with, beside the loop that owns it."""
    os.write(int(sys.argv[3]), data)


def misbehave(text: str) -> None:
    if text == "raise":
        raise ValueError(f"cannot parse {text!r}, and this is what was generated")
    if text == "die":
        os._exit(9)
    if text == "garble":
        print_to_the_coordinator(b"what 1 {}\n")
    if text == "hang":
        time.sleep(60)
    if text.startswith("slow"):
        time.sleep(0.05)

"""What the simulated model says: a pure function of the prompt's text.

The model reads its prompt back from the token ids (ChatML, as ``model/chat_template.jinja`` writes it), so an answer
depends on the whole prompt: a leg that got another prompt's tokens cannot give the right one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WRONG_KV = "WRONG KV: this answer was made from cache blocks that belong to another prompt."


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        chat: the prompt is ChatML; otherwise it is one raw text, in ``turns[0]``.
        thinking: the template left the thought open.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    chat: bool = True
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, before it is written as one text.

    Attributes:
        calls: name and arguments of each tool call, in order.
        endless: the text is said again and again, and no end of turn follows.
    """

    reasoning: str
    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=())
    endless: bool = False


def read_prompt(text: str) -> Prompt:
    """Split a prompt into its turns and tools."""
    if "<|im_start|>" not in text:
        return Prompt((Turn("user", text),), chat=False)
    turns = []
    for part in text.split("<|im_start|>")[1:]:
        role, _, said = part.partition("\n")
        turns.append(Turn(role, said.removesuffix("\n").removesuffix("<|im_end|>")))
    opening = turns.pop() if turns[-1].role == "assistant" else Turn("assistant", "")
    return Prompt(tuple(turns), _tools(turns), thinking="</think>" not in opening.text)


def _tools(turns: list[Turn]) -> tuple[Mapping[str, Any], ...]:
    system = turns[0].text if turns and turns[0].role == "system" else ""
    _, found, block = system.partition("# Tools\n<tools>\n")
    if not found:
        return ()
    lines = block.partition("\n</tools>")[0].split("\n")
    tools = [_object(line).get("function") for line in lines]
    return tuple(tool for tool in tools if isinstance(tool, dict) and "name" in tool)


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object that a user may have written: empty if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def reply_to(prompt: Prompt) -> Reply:
    """Answer the last turn."""
    last = prompt.turns[-1].text if prompt.turns else ""
    if "<tool_response>" in last:
        return _after_tools(prompt, last)
    question = last.strip()
    names = {str(tool["name"]) for tool in prompt.tools}
    for pattern, answer in _PATTERNS:
        if match := re.fullmatch(pattern, question, re.DOTALL):
            return answer(match, names)
    return FIXED.get(question) or _generic(question)


def looking(reply: Reply, seen: Sequence[str]) -> Reply:
    """Return a reply that begins with what the model was shown, so that an answer tells whose pictures it is about."""
    if not seen or not reply.content:
        return reply
    return replace(reply, content=f"I see {', '.join(seen)}. {reply.content}")


def _after_tools(prompt: Prompt, last: str) -> Reply:
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last, re.DOTALL)
    asked = prompt.turns[-2].text if len(prompt.turns) > 1 else ""
    calls = [_object(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", asked, re.DOTALL)]
    said = []
    for call, result in zip(calls, results, strict=False):
        arguments = call.get("arguments")
        city = arguments.get("city") if isinstance(arguments, dict) else None
        said.append(f"In {city} it is {result}." if city else f"The {call.get('name')} tool says {result}.")
    return Reply("The tool has answered.", " ".join(said) or " ".join(results))


def _repeat(match: re.Match[str], tools: set[str]) -> Reply:
    return Reply("I repeat the words.", match[1])


def _code_word(match: re.Match[str], tools: set[str]) -> Reply:
    return Reply("I look for the code word.", match[1])


def _weather(match: re.Match[str], tools: set[str]) -> Reply:
    cities = [city for city in match.groups() if city]
    if "get_weather" not in tools:
        return Reply("I have no tool for that.", "I have no weather tool.")
    thought = "I need the weather tool." if len(cities) == 1 else "I need the tool twice."
    return Reply(thought, "", tuple(("get_weather", {"city": city}) for city in cities))


def _add(match: re.Match[str], tools: set[str]) -> Reply:
    a, b = int(match[1]), int(match[2])
    if "add" not in tools:
        return Reply("I add them myself.", f"{a} + {b} = {a + b}.")
    return Reply("I use the add tool.", "Let me add them.\n", (("add", {"a": a, "b": b}),))


def _count(match: re.Match[str], tools: set[str]) -> Reply:
    top = min(int(match[1]), 1000)
    return Reply(f"I count from 1 to {top}.", ", ".join(map(str, range(1, top + 1))) + ".")


def _generic(question: str) -> Reply:
    first = question.split("\n", 1)[0]
    quoted = first if len(first) <= 200 else first[:200] + "..."
    return Reply(
        "I am a simulated model: I have no knowledge, so I say so and give the question back.",
        "I am a simulated model, so I cannot really answer, but your request went all the way through the "
        f'prefill and decode workers and back. You said: "{quoted}". '
        'Try "Say hello in French.", "Count to 20." or "Repeat: some words".',
    )


_PATTERNS = (
    (r"Repeat: ?(.+)", _repeat),
    (r"The code word is (.+?)\. .*What is the code word\?", _code_word),
    (r"What is the weather in (.+?)\?", _weather),
    (r"Compare the weather in (.+?) and (.+?)\.", _weather),
    (r"Add (\d+) and (\d+)\.", _add),
    (r"Count to (\d+)\.?", _count),
)
_PLACES = ("mill", "bridge", "forest", "castle", "village", "island", "harbour", "lighthouse", "cliff", "beach")

FIXED = {
    "Say hello.": Reply("The user wants a greeting.", "Hello! How can I help you today?"),
    "Say hello in French.": Reply("They want French, with accents.", "Bonjour ! Ça va ? C'est déjà l'été à Besançon."),
    "Say hello in Japanese.": Reply("They want Japanese: 日本語.", "こんにちは、世界。漢字も書けます。"),
    "Say hello in Greek.": Reply("They want Greek.", "Γειά σου Κόσμε"),
    "Say hello in Arabic.": Reply("They want Arabic, right to left.", "مرحبا بالعالم"),
    "Send me some emoji.": Reply("Emoji, some of them joined 👍.", "Here you go: 🙂 🚀 🎉 👩\u200d💻 🇫🇷 done."),
    "What is the capital of France?": Reply(
        "France is a country. Its capital is Paris.", "The capital of France is Paris."
    ),
    "What is 2 + 2?": Reply("2 + 2 is 4.\n\nI am sure of it.", "2 + 2 = **4**."),
    "Count to twenty.": Reply("I count from 1 to 20.", ", ".join(map(str, range(1, 21))) + "."),
    "Count to one hundred.": Reply("I count from 1 to 100.", " ".join(map(str, range(1, 101)))),
    "Write a poem.": Reply(
        "Four short lines will do.",
        "Roses are red,\nviolets are blue,\nprefill is done\nand decode is too.",
    ),
    "Tell me a long story.": Reply(
        "It has to be long.\nI start with a river and a boat.",
        "Once upon a time a small boat went down a long river. "
        + " ".join(f"On day {day} it passed the {place} and went on." for day, place in enumerate(_PLACES, 1))
        + " Then it reached the sea, and that is the end.",
    ),
    "Write some Python.": Reply(
        "A short function is enough.",
        "```python\ndef add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n```",
    ),
    "Give me JSON.": Reply("Only JSON, no prose.", '{"ok": true, "items": [1, 2, 3], "name": "café", "none": null}'),
    "Escape test.": Reply(
        "Quotes, backslashes and tags.",
        'He said "hi\\there" & <b>bold</b>\tend of line\r\nnext \\u00e9',
    ),
    "Just say OK.": Reply("Two letters.", "OK"),
    "Say nothing.": Reply("The answer is empty.", ""),
    "Who are you?": Reply("I am asked for my name.", "I am a tiny test model."),
    "Think hard.": Reply(" ".join(f"Step {i} is clear." for i in range(1, 21)), "I am done thinking."),
    "Say stop in the middle.": Reply("They want a word in the middle.", "This is before STOP and this is after it."),
    "Never stop.": Reply("This will not end.", "again and ", endless=True),
    "Goodbye.": Reply("They leave.", "Goodbye, see you soon!"),
}

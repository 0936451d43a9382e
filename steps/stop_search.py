"""Stop strings where only a derender service makes text: looked for by asking it what each piece of tokens says.

A worker without a tokenizer refuses stop strings and goes on behind them. So they are taken off its leg, which is
listened to as it generates, and closed once every choice has ended. Which token completes a stop string is found by
halves, so that tokens which came in one piece are told apart by a few calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from envelope.collected import Collected
from envelope.generate import TOKENS
from envelope.rebuild import choices_of, reading
from envelope.stop_strings import StopStrings, counted, ended_by

if TYPE_CHECKING:
    from coordinator.context import LiveStream
    from envelope.json_codec import Json


class Texts(Protocol):
    """The service."""

    async def text(self, token_ids: list[int], finish: Json, state: Json | None) -> tuple[str, Json]:
        """Return what tokens say that follow a state, and the state after them.

        Args:
            finish: why and how the choice ended with these, empty while it goes on.
        """


class _Seen:
    """One choice, as far as it has been looked at."""

    def __init__(self, stop: list[str]) -> None:
        self.strings = StopStrings(stop)
        self.count = 0
        self.state: Json | None = None

    def take(self, count: int, text: str, state: Json) -> None:
        self.strings.passed(text)
        self.count, self.state = self.count + count, state


class StopSearch:
    """The stop strings of one request's choices.

    Args:
        sampling: the request's, with ``stop``.
    """

    def __init__(self, texts: Texts, sampling: Json) -> None:
        self._texts = texts
        self._stop: list[str] = sampling["stop"]
        self._min_tokens: int = sampling.get("min_tokens") or 0
        self._n: int = sampling.get("n") or 1
        self._seen: dict[int, _Seen] = {}
        self._ends: dict[int, tuple[int, str]] = {}

    async def whole(self, reply: Json, prompt_tokens: int) -> Json:
        """Return a whole answer, cut where stop strings would have ended it."""
        for choice in choices_of(reply):
            await self._look(choice)
        return self._cut(reply, prompt_tokens)

    async def listen(self, live: LiveStream, prompt_tokens: int) -> Json:
        """Return the whole answer of a stream, which is closed."""
        collected, over = Collected(TOKENS), False

        def take(data: bytes) -> bool:
            collected.feed(data)
            return False  # the worker is not read from while the service is asked

        while not over:
            over = await live.push(take)
            for choice in collected.choices():
                await self._look(choice)
            if len(self._ends) == self._n:
                collected.end()
                break
        await live.aclose()
        return self._cut(collected.reply(self._ends), prompt_tokens)

    def _cut(self, reply: Json, prompt_tokens: int) -> Json:
        if not self._ends:
            return reply
        with reading("decode"):
            choices = [self._ended(choice) for choice in reply["choices"]]
            return counted({**reply, "choices": choices}, prompt_tokens)

    def _ended(self, choice: Json) -> Json:
        end = self._ends.get(choice["index"])
        return choice if end is None else ended_by(choice, *end)

    async def _look(self, choice: Json) -> None:
        """Look at what a choice has gained since it was last looked at."""
        with reading("decode"):
            index, all_tokens = choice["index"], list(choice.get("token_ids") or ())
            if index in self._ends:
                return
        seen = self._seen.setdefault(index, _Seen(self._stop))
        tokens: list[int] = all_tokens[seen.count :]
        finish = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
        unchecked = max(self._min_tokens - seen.count, 0)
        if tokens[:unchecked]:
            head, tokens = tokens[:unchecked], tokens[unchecked:]
            seen.take(len(head), *await self._texts.text(head, {} if tokens else finish, seen.state))
        if not tokens:
            return
        text, state = await self._texts.text(tokens, finish, seen.state)
        stop = seen.strings.found(text)
        if stop is None:
            seen.take(len(tokens), text, state)
        else:
            self._ends[index] = await self._first(seen, tokens, stop)

    async def _first(self, seen: _Seen, tokens: list[int], stop: str) -> tuple[int, str]:
        """Return how many tokens a choice has that ends in these, and by which stop string."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            text, _ = await self._texts.text(tokens[:middle], {}, seen.state)
            sooner = seen.strings.found(text)
            if sooner is None:
                low = middle + 1
            else:
                high, stop = middle, sooner
        return seen.count + high, stop


def stops_of(rendered: Json) -> Json | None:
    """Return the sampling parameters of a request that has stop strings; None where it has none."""
    sampling: Any = rendered.get("sampling_params") or {}
    return sampling if sampling.get("stop") else None

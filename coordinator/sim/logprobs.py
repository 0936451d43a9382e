"""Made-up log probabilities, in each of the shapes in which vLLM shows them.

Source: recordings ``*_logprobs*``; the cuts differ by route, see each function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.sim.tokenizer import Tokenizer

_SURPRISING_RANK = 476


@dataclass(frozen=True, slots=True)
class Candidate:
    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the sampled token first, then the top k others or, if it is not among them, all k."""

    candidates: tuple[Candidate, ...]

    @property
    def sampled(self) -> Candidate:
        return self.candidates[0]


def made_up(
    tokenizer: Tokenizer, token_id: int, position: int, k: int, *, text: str | None = None, surprising: bool
) -> TokenLogprobs:
    """Invent one position; the same arguments always give the same numbers.

    Args:
        text: of the sampled token, where it depends on what came before: the token that completes a character
            is shown as that character, the ones before it as nothing.
        k: how many of the best are wanted; -1 for the whole vocabulary.
        surprising: a sampled token may rank below the top k, which one in three then does.
    """
    vocabulary = len(tokenizer)
    wanted = vocabulary if k == -1 else k
    below = surprising and k != -1 and (token_id + position) % 3 == 0
    best = -0.01 - (token_id * 31 + position * 17) % 97 / 100
    others: list[Candidate] = []
    step = 1
    while len(others) < (wanted if below else wanted - 1):
        other = (token_id + 37 * step) % vocabulary
        step += 1
        if other != token_id:
            rank = len(others) + (1 if below else 2)
            others.append(Candidate(other, tokenizer.token_text(other), round(best - 0.25 * rank, 4), rank))
    shown = tokenizer.token_text(token_id) if text is None else text
    rank, logprob = (_SURPRISING_RANK, best - 5) if below else (1, best)
    sampled = Candidate(token_id, shown, round(logprob, 4), rank)
    return TokenLogprobs((sampled, *others))


def by_id(positions: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    """The ``tokens`` mode of generate: integer ids, not cut."""
    if positions is None:
        return None
    content = []
    for position in positions:
        shown = [{"token_id": c.token_id, "logprob": c.logprob, "rank": c.rank} for c in position.candidates]
        content.append({**shown[0], "top_logprobs": shown})
    return {"content": content}


def chat(positions: Sequence[TokenLogprobs] | None, *, cut: int | None) -> dict[str, Any] | None:
    """The chat shape: cut to the first ``cut`` entries (-1 and None: not cut)."""
    if positions is None:
        return None
    content = []
    for position in positions:
        shown = [_chat_entry(c) for c in position.candidates]
        content.append({**shown[0], "top_logprobs": shown if cut in (None, -1) else shown[:cut]})
    return {"content": content}


def chat_by_id(positions: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    """Generate before 0.32: the chat shape, with ids in place of texts."""
    if positions is None:
        return None
    content = []
    for position in positions:
        shown = [{"token": f"token_id:{c.token_id}", "logprob": c.logprob, "bytes": None} for c in position.candidates]
        content.append({**shown[0], "top_logprobs": shown})
    return {"content": content}


def _chat_entry(candidate: Candidate) -> dict[str, Any]:
    return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.text.encode())}


def completions(
    positions: Sequence[TokenLogprobs | str] | None, *, k: int, offset: int
) -> tuple[dict[str, Any] | None, int]:
    """The completions shape: the first k + 1 entries of each position.

    Args:
        positions: a mere text is a token of which nothing is known.
        offset: characters of the tokens before these; the sum that includes them is returned too.
    """
    if positions is None:
        return None, offset
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for position in positions:
        known = None if isinstance(position, str) else position
        text = position if isinstance(position, str) else position.sampled.text
        shown["text_offset"].append(offset)
        shown["tokens"].append(text)
        shown["token_logprobs"].append(known and known.sampled.logprob)
        shown["top_logprobs"].append(known and {c.text: c.logprob for c in known.candidates[: k + 1]})
        offset += len(text)
    return shown, offset


def of_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], k: int, *, with_text: bool = True
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs``: nothing for the first token, then the token itself and its k rivals."""
    shown: list[dict[str, Any] | None] = [None]
    for position, token_id in enumerate(prompt_ids[1:], 1):
        candidates = made_up(tokenizer, token_id, position, k, surprising=True).candidates
        shown.append(
            {
                str(c.token_id): {
                    "logprob": c.logprob,
                    "rank": c.rank,
                    "decoded_token": c.text if with_text else None,
                }
                for c in candidates
            }
        )
    return shown

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
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the sampled token first, then the top k others or, if it is not among them, all k."""

    candidates: tuple[Candidate, ...]

    @property
    def sampled(self) -> Candidate:
        return self.candidates[0]


def made_up(token_id: int, position: int, k: int, *, surprising: bool, vocabulary: int = 1021) -> TokenLogprobs:
    """Invent one position; the same arguments always give the same numbers.

    Args:
        k: how many of the best are wanted; -1 for the whole vocabulary.
        surprising: a sampled token may rank below the top k, which one in three then does.
    """
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
            others.append(Candidate(other, round(best - 0.25 * rank, 4), rank))
    sampled = Candidate(token_id, round(best - 5, 4), _SURPRISING_RANK) if below else Candidate(token_id, best, 1)
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


def chat(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs] | None, *, cut: int | None) -> dict[str, Any] | None:
    """The chat shape: cut to the first ``cut`` entries (-1 and None: not cut)."""
    if positions is None:
        return None
    content = []
    for position in positions:
        shown = [_chat_entry(tokenizer, c) for c in position.candidates]
        content.append({**shown[0], "top_logprobs": shown if cut in (None, -1) else shown[:cut]})
    return {"content": content}


def _chat_entry(tokenizer: Tokenizer, candidate: Candidate) -> dict[str, Any]:
    token = tokenizer.token_text(candidate.token_id)
    return {"token": token, "logprob": candidate.logprob, "bytes": list(token.encode())}


def completions(
    tokenizer: Tokenizer,
    positions: Sequence[TokenLogprobs | None] | None,
    *,
    k: int,
    offset: int,
    tokens: Sequence[int],
) -> dict[str, Any] | None:
    """The completions shape: the first k + 1 entries of each position; null where nothing is known.

    Args:
        offset: characters of the tokens before these.
    """
    if positions is None:
        return None
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, position in zip(tokens, positions, strict=True):
        text = tokenizer.token_text(token_id)
        shown["text_offset"].append(offset)
        shown["tokens"].append(text)
        shown["token_logprobs"].append(None if position is None else position.sampled.logprob)
        shown["top_logprobs"].append(
            None
            if position is None
            else {tokenizer.token_text(c.token_id): c.logprob for c in position.candidates[: k + 1]}
        )
        offset += len(text)
    return shown


def of_prompt(tokenizer: Tokenizer | None, prompt_ids: Sequence[int], k: int) -> list[Any]:
    """``prompt_logprobs``: nothing for the first token, then the token itself and its k rivals."""
    shown: list[Any] = [None]
    for position, token_id in enumerate(prompt_ids[1:], 1):
        shown.append(
            {
                str(c.token_id): {
                    "logprob": c.logprob,
                    "rank": c.rank,
                    "decoded_token": tokenizer.token_text(c.token_id) if tokenizer else None,
                }
                for c in made_up(token_id, position, k, surprising=True).candidates
            }
        )
    return shown

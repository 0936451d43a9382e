"""What must become of a cell's request: the rules of the product, followed leg by leg, in as few lines as they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.chaos.faults import FINE, LOSES_THE_HANDOVER, Effect

if TYPE_CHECKING:
    from tests.chaos.cells import Cell


@dataclass(frozen=True, slots=True)
class Expected:
    """
    Attributes:
        kind: ``answer`` (the whole right text), ``error`` (a status and a JSON error), ``broken`` (a part of the right
            text, an error event, no proper end).
        status: the status line of an error, else what the error event says.
        word: the outcome in metrics and log.
        by: the leg that is at fault.
        left: prefill may be left with blocks that nobody can free: the reason, or "".
    """

    kind: str
    status: int
    word: str
    by: str = ""
    left: str = ""


ANSWER = Expected("answer", 200, "ok")
_WORDS = {502: "leg_failed", 503: "unavailable", 504: "timeout"}


def expect(cell: Cell) -> Expected:
    """Return the outcome for a client who stays."""
    if cell.setup.probes and (final := _probed(cell)) is not None:
        return final
    if cell.setup.format != "openai" and (effect := _effect(cell, "render")) is not FINE:
        return _ended(effect, "render")
    if cell.setup.encodes and _ends_at_encode(cell, effect := _effect(cell, "encode")):
        return _ended(effect, "encode")
    effect, lost = _effect(cell, "prefill"), cell.phase == "prefill" and cell.fault in LOSES_THE_HANDOVER
    left = "prefill's answer was lost" if lost else ""
    if effect is FINE:
        left = left or _left_by_decode(cell)
    elif not _goes_on_alone(cell, effect):
        return replace(_ended(effect, "prefill"), left=left)
    return replace(_ended(_effect(cell, "decode"), "decode"), left=left)


def _ends_at_encode(cell: Cell, effect: Effect) -> bool:
    """Say whether prefill does not encode instead; a refusal is the picture's fault, and prefill would say the same."""
    return effect is not FINE and (effect.kind == "rejected" or cell.setup.on_encode_failure == "fail")


def _left_by_decode(cell: Cell) -> str:
    """Say why prefill may be left with its blocks: decode's answer is a lie, or no decode worker has any other."""
    row = cell.row
    # The OpenAI routes tell prefill when they refuse; and what refuses the leg that would release is not asked again.
    refused = row.refuses and (cell.setup.format == "openai" or cell.leaves)
    if not cell.meets("decode") or not (cell.lasting or row.claims or refused):
        return ""
    unseen = row.unseen or (cell.setup.format == "openai" and row.at_once and cell.streams("decode"))
    return "decode was given the hand-over and never looked" if unseen else ""


def _effect(cell: Cell, phase: str) -> Effect:
    """Return what a leg comes to, with another worker tried where that is right."""
    if not cell.meets(phase):
        return FINE
    has_mode = phase == "decode" and cell.setup.format != "openai"
    effect = cell.row.effect(phase, streamed=cell.streams(phase), has_mode=has_mode)
    # An encode leg leaves nothing that a second one could harm, so any failure is tried elsewhere.
    anywhere = phase == "encode" and effect.kind == "failed" and not cell.row.looks_right
    if effect.kind != "again" and not anywhere:
        return effect
    if not cell.lasting and (cell.row.kept or (cell.setup.workers > 1 and phase != "render")):
        return FINE
    return Effect("failed", effect.status)


def _probed(cell: Cell) -> Expected | None:
    """Return the outcome if the probe decides it: a hit, or a refusal. Any other failure of it changes nothing."""
    if not cell.hits and not (cell.meets("probe") and cell.row.early):
        return None  # a miss
    effect = _effect(cell, "probe")
    return None if effect.kind == "failed" else _ended(effect, "conditional-decode")


def _goes_on_alone(cell: Cell, effect: Effect) -> bool:
    if effect.kind == "nothing":
        return cell.setup.on_missing_handover == "decode_alone"
    return effect.kind != "rejected" and cell.setup.on_prefill_failure == "decode_alone"


def _ended(effect: Effect, by: str) -> Expected:
    if effect is FINE:
        return ANSWER
    if effect.kind in ("broken", "told"):
        return Expected("broken", effect.status, "stream_broken", by)
    word = "rejected" if effect.kind == "rejected" else _WORDS[effect.status]
    return Expected("error", effect.status, word, by)

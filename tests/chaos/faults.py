"""What can go wrong with one leg, and what that leg then comes to: the first half of the oracle.

Every field of ``coordinator.sim.faults.Fault`` is here, and a worker that is not there at all. The effects are what a
coordinator must make of it, told in the words of the rules and without a look at its code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from coordinator.sim import ABSENT, Canned, Fault
from coordinator.sim.faults import aborted, echo, encodings, half_handover, handover, uncached

REFUSED = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}
SECRET = "Traceback (most recent call last): host 10.1.2.3"


@dataclass(frozen=True, slots=True)
class Effect:
    """What one leg comes to.

    Attributes:
        kind: ``fine``; ``rejected`` (the worker's 4xx, final); ``failed`` (final); ``again`` (another worker may do
            better); ``nothing`` (prefill answered and left nothing for decode); ``broken`` (a stream that has begun
            and breaks off); ``told`` (the worker's own error event in a stream that has begun).
        status: what the client is told, in the status line or in the error event.
    """

    kind: str
    status: int = 200


FINE = Effect("fine")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to go wrong.

    Attributes:
        fault: None stands for a worker that refuses connections.
        whole: what it does to a leg that is answered whole.
        stream: what it does to a streamed one.
        prefill: what it does to prefill, where that is not ``whole``.
        echoed: it does this only to a leg that asked for an output mode, and nothing to others.
        hangs: only a limit, or the client's leaving, ends the leg.
        kept: it meets a connection that was kept from an earlier leg, so that the worker is asked once more.
        phases: where it makes sense.
    """

    fault: Fault | None
    whole: Effect = FINE
    stream: Effect = FINE
    prefill: Effect | None = None
    echoed: bool = False
    hangs: bool = False
    kept: bool = False
    phases: tuple[str, ...] = ("render", "encode", "prefill", "decode", "probe")

    @property
    def early(self) -> bool:
        """Say whether it happens before the worker looks at the request."""
        fault = self.fault
        return fault is None or fault.hang or fault.drop or fault.canned is not None

    @property
    def unseen(self) -> bool:
        """Say whether the worker never fetches the hand-over that it is given."""
        return self.early or (self.fault is not None and self.fault.only_done)

    @property
    def at_once(self) -> bool:
        """Say whether a stream comes to nothing before its first event; chat's comes before the engine is asked."""
        fault = self.fault or Fault()
        return 0 in (fault.hang_after, fault.die_after, fault.end_after, fault.half_event_after, fault.error_after)

    @property
    def claims(self) -> bool:
        """Say whether the answer is one that a worker gives when it has tried to fetch the hand-over."""
        fault = self.fault or Fault()
        return fault.error_after == 0 or (fault.canned is not None and fault.canned.status in (200, 500))

    @property
    def refuses(self) -> bool:
        return self.fault is not None and self.fault.canned is not None and self.fault.canned.status == 400

    @property
    def looks_right(self) -> bool:
        """Say whether the answer is a good one, but for what it says."""
        return self.fault is not None and self.fault.rewrite is not None

    @property
    def ends_a_release(self) -> bool:
        """Say whether a leg that frees a hand-over and meets it is not made again: it was refused, or is late."""
        return self.whole.kind == "rejected" or (self.fault is not None and self.fault.hang)

    @property
    def dawdles(self) -> bool:
        """Say whether the worker's answer begins a while before it looks at the hand-over, if it ever does."""
        fault = self.fault or Fault()
        return self.unseen or fault.first_event_s > 0 or fault.slice_bytes is not None

    def effect(self, phase: str, *, streamed: bool, has_mode: bool) -> Effect:
        if phase == "prefill" and self.prefill is not None:
            return self.prefill
        if self.echoed and not has_mode:
            return FINE
        return self.stream if streamed else self.whole


def _canned(status: int, body: str, effect: Effect, **more: str) -> Row:
    headers = (("Retry-After", "2"),) if status in (429, 503) else ()
    canned = Canned(status, body, headers, **more)
    return Row(Fault(canned=canned), effect, effect)


def _failed(status: int = 502) -> Effect:
    return Effect("failed", status)


def _again(status: int = 502) -> Effect:
    return Effect("again", status)


_NOTHING = Effect("nothing", 502)
_BROKEN = Effect("broken", 502)

ROWS: dict[str, Row] = {
    "refuses connections": Row(None, _again(503), _again(503)),
    # Nothing that matters.
    "slow head": Row(Fault(first_byte_s=0.02)),
    "slow first event": Row(Fault(first_event_s=0.02)),
    "slow tokens": Row(Fault(itl_s=0.002)),
    "comments": Row(Fault(comments=True)),
    "slices of 7 bytes": Row(Fault(slice_bytes=7)),
    "text/plain": Row(Fault(content_type="text/plain")),
    "gzip": Row(Fault(gzip=True)),
    # Silence.
    "hangs": Row(Fault(hang=True), _failed(504), _failed(504), hangs=True),
    "hangs before events": Row(Fault(hang_after=0), stream=_failed(504), hangs=True),
    "hangs after 3": Row(Fault(hang_after=3), stream=Effect("broken", 504), hangs=True),
    # Connections that break.
    "drops": Row(Fault(drop=True), _again(), _again()),
    "drops a kept connection": Row(Fault(drop=True), _again(), _again(), kept=True),
    "dies before events": Row(Fault(die_after=0), stream=_again()),
    "dies after 3": Row(Fault(die_after=3), stream=_BROKEN),
    "half an event first": Row(Fault(half_event_after=0), stream=_again()),
    "half an event after 3": Row(Fault(half_event_after=3), stream=_BROKEN),
    "cut in half": Row(Fault(truncate="cut"), _again()),
    # Answers that end early and properly.
    "ends before events": Row(Fault(end_after=0), stream=_failed()),
    "ends after 3": Row(Fault(end_after=3), stream=_BROKEN),
    "only the end mark": Row(Fault(only_done=True), stream=_failed()),
    "half, clean": Row(Fault(truncate="clean"), _failed()),
    # Statuses.
    "400": _canned(400, json.dumps(REFUSED), Effect("rejected", 400)),
    "429 HTML": _canned(429, "<html>", Effect("rejected", 429), content_type="text/html"),
    "500": _canned(500, SECRET, _failed()),
    "502 HTML": _canned(502, f"<html>{SECRET}", _again(), content_type="text/html"),
    "503": _canned(503, SECRET, _again(503)),
    "504": _canned(504, SECRET, _again(504)),
    # A 200 that is none.
    "200 null": _canned(200, "null", _failed()),
    "200 HTML": _canned(200, f"<html>{SECRET}", _failed(), content_type="text/html"),
    "200 empty": _canned(200, "", _failed()),
    "a stream called JSON": Row(Fault(content_type="application/json"), stream=_failed()),
    "error before events": Row(Fault(error_after=0), stream=_failed()),
    "error after 3": Row(Fault(error_after=3), stream=Effect("told", 500)),
    # Answers that say something else.
    "no echo of the mode": Row(Fault(rewrite=echo(ABSENT)), _failed(), _failed(), echoed=True, prefill=FINE),
    "another mode": Row(Fault(rewrite=echo("tokens")), _failed(), _failed(), echoed=True, prefill=FINE),
    "no hand-over": Row(Fault(rewrite=handover(None)), prefill=_NOTHING),
    "an empty hand-over": Row(Fault(rewrite=handover({})), prefill=_NOTHING),
    "half a hand-over": Row(Fault(rewrite=half_handover), prefill=_NOTHING, phases=("prefill",)),
    "aborted": Row(Fault(rewrite=aborted), prefill=_NOTHING, phases=("prefill",)),
    "no encodings": Row(Fault(rewrite=encodings(None)), _failed(), phases=("encode",)),
    "encodings nowhere": Row(Fault(rewrite=uncached), _failed(), phases=("encode",)),
}

# Prefill has kept its blocks before its answer was spoiled, and nobody can know what to fetch.
LOSES_THE_HANDOVER = frozenset(
    ("cut in half", "half, clean", "no hand-over", "an empty hand-over", "half a hand-over", "aborted")
)

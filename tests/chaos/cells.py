"""The matrix: a cell is one request, what goes wrong with it, what its client does, and how the pipeline is set up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.chaos.faults import ROWS, Row

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

APIS = ("chat", "completions", "responses", "messages")
FORMATS = ("openai", "text", "derender", "unwrapped")
PHASES = ("render", "prefill", "decode", "probe")
WITH_MEDIA = ("chat", "responses", "messages")
CLIENTS = ("stays", "reads slowly", "leaves at render", "leaves at probe", "leaves at prefill", "leaves after prefill",
           "leaves at decode", "leaves in the stream")  # fmt: skip
POLICIES = ("fail", "decode_alone")
ENCODE_POLICIES = ("fail", "prefill_encodes")


@dataclass(frozen=True, slots=True, order=True)
class Setup:
    """A fleet and a coordinator.

    Attributes:
        format: one of the flow tests' shapes.
        probes: a conditional-decode step comes first; it hits if the fault is to meet it, and misses otherwise.
        workers: of prefill, and of decode; of encode too, if there are any.
        limited: the phases whose legs have a limit, so that silence ends; everywhere else nobody is hurried.
        encodes: requests hold pictures, and there is an encode step.
    """

    format: str
    probes: bool
    workers: int
    on_missing_handover: str
    on_prefill_failure: str
    limited: tuple[str, ...] = ()
    encodes: bool = False
    on_encode_failure: str = "fail"


@dataclass(frozen=True, slots=True)
class Cell:
    """
    Attributes:
        phase: the leg that the fault meets.
        lasting: the fault meets every leg of that role, on every worker; otherwise one leg, on whichever worker.
    """

    setup: Setup
    fault: str
    phase: str
    lasting: bool
    stream: bool
    client: str
    api: str = "chat"

    @property
    def row(self) -> Row:
        return ROWS[self.fault]

    @property
    def leaves(self) -> bool:
        return self.client.startswith("leaves")

    @property
    def hits(self) -> bool:
        """Say whether the probe finds the prompt cached."""
        return self.setup.probes and self.phase == "probe"

    def meets(self, phase: str) -> bool:
        """Say whether the fault meets a leg, if that leg is made."""
        if self.phase == phase:
            return True
        return self.lasting and {self.phase, phase} == {"probe", "decode"}  # one worker does both

    def streams(self, phase: str) -> bool:
        """Say whether a leg is asked for a stream."""
        if phase == "decode":  # completions have nothing to parse, so their leg is never derender
            return self.stream and (self.setup.format != "derender" or self.api == "completions")
        return self.stream and phase == "probe"

    def __str__(self) -> str:
        setup = self.setup
        form = "stream" if self.stream else "whole"
        times = "always" if self.lasting else "once"
        return (
            f"{self.fault!r} at {self.phase} {times}, {self.api} {setup.format} {form}, client {self.client}, "
            f"{setup.workers} workers{', probes' if setup.probes else ''}, "
            f"missing={setup.on_missing_handover} failure={setup.on_prefill_failure}"
            f"{f' encode={setup.on_encode_failure}' if setup.encodes else ''}"
        )


def every_cell() -> Iterator[Cell]:
    """Yield the whole matrix for chat, without what makes no sense or no difference."""
    settings = itertools.product(FORMATS, (False, True), (1, 2), POLICIES, POLICIES)
    for format, probes, workers, missing, failure in settings:
        setup = Setup(format, probes, workers, missing, failure)
        what = itertools.product(ROWS, PHASES, (False, True), (False, True), CLIENTS)
        for fault, phase, lasting, stream, client in what:
            cell = Cell(setup, fault, phase, lasting, stream, client)
            if _makes_sense(cell):
                yield _limited(cell)
    yield from _encode_cells()


def _encode_cells() -> Iterator[Cell]:
    """Yield what can go wrong while pictures are encoded; nothing has been computed for the request by then."""
    for format, workers, policy in itertools.product(FORMATS, (1, 2), ENCODE_POLICIES):
        setup = Setup(format, False, workers, "fail", "fail", encodes=True, on_encode_failure=policy)
        for fault, lasting, stream, client in itertools.product(
            ROWS, (False, True), (False, True), ("stays", "leaves at encode")
        ):
            cell = Cell(setup, fault, "encode", lasting, stream, client)
            if _makes_sense(cell):
                yield _limited(cell)


def sample(count: int, rng: random.Random) -> list[Cell]:
    """Return some cells, of every API, and every fault in every phase among them as evenly as can be."""
    by_kind: dict[tuple[str, str, bool], list[Cell]] = {}
    for cell in every_cell():
        by_kind.setdefault((cell.fault, cell.phase, cell.leaves), []).append(cell)
    for cells in by_kind.values():
        rng.shuffle(cells)
    rounds = itertools.zip_longest(*by_kind.values())
    cells = itertools.islice((cell for one in rounds for cell in one if cell is not None), count)
    return [replace(cell, api=rng.choice(WITH_MEDIA if cell.setup.encodes else APIS)) for cell in cells]


def by_setup(cells: Sequence[Cell]) -> Iterator[tuple[Setup, list[Cell]]]:
    found: dict[Setup, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.setup, []).append(cell)
    yield from sorted(found.items())


def _makes_sense(cell: Cell) -> bool:
    setup = cell.setup
    if cell.phase not in cell.row.phases:
        return False
    if setup.format == "openai" and "render" in (cell.phase, cell.client.removeprefix("leaves at ")):
        return False
    if not setup.probes and "probe" in (cell.phase, cell.client.removeprefix("leaves at ")):
        return False
    if cell.client == "leaves in the stream" and not cell.stream:
        return False
    if cell.row.fault is None and not cell.lasting and (setup.workers == 1 or cell.phase == "render"):
        return False  # the only worker that is gone is gone for all
    if cell.fault == "drops" and setup.probes and cell.phase == "decode":
        return False  # the probe keeps its connection: that is another row
    return _makes_a_difference(cell)


def _makes_a_difference(cell: Cell) -> bool:
    """Leave out settings that the cell's fault does not touch."""
    setup = cell.setup
    if cell.phase != "prefill" and (setup.on_missing_handover, setup.on_prefill_failure) != ("fail", "fail"):
        return False
    nothing = cell.row.prefill is not None and cell.row.prefill.kind == "nothing"
    return setup.on_missing_handover == "fail" or nothing


def _limited(cell: Cell) -> Cell:
    """Give a leg that hangs a limit, unless it is the client who ends it."""
    if not cell.row.hangs or cell.leaves:
        return cell
    phases = ("decode", "probe") if cell.phase in ("decode", "probe") else (cell.phase,)
    return replace(cell, setup=replace(cell.setup, limited=phases))

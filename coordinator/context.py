"""What one request knows: its input, which nobody changes, then one typed slot per leg's result.

====================  ======================  ==========================================
slot                  set by                  read by
====================  ======================  ==========================================
``body``              server; another in its  every step, respond
                      place by
                      replace-media-urls, and
                      less of it by pipeline
``rendered``          render; less of it by   encode, prefill, decode, derender, routing, respond
                      pipeline
``ec_params``         encode                  prefill, decode (where there was no prefill)
``prefilled``         prefill                 decode
``handover``          prefill                 decode, pipeline (to begin again), release
``handover_at``       prefill                 decode
``handover_fetched``  upstream                release, prefill-decode
``abandoned``         pipeline                release
``heard``             upstream                pipeline (what a step's answers say for later legs)
``carried``           pipeline, routing       upstream (headers of later legs)
``on_late_handover``  server                prefill and upstream, when it is known only after the client has left
``prefill_at``        upstream                upstream (who cannot decode: none fetches from itself)
``failed``            upstream                upstream (workers to avoid when a leg is made again)
``prompt_tokens``     routing                 routing (what a leg weighs)
``chains``            routing                 routing (what the prompt begins with)
``places``            server                  pipeline, prefill-decode (give prefill's back early),
                                              Server-Timing
``trace``             server                  upstream (a span for each call of a worker)
``generated``         decode (of a service's  derender
                      derender alone)
``answer``            conditional-decode,     pipeline, respond
                      decode, derender
``attempts``          upstream                pipeline
``legs``              pipeline                the access log, the metrics, Server-Timing
====================  ======================  ==========================================

prefill-decode is a prefill and a decode here. It also sets ``handover`` itself, before either leg is out, where decode
is to fetch what prefill will leave; and puts into ``abandoned`` what a prefill left that was no longer waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from envelope.prompt import without_prompt, without_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from envelope.errors import ApiError
    from envelope.formats import Format
    from envelope.json_codec import Json

Headers = tuple[tuple[str, str], ...]


class LiveStream(Protocol):
    """A worker's event stream that has begun: its first event has been read, and is not an error.

    ``push`` gives the bytes as they come, the first event's included, cut anywhere. ``aclose`` may be called at any
    time and more than once; before the end it closes the connection, which stops the worker.
    """

    @property
    def headers(self) -> Headers:
        """The worker's end-to-end response headers."""

    @property
    def first_event(self) -> bytes:
        """The data of the first event, without ``data:`` and line ends."""

    def ended(self, error: ApiError | None) -> None:
        """Say how the answer ended, once all of it has been read; None is well. Not said of clients that leave."""

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        """Give the bytes to ``take`` as they come; True at the end.

        False as soon as ``take`` returns False: reading has stopped, and the next call goes on.

        Raises:
            LegFailed, LegTimeout: the answer broke off, or nothing came in time; and whatever ``take`` raises.
        """

    async def aclose(self) -> None: ...


class Places(Protocol):
    """What a request was let in with; its owner is the server."""

    @property
    def waited_s(self) -> float:
        """How long it waited for that."""

    def free(self, role: str) -> None:
        """Give back the place at a role whose leg is over."""


@dataclass(slots=True)
class Answer:
    """What the last leg produced, before it is shaped for the client.

    Attributes:
        source: the whole body, or a live event stream.
        format: the wire format that ``source`` is in.
        wrap: rebuild the client's own envelope from ``source`` (which is then in generate format).
        parsed: a live ``source`` has a ``delta`` on each choice, with reasoning and tool calls told apart, and no text.
        headers: of the worker's answer, to be passed on: end-to-end ones only.
        body: ``source`` parsed, when it is whole.
        expose_transfer_params: leave the hand-over in what the client gets; it tells of hosts and ports.
    """

    source: bytes | LiveStream
    format: Format
    wrap: bool = False
    parsed: bool = False
    headers: Headers = ()
    body: Any = None
    expose_transfer_params: bool = False

    async def aclose(self) -> None:
        if not isinstance(self.source, bytes):
            await self.source.aclose()


@dataclass(slots=True)
class Attempt:
    """One call of one worker; a leg that is tried again, or made for every image, has several.

    Attributes:
        step: the leg's, as in errors.
        worker: host and port.
        number: 0 for the first of a leg, one more for each worker that was tried before.
        begun: monotonic seconds.
        seconds: to the end of a whole answer, or to the first event of a stream.
        outcome: ``ok``, an error's class name, or ``cancelled``.
    """

    step: str
    role: str
    worker: str
    number: int
    begun: float
    seconds: float = 0.0
    outcome: str = "cancelled"


@dataclass(slots=True)
class LegTime:
    """How long one step took and how it ended: ``ok``, ``skipped``, ``miss``, or an error's class name.

    Attributes:
        attempts: the calls that it made, in the order in which they began.
        begun: monotonic seconds.
    """

    step: str
    seconds: float
    outcome: str
    attempts: Sequence[Attempt] = ()
    begun: float = field(default=0.0, compare=False)


def _nobody_left(ctx: RequestContext) -> None:
    """Stand for the server where there is none to release what comes late."""


@dataclass(slots=True)
class RequestContext:
    """One request. The first block is its input: nothing in it is ever changed.

    ``body`` alone may be replaced, as a whole and by replace-media-urls, before any other step has run: whoever
    reads it then sees media in the place of URLs, and no second body could be sent by mistake. When the answer streams,
    only what it is rebuilt from stays of it.

    Attributes:
        request_id: the client's id, on the response and in logs.
        leg_id: the id that workers know this request by; unique even when clients repeat theirs.
        api: the client's API.
        body: the parsed body, without the transfer params that a client may have put there.
        headers: the client's end-to-end headers, to be sent on every leg.
        routing: the headers that name workers (sidecar mode), taken off the request; lower-case names.
        stream: whether the client asked for a stream.
    """

    request_id: str
    leg_id: str
    api: Format
    body: Json
    headers: Headers
    routing: Mapping[str, str]
    stream: bool

    rendered: Json | None = None
    ec_params: Mapping[str, Any] | None = None
    prefilled: bool = False
    prefill_at: str = ""
    handover: Mapping[str, Any] | None = None
    handover_at: float = 0.0
    handover_fetched: bool = False
    abandoned: list[Mapping[str, Any]] = field(default_factory=list)
    on_late_handover: Callable[[RequestContext], None] = _nobody_left
    failed: list[Any] = field(default_factory=list)
    prompt_tokens: int | None = None
    chains: dict[Any, Any] = field(default_factory=dict)
    places: Places | None = None
    heard: dict[str, list[str]] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    trace: Any = None
    generated: Answer | None = None
    answer: Answer | None = None
    attempts: list[Attempt] = field(default_factory=list)
    legs: list[LegTime] = field(default_factory=list)

    def carry(self) -> None:
        """Let later legs carry what this step's answers said: of each header what most said, or the first of them."""
        self.carried |= {name: max(values, key=values.count) for name, values in self.heard.items()}
        self.heard.clear()

    def begin_again(self, leg_id: str) -> None:
        """Forget what a failed attempt left: the next one starts at prefill, under an id of its own."""
        self.leg_id = leg_id
        self.abandoned = self.unfetched()
        self.handover, self.handover_fetched, self.prefilled = None, False, False

    def forget_prompt(self) -> None:
        """Let go of what legs are made of, once the answer streams: that may last, and no leg is made any more."""
        self.body, self.handover = without_prompt(self.body), None
        self.chains.clear()
        if self.rendered is not None:
            self.rendered = without_tokens(self.rendered)

    def unfetched(self) -> list[Mapping[str, Any]]:
        """Return the hand-overs that no decode worker is known to have read."""
        current = [] if self.handover is None or self.handover_fetched else [self.handover]
        return [*self.abandoned, *current]

    async def aclose(self) -> None:
        """Give up whatever is still open on a worker."""
        for held in (self.answer, self.generated):
            if held is not None:
                await held.aclose()

"""The protocols that ``steps`` is written against: a step, and the upstream it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from envelope.formats import PATHS, Format
from envelope.generate import DERENDER, TEXT
from envelope.json_codec import loads_lenient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator.context import Headers, LiveStream, RequestContext
    from envelope.connectors import KvConnector
    from envelope.ec_transfer import EcConnector
    from envelope.json_codec import Json
    from envelope.media_types import Kind


_GENERATE = PATHS[Format.GENERATE]


@dataclass(frozen=True, slots=True)
class LegLimits:
    """Time limits of one leg in seconds; None is no limit.

    Attributes:
        connect_s: until a connection stands.
        first_byte_s: from the request's last byte to the answer's first event or, for a whole answer, its head.
        idle_s: between two reads of the answer.
        request_s: the whole leg, all its attempts together.
        attempts: how many workers are tried before the leg has failed.
    """

    connect_s: float | None = 5.0
    first_byte_s: float | None = None
    idle_s: float | None = None
    request_s: float | None = None
    attempts: int = 2


class Peer(Protocol):
    """A worker that a step may name in a leg to another; ``url`` is its base URL."""

    @property
    def url(self) -> str: ...


@dataclass(slots=True, eq=False)  # frozen, each field would cost a call, and every leg pays
class Leg:
    """One upstream call; never changed once it is made.

    Attributes:
        step: the step's type; names the leg in errors, logs and metrics.
        role: whose worker is asked: ``render``, ``prefill``, ``decode``, ``encode``.
        api: which API the path belongs to.
        headers: what this leg adds to the client's own headers.
        single_use: the body holds a hand-over that only one worker may be given.
        detached: nobody waits for its answer; over a kept connection that had died it is sent once more, as there is no
            client whose request could begin again.
        id_suffix: what tells this leg's id from those of others that the request makes at the same time.
        late: given the answer when it comes a moment after the client has left, since it may name what a worker keeps.
        idempotent: it leaves nothing that a repetition could harm, so another worker is tried after any failure.
        to: the worker that it goes to, chosen before; None where any will do.
        tied: another leg in flight waits for it, or it for that one, so it is never sent again by itself.
        one_id: workers know it by the request's own id, however often it is sent.
        runs_on_s: how long it is left to run when nobody waits for it any more, since a worker waits for its end.
        read: parses a whole answer, or raises JSONDecodeError.
    """

    step: str
    role: str
    path: str
    body: Json
    limits: LegLimits = LegLimits()
    headers: Headers = ()
    single_use: bool = False
    detached: bool = False
    id_suffix: str = ""
    idempotent: bool = False
    late: Callable[[Reply], None] | None = None
    to: Peer | None = None
    tied: bool = False
    one_id: bool = False
    runs_on_s: float = 0.0
    method: str = "POST"
    read: Callable[[bytes], Any] = loads_lenient

    def begun(self) -> Leg:
        """Return what is still asked of a leg whose answer streams: that may last, and the body may be long."""
        return Leg(
            self.step,
            self.role,
            self.path,
            {"stream": True},
            self.limits,
            single_use=self.single_use,
            detached=self.detached,
            tied=self.tied,
        )

    @property
    def needs(self) -> str:
        """What its worker must serve: the output mode where it is to make text of tokens, else the route."""
        mode = self.body.get("output_mode") if self.path == _GENERATE else None
        return mode if mode in (TEXT, DERENDER) else self.path


@dataclass(slots=True, eq=False)  # not frozen, as Leg
class Reply:
    """A worker's whole answer with a 2xx status (or one that the leg said it accepts); never changed.

    Attributes:
        find_headers: returns those of its headers that go on to the client; few legs ask.
    """

    status: int
    raw: bytes
    body: Any
    find_headers: Callable[[], Headers] = tuple

    @property
    def headers(self) -> Headers:
        return self.find_headers()


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a fetch of media may cost, and where it may go.

    Attributes:
        timeout_s: from the look-up of the name to the last byte, redirects included; None is no limit.
        max_bytes: largest media.
        allow_private: addresses in the private networks of RFC 1918 may be connected to.
        allowed_hosts: lower-case names and addresses, the only hosts that may be asked; empty is any.
        trust_env_proxy: go through the proxies that the environment names. They look names up, so it is their
            rules that decide which addresses are reached.
    """

    timeout_s: float | None
    max_bytes: int
    allow_private: bool = False
    allowed_hosts: frozenset[str] = frozenset()
    trust_env_proxy: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """Media that was fetched; ``media_type`` is what its bytes begin like, and of the kind that was asked for."""

    media_type: str
    data: bytes


class FetchFailed(Exception):
    """A URL has no media that may be used. The text says why, for the client: no address, nothing of an answer."""


class MediaFetcher(Protocol):
    """The way to where clients say that media is."""

    async def fetch(self, url: str, kind: Kind, limits: FetchLimits) -> Fetched:
        """Fetch what an http(s) URL names; cancelling closes the connection.

        Raises:
            FetchFailed
        """


class Bootstrap(Protocol):
    """The servers beside prefill workers that tell of the engines behind them; answers are kept for a while."""

    async def engines(self, ctx: RequestContext, address: str) -> Mapping[int, str]:
        """Return the engine's id by data-parallel rank, at least one.

        Raises:
            LegFailed, LegTimeout, NoWorker.
        """

    def forget(self, address: str) -> None:
        """Ask again the next time: what was told may be no longer so."""


class Parsing(Protocol):
    """One request's stream, being parsed: its parsers stand as long as this does."""

    def attach(self, live: LiveStream) -> LiveStream:
        """Return a worker's stream, parsed: with a ``delta`` on each choice in the place of text.

        Closing it lets the parsers go, and closes the worker's stream.
        """

    def close(self) -> None:
        """Let the parsers go."""


class Parsers(Protocol):
    """The way to parsers that run here, for ``derender: coordinator``. Jobs are those of ``envelope.parse_job``."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer, by the model's tokenizer."""

    def open(self, job: Json) -> Parsing:
        """Make a request's parsers, one for each choice.

        Raises:
            NoWorker
        """

    async def whole(self, job: Json, reply: Json) -> Json:
        """Return a whole generate answer with a ``message`` on each choice.

        Raises:
            NoWorker, LegFailed; BadRequest where the request asks for what cannot be parsed.
        """


class Upstream(Protocol):
    """The way to the workers, to media and to parsers. Every failure of a worker is one of ``envelope.errors``."""

    @property
    def media(self) -> MediaFetcher:
        """The way to where clients say that media is."""

    @property
    def parsers(self) -> Parsers | None:
        """The way to parsers, where the configuration has any."""

    @property
    def bootstrap(self) -> Bootstrap:
        """The way to bootstrap servers."""

    def choose(self, ctx: RequestContext, role: str, needs: str = "") -> Peer:
        """Return the worker that a leg is to go to, for those who must know it before they send one.

        Args:
            needs: as the leg's own.

        Raises:
            NoWorker, and what ``serves`` raises.
        """

    def serves(self, ctx: RequestContext, role: str) -> bool:
        """Say whether this request has a worker of that role.

        False only where the client's side names the worker by a header and named none: the role is left out.

        Raises:
            Forbidden: the named worker is outside the allow-list.
            BadRequest: the name is no name, or there is none and the role cannot be left out.
        """

    def uncached_tokens(self, ctx: RequestContext, role: str, most: int) -> int | None:
        """Return how many of the prompt's tokens the role's worker was not sent before; None where nobody can say.

        Args:
            most: from so many on they need not be counted.
        """

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Reply:
        """Send a leg and read its whole JSON answer.

        Args:
            accept: statuses beside 2xx that the step wants to see itself.

        Raises:
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """

    async def stream(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> LiveStream | Reply:
        """Send a leg and return once the first event of its answer has been read.

        An answer that is no event stream (a refusal that ``accept`` names) comes back as a Reply.

        Raises:
            LegRejected, LegFailed, LegTimeout, NoWorker; also when the first event is an error.
        """


class Events(Protocol):
    """Counters that a step may raise; ``metrics`` implements it."""

    def handover_missing(self, reason: str, policy: str) -> None: ...

    def handover_sent(self, age_s: float) -> None: ...

    def encode_skipped(self, reason: str) -> None: ...

    def encoding_missing(self, reason: str, policy: str) -> None: ...

    def prefill_skipped(self, reason: str) -> None: ...

    def prefill_failed_over(self, reason: str) -> None: ...

    def begun_again(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What a step inherits from the ``pipeline`` section of the file.

    Attributes:
        tokens_in: some leg sends rendered prompts, so what render makes of media is sent to workers.
        bootstrap_port: the port of what tells decode of a prefill worker, by the worker's URL.
    """

    kv: KvConnector
    ec: EcConnector
    use_openai_format: bool
    tokens_in: bool
    on_missing_handover: str
    on_prefill_failure: str
    on_encode_failure: str
    max_handover_age_s: float | None
    expose_transfer_params: bool
    events: Events
    clock: Callable[[], float]
    bootstrap_port: Callable[[str], int]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of ``coordinator check``: what a step does with one client API."""

    api: Format
    step: str
    role: str | None
    format: Format | None
    path: str | None
    notes: tuple[str, ...] = field(default=())
    also: tuple[str, ...] = ()  # roles whose workers get a leg on the same path at the same time


class Step(Protocol):
    """One leg of the pipeline. ``run`` fills the step's own slots on the context, or raises an ApiError."""

    type: ClassVar[str]

    @property
    def role(self) -> str | None:
        """Whose workers the step asks; None where it makes no leg. A class variable will do."""

    def admit(self, ctx: RequestContext) -> None:
        """Refuse what this step could not do; asked of every step before the first leg is made.

        A refusal that came later would leave a prefill worker holding blocks for a decode that never comes.

        Raises:
            ApiError: usually BadRequest, naming the field.
        """

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        """Do the leg; return how it went, a short word for logs and metrics (``ok``, ``skipped``, ``miss``)."""

    def plan(self, api: Format) -> PlanRow:
        """Say, without a request, what this step does for that API."""

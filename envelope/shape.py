"""What every stream shape can do: turn a worker's bytes into the client's, without I/O.

A shape is fed what comes from the worker, cut anywhere, and gives back what the client is to be sent. It says
when the stream is over and whether it was whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from envelope.json_codec import Json


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for, as far as the envelope of its answer depends on it.

    Attributes:
        body: the client's own request body.
        rendered: the generate request that render made of it, or None when nothing was rendered.
        leg_id: the id that the worker was given; the answer's id is made of it.
        created: seconds since the epoch, for the ``created`` field of streams (generate's chunks have none).
    """

    body: Json
    rendered: Json | None
    leg_id: str
    created: int


class Shape(Protocol):
    """A stream on its way to the client.

    Attributes:
        usage: the last usage object seen, for logs and metrics; None while there is none.
        content_seen: a frame with generated content has been given back (a role frame does not count), since whoever
            reads this last set it to False.
        error: the message of an error event that the worker sent mid-stream; the stream then is a failure.
    """

    usage: Json | None
    content_seen: bool
    error: str | None

    def feed(self, data: bytes) -> bytes:
        """Take the worker's next bytes, give back what can be sent now: whole events only, maybe none.

        Raises:
            LegFailed: an event is larger than the cap, or cannot be understood.
        """

    def close(self) -> None:
        """Say that the worker's body has ended.

        Raises:
            LegFailed: the stream was cut: the end mark, or a choice's finish, never came.
        """

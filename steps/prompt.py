"""The tokens that a worker on an OpenAI route may be given in place of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope.client_request import has_media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext


def prompt_ids(ctx: RequestContext) -> Sequence[int] | None:
    """Return render's token ids, or None where the worker must see the request itself.

    Beside media the ids would drop it, and with ``echo`` the worker needs the prompt's text.
    """
    if ctx.rendered is None or has_media(ctx.body) or ctx.body.get("echo"):
        return None
    found: Sequence[int] = ctx.rendered["token_ids"]
    return found

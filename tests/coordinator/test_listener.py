"""What the listener makes of what comes out of a route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from coordinator.listener import REFUSED, json_errors
from envelope.errors import BadRequest, ClientGone

if TYPE_CHECKING:
    from envelope.errors import ApiError


@pytest.mark.parametrize(("raised", "told"), [(BadRequest("no"), ["no"]), (ClientGone("left"), [])])
async def test_a_client_that_left_while_it_was_refused_is_not_counted_twice(
    aiohttp_client: Any, raised: ApiError, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def route(request: web.Request) -> web.StreamResponse:
        if isinstance(raised, ClientGone):
            assert request.transport is not None
            request.transport.close()
        raise raised

    app, heard = web.Application(middlewares=[json_errors]), list[str]()
    app[REFUSED] = lambda _id, error: heard.append(error.message)
    app.router.add_get("/", route)
    client = await aiohttp_client(app)
    try:
        assert (await client.get("/")).status == 400
    except aiohttp.ServerDisconnectedError:
        assert isinstance(raised, ClientGone)
    assert heard == told and not caplog.records

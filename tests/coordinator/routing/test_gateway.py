"""One gateway for every role: the endpoint picker behind it reads the role off a header."""

from __future__ import annotations

import pytest

from coordinator.context import RequestContext
from coordinator.routing.gateway import GatewayRouter
from envelope.formats import Format

CTX = RequestContext("req", "req-1", Format.CHAT, {}, (), {}, False)


@pytest.mark.parametrize("role", ["prefill", "decode", "encode"])
def test_every_leg_goes_to_the_gateway_with_its_role(role: str) -> None:
    router = GatewayRouter("http://gateway:80", (("Authorization", "Bearer k"), ("EPP-Profile", role)))
    worker = router.pick(CTX)
    assert (worker.url, worker.headers) == ("http://gateway:80", (("Authorization", "Bearer k"), ("EPP-Profile", role)))
    assert router.known() == (worker,)
    assert router.serves(CTX)


def test_a_second_try_goes_there_again_as_the_picker_chooses_anew() -> None:
    router = GatewayRouter("http://gateway:80", (("EPP-Profile", "decode"),))
    assert router.pick(CTX, [router.pick(CTX)]) is router.pick(CTX)

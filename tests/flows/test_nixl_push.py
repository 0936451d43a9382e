"""NIXL in push mode: prefill writes to the decode that bears its request's id."""

import pytest

from coordinator.sim import Canned, Fault, Settings
from tests.flows.pairs import HELLO
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, question


@pytest.fixture
async def pushing(fleet_of):
    return await fleet_of(settings=Settings(kv="nixl-push"), prefills=2, decodes=2)


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_both_legs_bear_one_id(pushing, coordinator, legs, shape, path):
    """On every route, which is part of the id; the store would tell of another."""
    at = await coordinator(pushing, shape)
    got = await at.post(path, question(path, "Say hello."))
    assert (got.status, len(pushing.store.read)) == (200, 1)


async def test_a_prefill_that_is_sent_again_keeps_its_id(pushing, coordinator, legs):
    at = await coordinator(pushing)
    pushing.prefills[0].behave.next(Fault(path=CHAT, canned=Canned(503)))
    got = await at.chat()
    assert (got.status, got.text, len(pushing.store.read)) == (200, HELLO, 1)
    ids = {leg.header("x-request-id") for worker in (*pushing.prefills, *pushing.decodes) for leg in legs(worker)}
    assert len(ids) == 1


async def test_what_no_decode_took_is_fetched_under_that_id(pushing, coordinator, eventually):
    at = await coordinator(pushing, "text")
    refused = b'{"error": {"message": "no", "code": 400}}'
    pushing.decodes[0].behave.next(Fault(path="generate", canned=Canned(400, refused)))
    assert (await at.chat()).status == 400
    await eventually(lambda: pushing.store.read)

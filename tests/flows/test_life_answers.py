"""A request that nothing goes wrong with, through each shape of deployment."""

import pytest


@pytest.mark.parametrize("shape", ["openai", "text", "derender", "alone"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_client_gets_its_answer_in_every_shape(coordinator, fleet, shape, stream):
    """Whole or streamed, the client reads the model's words, and every hand-over that was made is fetched."""
    at = await coordinator(fleet, shape)
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text) == (200, True, "Hello! How can I help you today?")
    assert len(fleet.store.read) == (shape != "alone")

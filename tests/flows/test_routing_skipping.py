"""Prefill is left out where decode has most of a prompt already, or where one token is all that is asked for."""

import pytest

from coordinator.sim import Canned, Fault

FAILS = Fault(path="/inference/v1/generate", canned=Canned(502, "gone"))
TEXT = "Tell me about the sea. " * 40


@pytest.fixture
async def affine(coordinator, fleet_of):
    """A coordinator whose two decode workers are chosen by prefix, and its fleet."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(
        fleet,
        "text",
        steps={"prefill": {"min_uncached_tokens": 40, "min_output_tokens": 2}},
        pools={"decode": {"policy": "prefix_affinity", "policy_params": {"block_tokens": 16}}},
    )
    return at, fleet


async def test_the_second_turn_of_a_conversation_is_decoded_where_the_first_was(affine, ask, legs):
    """Its prompt is known there but for the end: no second prefill, and the same answer as with one."""
    at, fleet = affine
    first = await at.chat(TEXT)
    assert first.status == 200 and len(legs(fleet.prefill)) == 1
    [home] = [worker for worker in fleet.decodes if legs(worker)]
    second = await at.chat(TEXT)
    assert (second.status, second.text) == (200, first.text)
    assert (len(legs(fleet.prefill)), len(legs(home))) == (1, 2)
    assert await at.count("coordinator_prefills_skipped_total", reason="few_uncached_tokens") == 1


async def test_a_new_long_prompt_has_a_prefill(affine, legs):
    at, fleet = affine
    for number in range(3):
        assert (await at.chat(f"{number} {TEXT}")).status == 200
    assert len(legs(fleet.prefill)) == 3


async def test_a_decode_that_failed_is_not_taken_to_have_the_prompt(affine, legs, excuse):
    """The request begins again, and its prompt is computed anew for the other worker."""
    excuse("unread", "whether a decode that died had read the blocks, nobody can tell")
    at, fleet = affine
    members = at.upstream.links["decode"].router.members
    urls = [worker.url for worker in members.workers]
    assert (await at.chat(TEXT)).status == 200
    [home] = [worker for worker in fleet.decodes if legs(worker)]
    members.replace([])
    members.replace(urls)  # nobody is taken to have anything, and by its hash the prompt goes home again
    home.behave.next(FAILS)
    assert (await at.chat(TEXT)).status == 200
    assert [len(legs(worker)) for worker in (fleet.prefill, home)] == [3, 2]
    assert await at.count("coordinator_prefills_skipped_total") == 0


async def test_a_decode_alone_that_failed_is_retried_on_the_other_worker(affine, legs):
    at, fleet = affine
    assert (await at.chat(TEXT)).status == 200
    [home] = [worker for worker in fleet.decodes if legs(worker)]
    home.behave.next(FAILS)
    assert (await at.chat(TEXT)).status == 200
    assert [len(legs(worker)) for worker in (fleet.prefill, *fleet.decodes)] == [
        1,
        *(2 if w is home else 1 for w in fleet.decodes),
    ]


@pytest.mark.parametrize(
    ("path", "cap"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
async def test_one_output_token_of_any_api_takes_decode_alone(affine, legs, path, cap):
    at, fleet = affine
    said = {"messages": [{"role": "user", "content": TEXT}]}
    body = {"/v1/completions": {"prompt": TEXT}, "/v1/responses": {"input": TEXT}}.get(path, said)
    got = await at.post(path, {"model": "tiny", **body, cap: 1})
    assert got.status == 200 and legs(fleet.prefill) == []
    assert await at.count("coordinator_prefills_skipped_total", reason="few_output_tokens") == 1

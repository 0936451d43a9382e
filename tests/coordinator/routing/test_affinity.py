"""Prefix affinity: a prompt goes where its beginning was sent before, unless that worker has more than its share."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing import blocks
from coordinator.routing.affinity import PrefixAffinity
from coordinator.routing.blocks import Marks, marks
from coordinator.routing.ring import Ring
from coordinator.routing.router import PoolLoad, Worker
from envelope.formats import Format
from envelope.json_codec import dumps
from envelope.token_ids import CHARACTERS_PER_ID, TokenIds
from tests.coordinator.routing.pools import asked, made

BLOCK = 16
MARKS, COUNTING = marks(BLOCK, False), marks(BLOCK, True)
MANY = [f"http://10.0.0.{number}:8000" for number in range(20)]


def affinity(
    urls: list[str] = MANY, *, counting: bool = False, remembered_blocks: int = 1000
) -> tuple[PrefixAffinity, list[Worker]]:
    pool = PoolLoad()
    policy = PrefixAffinity(pool, marks(BLOCK, counting), remembered_blocks, max_load=1.25, free_tokens=1000)
    workers = [Worker(url, (), pool) for url in urls]
    policy.use(workers)
    return policy, workers


def prompt(number: int, blocks: int = 10) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    return [number * 1000 + at for at in range(blocks * BLOCK)]


def numbers(ctx: Any, where: Marks = MARKS) -> list[int]:
    """Return what stands for a prompt at each of its marks."""
    found = blocks.prompt(ctx, where)
    return [found.number(each) for each in where.blocks[: found.marks]]


def uncached(policy: PrefixAffinity, token_ids: Any, **choice: Any) -> int:
    return policy.uncached_tokens(asked(rendered={"token_ids": token_ids, "model": "m"}), most=1 << 20, **choice)


def chosen(policy: PrefixAffinity, *token_ids: int, **slots: Any) -> Worker:
    ctx = asked(token_ids, **slots)
    worker = policy.choose(ctx)
    assert worker is not None
    policy.remember(ctx, worker)
    return worker


def test_the_turns_of_a_conversation_go_to_one_worker_and_conversations_to_all() -> None:
    policy, workers = affinity(remembered_blocks=5000)
    first = {number: chosen(policy, *prompt(number)) for number in range(200)}
    for number, worker in first.items():
        longer = [*prompt(number), *prompt(number + 500, 4)]
        assert chosen(policy, *longer) is worker
        assert policy.why(worker).startswith("it was sent at least 8 of the prompt's first 12 blocks before")
    assert set(first.values()) == set(workers)


def test_conversations_that_share_a_system_prompt_are_spread_all_the_same() -> None:
    """The shared part is less than half of each, so it does not decide."""
    policy, workers = affinity()
    system = prompt(0, 4)
    spread = Counter(chosen(policy, *system, *prompt(number, 8)) for number in range(1, 401))
    assert len(spread) == len(workers) and max(spread.values()) < 4 * 400 / len(workers)


def test_replicas_that_know_nothing_of_each_other_choose_the_same_worker() -> None:
    one, _ = affinity()
    other, _ = affinity(MANY[::-1])
    assert all(chosen(one, *prompt(number)).url == chosen(other, *prompt(number)).url for number in range(100))


def test_a_prompt_has_the_same_place_in_every_process() -> None:
    """Python gives texts another hash in each process; what is chosen must not depend on one."""
    code = (
        "from tests.coordinator.routing.pools import asked; from coordinator.routing.blocks import marks, prompt\n"
        "body = {'model': 'm', 'cache_salt': 's', 'messages': [{'role': 'user', 'content': 'a' * 400}]}\n"
        "prompts = [prompt(ctx, marks(16, False)) for ctx in (asked(range(96)), asked(body=body))]\n"
        "print(*(each.number(blocks) for each in prompts for blocks in (1, 2, 5)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, stdout=subprocess.PIPE
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and outputs != {b""}


def test_a_worker_with_more_than_its_share_gets_nothing_more() -> None:
    policy, workers = affinity()
    home = chosen(policy, *prompt(1))
    home.begin(1001)
    second = chosen(policy, *prompt(1))
    assert second is not home
    for worker in workers:
        if worker is not home:
            worker.begin(900)
    second.begin(200)
    assert chosen(policy, *prompt(1)) is home, "now the others have about as much"


def test_nobody_is_above_his_share_while_he_has_next_to_nothing() -> None:
    """Three times the mean of a pool that is nearly idle is no overload."""
    policy, _ = affinity()
    home = chosen(policy, *prompt(1))
    home.begin(1000)
    assert chosen(policy, *prompt(1)) is home


def test_of_several_that_were_sent_a_prompt_the_least_loaded_has_it() -> None:
    policy, _ = affinity()
    one = chosen(policy, *prompt(1))
    one.begin(1001)
    other = chosen(policy, *prompt(1))
    one.end(1001)
    other.begin(10)
    assert chosen(policy, *prompt(1)) is one
    one.begin(20)
    assert chosen(policy, *prompt(1)) is other


def test_the_longest_prefix_that_was_sent_decides() -> None:
    policy, _ = affinity()
    short, long = prompt(1, 6), [*prompt(1, 6), *prompt(2, 6)]
    one = chosen(policy, *short)
    one.begin(1001)
    other = chosen(policy, *long)
    assert other is not one
    one.end(1001)
    other.begin(500)
    assert chosen(policy, *long) is other
    assert chosen(policy, *short) is one, "as it has less to do"


def test_the_table_is_bounded_and_forgets_what_was_not_asked_for_longest() -> None:
    policy, _ = affinity(counting=True, remembered_blocks=8)
    for number in (1, 2, 1, 3):
        chosen(policy, *prompt(number))
    assert len(policy._table) == 8
    known = [uncached(policy, prompt(number)) for number in (1, 2, 3)]
    assert known == [0, 2 * BLOCK, 0], "its end goes first"
    chosen(policy, *prompt(4, 2))
    assert uncached(policy, prompt(2)) == 10 * BLOCK
    assert uncached(policy, prompt(2, 1)) == BLOCK
    assert uncached(policy, prompt(1, 1)) == 0, "its beginning may serve others"


@pytest.mark.parametrize("others", [8, 100])
def test_a_prompt_that_comes_again_and_again_is_found_when_it_goes_on(others: int) -> None:
    """By its beginning, though it alone has that and what came in between has filled the table."""
    policy, _ = affinity(remembered_blocks=12)
    home = chosen(policy, *prompt(1, 8))
    for number in range(2, others):
        chosen(policy, *prompt(number, 8))
        assert chosen(policy, *prompt(1, 8)) is home
    policy.choose(asked([*prompt(1, 8), *prompt(number + 1, 4)]))
    assert policy._last == (8, 12)


def test_what_only_those_had_who_have_left_is_as_new_in_the_table_too() -> None:
    policy, workers = affinity(remembered_blocks=5)
    chosen(policy, *prompt(1))
    chosen(policy, *prompt(2))
    policy.use([])
    policy.use(workers)
    for number in (1, 3):
        chosen(policy, *prompt(number))
    assert [number in policy._table for number in numbers(asked(prompt(1)))] == [True, *[False] * 4, True]


def test_a_prompt_is_noted_at_its_last_mark_and_at_one_more_of_what_it_shares() -> None:
    """However long it is; and those that share a beginning have told it apart from the rest after a few of them."""
    policy, _ = affinity()
    chosen(policy, *prompt(0, 400))
    assert len(policy._table) == 2
    system = prompt(1, 12)
    table = [len(policy._table)]
    for number in range(2, 12):
        chosen(policy, *system, *prompt(number, 40))
        table.append(len(policy._table))
    assert [after - before for before, after in pairwise(table)] == [2] * 10
    known = [number in policy._table for number in numbers(asked([*system, *prompt(99, 40)]))]
    assert known == [True] * 7 + [False] * 4


@pytest.mark.parametrize("behind", [0, 5, 15])
def test_a_conversation_is_found_by_the_mark_before_where_its_last_one_was_in_what_begins_an_answer(
    behind: int,
) -> None:
    """The next turn has other tokens there."""
    policy, _ = affinity()
    chosen(policy, *prompt(1, 12), *prompt(2)[:behind])
    assert len(policy._table) == 3
    chosen(policy, *prompt(3, 12), *prompt(4)[:16])
    assert len(policy._table) == 3 + 2
    home = chosen(policy, *prompt(5, 12))
    for end in (*range(1, BLOCK), BLOCK):
        ctx = asked([*prompt(5, 12)[:-end], *prompt(6)])
        assert policy.choose(ctx) is home
        assert policy.why(home).startswith("it was sent at least 8 of")


def test_what_nobody_was_sent_is_told_by_the_first_block_and_the_last_mark_alone() -> None:
    policy, _ = affinity()
    ctx = asked(prompt(1, 400))
    policy.choose(ctx)
    assert set(blocks.prompt(ctx, MARKS)._known) == {1, 384}


def test_the_worker_whose_tokens_were_counted_has_the_leg_unless_it_has_more_than_its_share() -> None:
    policy, workers = affinity(counting=True)
    one = chosen(policy, *prompt(1))
    one.begin(1001)
    other = chosen(policy, *prompt(1))
    one.end(1001)
    other.begin(10)
    for grown, home in ((20, one), (1001, other)):
        ctx = asked(prompt(1))
        assert policy.uncached_tokens(ctx, most=1000) == 0
        one.begin(grown)
        assert policy.choose(ctx) is home
        one.end(grown)
    ctx = asked(prompt(1))
    assert policy.uncached_tokens(ctx, most=1000) == 0
    beside = policy.beside()
    beside.use([worker for worker in workers if worker is not one])
    assert beside.choose(ctx) is other, "it may not have that worker"
    policy.use([worker for worker in workers if worker is not one])
    assert policy.choose(ctx) is other


def test_a_worker_that_left_is_not_taken_to_have_what_it_had() -> None:
    policy, workers = affinity(counting=True)
    home = chosen(policy, *prompt(1))
    assert uncached(policy, prompt(1)) == 0
    policy.use([worker for worker in workers if worker is not home])
    assert chosen(policy, *prompt(1)) is not home
    policy.use(workers)
    chosen(policy, *prompt(2))
    policy.use([home])
    assert uncached(policy, prompt(1)) == 10 * BLOCK


def test_what_only_those_had_who_have_left_is_new_to_everybody() -> None:
    """So it is placed as on the first day, and as a replica does that never heard of them."""
    policy, workers = affinity()
    home = chosen(policy, *prompt(1))
    policy.use([])
    policy.use(workers)
    assert chosen(policy, *prompt(1)) is home


def test_when_a_worker_leaves_only_its_prompts_move() -> None:
    before, workers = affinity()
    where = {number: chosen(before, *prompt(number)) for number in range(200)}
    after, _ = affinity(MANY[1:])
    moved = [number for number in where if chosen(after, *prompt(number)).url != where[number].url]
    assert {where[number] for number in moved} == {workers[0]} and moved


def test_what_nobody_was_sent_is_uncached_and_a_beginning_is_not() -> None:
    policy, _ = affinity(counting=True)
    assert uncached(policy, prompt(1)) == 10 * BLOCK
    chosen(policy, *prompt(1))
    assert uncached(policy, [*prompt(1), 1, 2, 3]) == 3
    assert uncached(policy, [*prompt(1), *prompt(2, 30)]) == 40 * BLOCK, "too little of it to go there"
    assert uncached(policy, prompt(1), usable=lambda worker: False) == 10 * BLOCK


def test_a_choice_that_nothing_came_of_is_not_remembered() -> None:
    """Another worker is looked for after every failure, also where the leg may not be sent there."""
    router = made("prefix_affinity", counts_uncached=True)
    ctx = asked(range(1000))
    first = router.pick(ctx)
    assert first is not None and router.uncached_tokens(ctx, 2000) == 1000
    router.sending(ctx, first)
    assert router.pick(ctx, [first]) is not first
    assert (router.uncached_tokens(ctx, 2000), router.uncached_tokens(ctx, 2000, [first])) == (1000 % 128, 1000)
    assert made("round_robin").uncached_tokens(ctx, 2000) is None


def test_a_prompt_shorter_than_a_block_goes_anywhere() -> None:
    policy, workers = affinity()
    assert {chosen(policy, 1, 2, 3) for _ in range(500)} == set(workers)


tokens = st.builds(
    lambda seed, length: random.Random(seed).choices(range(200_000), k=length),
    st.integers(0, 1 << 32),
    st.integers(0, 40 * BLOCK),
)


def written(token_ids: list[int]) -> TokenIds:
    return TokenIds(dumps(token_ids))


@pytest.mark.parametrize("where", [MARKS, COUNTING])
@pytest.mark.parametrize("kept", [list, written])
@given(same=tokens, one=tokens, other=tokens)
def test_prompts_share_the_numbers_of_what_they_share_and_none_behind_it(
    where: Marks, kept: Any, same: list[int], one: list[int], other: list[int]
) -> None:
    ids = kept([*same, 1, *one]), kept([*same, 2, *(300_000 + id_ for id_ in other)])
    ours, theirs = (blocks.prompt(asked(rendered={"token_ids": each, "model": "m"}), where) for each in ids)
    unit = CHARACTERS_PER_ID if kept is written else 1
    shared = (len(dumps(same)) - (not same) if kept is written else len(same)) // (BLOCK * unit)
    for each in range(1, min(ours.blocks, theirs.blocks) + 1):
        assert (ours.number(each) == theirs.number(each)) == (each <= shared)


@pytest.mark.parametrize("kept", [list, written])
def test_a_prompt_has_few_marks_however_long_it_is(kept: Any) -> None:
    marks_of = {
        length: len(numbers(asked(rendered={"token_ids": kept([100_000] * length), "model": "m"}), marks(128, False)))
        for length in (127, 128, 1024, 32_768, 1 << 20)
    }
    assert list(marks_of.values()) == ([0, 1, 6, 16, 26] if kept is list else [1, 1, 6, 16, 26])


@given(same=tokens, more=tokens)
def test_tokens_that_differ_from_some_place_on_are_never_taken_for_cached(same: list[int], more: list[int]) -> None:
    """They are counted to the last one, whether they came as numbers or as text."""
    policy, _ = affinity(counting=True)
    for kept in (list, written):
        chosen(policy, rendered={"token_ids": kept([*same, 7]), "model": "m"})
        found = uncached(policy, kept([*same, 70, *more]))
        assert 1 + len(more) <= found <= 1 + len(same) + len(more)


@pytest.mark.parametrize("kept", [list, written])
@given(same=tokens, more=tokens)
def test_the_next_turn_of_a_conversation_is_counted_to_the_block(kept: Any, same: list[int], more: list[int]) -> None:
    """Blocks are measured by the text where tokens came as text, and end at the same place in both turns."""
    policy, _ = affinity(counting=True)
    before, after = kept(same), kept([*same, *more])
    chosen(policy, rendered={"token_ids": before, "model": "m"})
    found = uncached(policy, after)
    assert found >= len(more)
    if len(same) > 8 * len(more) + 8 * BLOCK:
        assert found <= len(more) + BLOCK * (CHARACTERS_PER_ID if kept is written else 1)


@pytest.mark.parametrize("kept", [list, written])
def test_a_passage_that_was_exchanged_for_one_as_long_is_found_where_uncached_tokens_are_counted(kept: Any) -> None:
    """From a 32nd of the prompt on, wherever it is, though all behind it is the same."""
    policy, _ = affinity(counting=True, remembered_blocks=10_000)
    chance = random.Random(3)
    prompt = chance.choices(range(100_000, 200_000), k=32_768)
    chosen(policy, rendered={"token_ids": kept(prompt), "model": "m"})
    assert uncached(policy, kept(prompt)) < BLOCK * CHARACTERS_PER_ID
    for start in range(0, 31 * 1024, 1000):
        other = [*prompt[:start], *chance.choices(range(100_000, 200_000), k=1024), *prompt[start + 1024 :]]
        assert uncached(policy, kept(other)) >= len(prompt) - start - 1024


def test_from_a_number_on_uncached_tokens_need_not_be_counted() -> None:
    """Whoever asks whether there are as many gets the right answer, however short the text of each token is."""
    policy, _ = affinity(counting=True)
    for id_ in (1, 4_000_000_000):
        for many in (9, 10, 11, 1000):
            found = policy.uncached_tokens(asked(rendered={"token_ids": written([id_] * many), "model": "m"}), 10)
            assert (found < 10) == (many < 10)


SALTED = {"token_ids": prompt(1), "model": "m", "cache_salt": "tenant"}
ADAPTER = {"token_ids": prompt(1), "model": "m-lora"}


@pytest.mark.parametrize("rendered", [SALTED, ADAPTER])
def test_another_salt_or_adapter_is_another_prompt_from_the_first_block_on(rendered: Any) -> None:
    plain, other = numbers(asked(prompt(1))), numbers(asked(rendered=rendered))
    assert len(plain) == len(other) == 6 and not set(plain) & set(other)


def test_other_media_is_another_prompt_from_its_block_on() -> None:
    """Placeholder tokens are the same whatever the picture is."""

    def features(*hashes: str) -> Any:
        places = [{"offset": 40, "length": 8}, {"offset": 100, "length": 8}]
        return {"mm_hashes": {"image": list(hashes)}, "mm_placeholders": {"image": places[: len(hashes)]}}

    ours, *others = (
        blocks.prompt(asked(rendered={"token_ids": prompt(1), "model": "m", "features": media}), MARKS)
        for media in (features("a", "b"), features("a", "c"), features("d", "b"), None)
    )
    shared = [[each for each in range(1, 11) if ours.number(each) == other.number(each)] for other in others]
    assert shared == [[*range(1, 1 + place // BLOCK)] for place in (100, 40, 40)]


def test_where_media_are_is_told_without_reading_tokens_that_came_as_text() -> None:
    def sent(picture: str, *, offset: int) -> Any:
        media = {"mm_hashes": {"image": [picture]}, "mm_placeholders": {"image": [{"offset": offset, "length": 8}]}}
        tokens = written([100_000] * 200)
        ctx = asked(rendered={"token_ids": tokens, "model": "m", "features": media})
        found = blocks.prompt(ctx, MARKS)
        assert tokens._numbers is None
        return [found.number(each) for each in range(1, 12)]

    for offset in (0, 40, 100):
        one, other = sent("a", offset=offset), sent("b", offset=offset)
        shared = [each for each in range(1, 12) if one[each - 1] == other[each - 1]]
        assert shared == [*range(1, 1 + offset * 7 // (BLOCK * CHARACTERS_PER_ID))]


def conversation(*turns: str, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": turn * BLOCK * 8} for turn in turns]
    return {"model": "m", "messages": said, **fields}


@pytest.mark.parametrize(
    ("api", "first", "second"),
    [
        (Format.CHAT, conversation("one"), conversation("one", "two")),
        (Format.MESSAGES, conversation("one", system="be kind"), conversation("one", "two", system="be kind")),
        (Format.COMPLETIONS, {"prompt": "one" * 500}, {"prompt": "one" * 500 + "two" * 100}),
        (
            Format.RESPONSES,
            {"input": conversation("one")["messages"]},
            {"input": conversation("one", "two")["messages"]},
        ),
    ],
)
def test_text_is_compared_by_its_bytes_where_there_are_no_tokens(api: Format, first: Any, second: Any) -> None:
    ours, theirs = (numbers(asked(body=body, api=api)) for body in (first, second))
    shared = sum(one == other for one, other in zip(ours, theirs, strict=False))
    assert len(theirs) > len(ours) and shared >= len(ours) - 1 > 3


@pytest.mark.parametrize("other", [{"tools": [{"type": "function"}]}, {"cache_salt": "s"}, {"model": "lora"}])
def test_text_behind_other_tools_or_under_another_salt_is_another_prompt(other: Any) -> None:
    plain, changed = numbers(asked(body=conversation("one"))), numbers(asked(body=conversation("one", **other)))
    assert plain and not set(plain) & set(changed)


def test_a_prompt_is_looked_at_once_and_anew_once_the_tokens_are_known() -> None:
    ctx = asked(body=conversation("one"))
    text = blocks.prompt(ctx, MARKS)
    assert blocks.prompt(ctx, MARKS) is text
    ctx.rendered = {"token_ids": prompt(1), "model": "m"}
    tokens = blocks.prompt(ctx, MARKS)
    assert tokens.blocks == 10 and blocks.prompt(ctx, marks(BLOCK, False)) is tokens
    assert blocks.prompt(ctx, marks(2 * BLOCK, False)).blocks == 5
    assert blocks.prompt(ctx, MARKS) is tokens, "two pools may have marks of their own"


def test_where_all_that_may_be_chosen_are_above_the_limit_a_few_are_looked_at() -> None:
    policy, workers = affinity([f"http://{number}" for number in range(500)])
    heavy = set(workers[::2])
    for worker in heavy:
        worker.begin(20_000)
    looked_at: list[Worker] = []

    def usable(worker: Worker) -> bool:
        looked_at.append(worker)
        return worker in heavy

    assert policy.choose(asked(prompt(1)), usable) in heavy
    assert len(looked_at) <= 1 + 64
    (one,) = {policy.choose(asked(prompt(number)), lambda worker: worker is workers[7]) for number in range(20)}
    assert one is workers[7]
    assert policy.choose(asked(prompt(1)), lambda worker: False) is None


def test_the_ring_goes_round_once_and_meets_everybody() -> None:
    ring, workers = Ring(), [Worker(url) for url in MANY]
    ring.use(workers)
    met = list(ring.after(0, 1 << 20))
    assert Counter(met) == dict.fromkeys(workers, 64)
    assert list(ring.after(0, 10)) == met[:10]
    assert [ring.first(place << 56) for place in range(-128, 128)] == [
        next(ring.after(place << 56, 1)) for place in range(-128, 128)
    ]
    turns = [met[at:] + met[:at] for at in range(len(met))]
    for place in (-(2**63), -(2**62), -1, 2**63 - 1):
        assert list(ring.after(place, 1 << 20)) in turns
    ring.use([])
    assert list(ring.after(0, 10)) == [] and ring.first(0) is None

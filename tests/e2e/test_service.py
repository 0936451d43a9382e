"""The coordinator as a service in front of real workers: models, request ids, metrics, and a rollout's SIGTERM."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS, conversation, joined
from tests.e2e.lineups import LINEUPS
from tests.e2e.servers import MODEL_NAME
from tests.e2e.wire import Metrics, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Workers

pytestmark = pytest.mark.e2e


def test_the_model_of_the_workers_is_listed(front: Coordinator) -> None:
    assert MODEL_NAME in [model.id for model in front.sdk.models.list()]


def test_a_request_id_comes_back_and_one_is_made_where_there_is_none(front: Coordinator) -> None:
    create = front.sdk.chat.completions.with_raw_response.create
    named = create(**CONVERSATIONS["plain"].ask(extra_headers={"X-Request-Id": "mine-1"}))
    assert named.headers["X-Request-Id"] == "mine-1"
    first, second = (create(**CONVERSATIONS["plain"].ask()).headers["X-Request-Id"] for _ in range(2))
    assert first
    assert first != second


def test_every_leg_is_counted(front: Coordinator) -> None:
    def legs(name: str) -> float:
        return Metrics(front.url).total("coordinator_leg_seconds_count", step=name)

    before = {name: legs(name) for name in ("prefill", "decode")}
    front.sdk.chat.completions.create(**CONVERSATIONS["plain"].ask())
    for name, count in before.items():
        wait_until(lambda name=name, count=count: legs(name) == count + 1, HANG_S, f"one {name} leg more")


def test_sigterm_lets_a_stream_end_and_refuses_new_requests(
    workers: Workers, coordinator: Callable[[dict], Coordinator]
) -> None:
    """Not ready at once, so that a load balancer looks elsewhere; the fixture then sees exit status 0."""
    config = LINEUPS["openai"].config(workers.render.url, workers.prefill.url, workers.decode.url)
    leaving = coordinator(config | {"log_level": "debug"})  # a process of its own
    talk = conversation("Count to one hundred.")
    stream = iter(leaving.sdk.chat.completions.create(**talk.ask(stream=True)))
    chunks = [next(stream) for _ in range(10)]

    leaving.process.signal(signal.SIGTERM)
    wait_until(lambda: not ready(leaving.url), HANG_S, "not ready")
    chunks += stream

    assert joined(chunks) == {0: talk.answer(parsed=True)}
    wait_until(lambda: not leaving.process.alive, HANG_S, "the process ends")


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=HANG_S):
            return True
    except urllib.error.HTTPError as refused:
        refused.close()
        return False
    except (urllib.error.URLError, ConnectionError):  # the process may have ended by now: its stream was short
        return False

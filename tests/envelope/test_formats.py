"""The paths of the wire formats, and which format a leg is sent in."""

from __future__ import annotations

import pytest

from envelope.formats import PATHS, RENDER_PATHS, Format, leg_format


def test_the_paths_are_vllm_s() -> None:
    assert PATHS == {
        Format.CHAT: "/v1/chat/completions",
        Format.COMPLETIONS: "/v1/completions",
        Format.RESPONSES: "/v1/responses",
        Format.MESSAGES: "/v1/messages",
        Format.GENERATE: "/inference/v1/generate",
    }


def test_every_api_that_sends_text_has_a_render_route() -> None:
    assert RENDER_PATHS == {
        Format.CHAT: "/v1/chat/completions/render",
        Format.COMPLETIONS: "/v1/completions/render",
        Format.RESPONSES: "/v1/responses/render",
        Format.MESSAGES: "/v1/messages/render",
    }


@pytest.mark.parametrize("api", Format)
def test_openai_format_is_the_client_s_own_and_otherwise_every_leg_is_generate(api: Format) -> None:
    assert leg_format(api, use_openai_format=True) is api
    assert leg_format(api, use_openai_format=False) is Format.GENERATE


def test_a_format_is_written_by_its_name() -> None:
    assert [f"{api}" for api in Format] == ["chat", "completions", "responses", "messages", "generate"]

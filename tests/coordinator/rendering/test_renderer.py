"""What is rendered here is what vLLM's render service renders: its recorded answers are the measure."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from coordinator.rendering.renderer import Model, Renderer
from tests.coordinator.rendering.compare import normal
from tests.coordinator.rendering.conftest import DATA, MODEL
from tests.coordinator.rendering.requests import ADD, HI, REFUSED, REQUESTS, WEATHER, anthropic, chat, text

RECORDED: dict[str, Any] = json.loads((DATA / "rendered.json").read_text())
# Of a model whose tokenizer is not here, and which has no generation config: all but the tokens can be compared.
OLDER = sorted((DATA / "recordings" / "vllm-0.33.0" / "render").glob("render_c*.json"))
# Counted from the prompt's length in tokens; and a batch.
UNLIKE = ("render_chat_no_max_tokens", "render_completion_two_prompts")


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_and_params_are_the_render_service_s(rendered: Any, name: str) -> None:
    """V04 V21 V22 V26: token ids, sampling params and parse context, exactly."""
    assert RECORDED[name]["status"] == 200
    status, answer = rendered(*REQUESTS[name])
    assert status == 200, answer
    assert normal(answer) == normal(RECORDED[name]["body"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_render_service_refuses_is_refused(rendered: Any, name: str) -> None:
    """V05: before prefill has worked for it."""
    assert RECORDED[f"refused: {name}"]["status"] == 400
    status, answer = rendered(*REFUSED[name])
    assert (status, bool(answer["error"]["message"])) == (400, True)


@pytest.mark.parametrize("name", ["too long", "far too long", "cap over the context", "text cap over the context"])
def test_a_request_that_does_not_fit_the_context_is_told_in_vllm_s_words(rendered: Any, name: str) -> None:
    theirs, (_, ours) = RECORDED[f"refused: {name}"]["body"]["error"], rendered(*REFUSED[name])
    assert (ours["error"]["message"], ours["error"]["param"]) == (theirs["message"], theirs["param"])


@pytest.mark.parametrize("file", [file for file in OLDER if file.stem not in UNLIKE], ids=lambda file: file.stem)
def test_another_model_s_params_are_the_render_service_s_too(rendered: Any, plain: Renderer, file: Any) -> None:
    exchange = json.loads(file.read_text())
    api = "chat" if "chat" in exchange["request"]["path"] else "completions"
    status, answer = rendered(api, exchange["request"]["body"], plain)
    ours, theirs = normal(answer), normal(exchange["response"]["body"])
    own = ("token_ids", "token_offsets", "request_id", "kv_transfer_params", "ec_transfer_params")
    assert status == 200
    assert {k: v for k, v in ours.items() if k not in own} == {k: v for k, v in theirs.items() if k not in own}


@pytest.fixture(scope="module")
def plain() -> Renderer:
    model = Model(str(MODEL), 2048, tool_parser="hermes", reasoning_parser="qwen3", generation_config="vllm")
    return Renderer(model, threads=1)


NEED_A_SERVICE = {
    "truncation": chat(truncate_prompt_tokens=4),
    "side": text(truncation_side="left"),
    "embeds": text(prompt_embeds="x"),
    "suffix": text(suffix="x"),
    "processor": chat(mm_processor_kwargs={"a": 1}),
    "structural format": chat(response_format={"type": "structural_tag", "format": {}}),
    "structural tag": chat(structured_outputs={"structural_tag": "{}"}),
    "format beside strict tools": chat(tools=[ADD], response_format={"type": "json_object"}),
    "media": chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]),
    "tool reference": chat(messages=[{"role": "user", "content": [{"type": "tool_reference", "name": "a"}]}]),
    "another API": ("responses", {"input": "hi"}),
    "tool reference in a result": anthropic(
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "tool_reference", "tool_name": "x"}],
                    }
                ],
            }
        ]
    ),
}


@pytest.mark.parametrize("name", NEED_A_SERVICE)
def test_what_cannot_be_resolved_here_is_refused_and_never_dropped(rendered: Any, name: str) -> None:
    status, answer = rendered(*NEED_A_SERVICE[name])
    assert status == 400
    assert "needs a render service" in answer["error"]["message"]


MISSHAPEN = {
    "content": chat(messages=[{"role": "user", "content": 5}]),
    "part": chat(messages=[{"role": "user", "content": [5]}]),
    "text": chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    "calls": chat(messages=[{"role": "assistant", "tool_calls": 5}]),
    "call": chat(messages=[{"role": "assistant", "tool_calls": [5]}]),
    "reasoning": chat(messages=[{"role": "assistant", "content": "a", "reasoning": {"type": "x"}}]),
    "huge number": chat(vllm_xargs={"a": [2**64]}),
    "count": text(logprobs="many"),
    "template's messages": chat(chat_template_kwargs={"messages": []}),
    "template's tools": chat(chat_template_kwargs={"tools": [WEATHER]}),
    "half a character": chat(messages=[{"role": "user", "content": "\ud800"}]),
    "half a character of text": text("a\udfff"),
    "no prompt": ("completions", {}),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_misshapen_request_is_the_client_s_fault(rendered: Any, name: str) -> None:
    status, answer = rendered(*MISSHAPEN[name])
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


def test_nothing_of_a_prompt_of_nothing_is_sent_on(rendered: Any) -> None:
    assert rendered(*text(" ", add_special_tokens=True))[0] == 200
    assert rendered(*chat(chat_template_kwargs={"enable_thinking": False}))[0] == 200


def without_parsers(**more: Any) -> Renderer:
    return Renderer(Model(str(MODEL), 4096, **more), threads=1)


def test_a_deployment_without_parsers_asks_for_none(rendered: Any) -> None:
    """As vLLM without --reasoning-parser and --tool-call-parser."""
    bare = without_parsers()
    status, answer = rendered(*chat(tools=[WEATHER], tool_choice="none"), bare)
    assert (status, answer["reasoning_ended"], answer["reasoning_parser_kwargs"]) == (200, None, None)
    assert "skip_special_tokens" not in answer["sampling_params"]
    assert rendered(*chat(include_reasoning=False), bare)[1]["reasoning_ended"] is True
    for choice, told in (
        ("auto", '"auto" tool choice requires'),
        ("required", 'tool_choice="required" requires'),
        ({"type": "function", "function": {"name": "get_weather"}}, 'function "get_weather" requires'),
    ):
        status, answer = rendered(*chat(tools=[WEATHER], tool_choice=choice), bare)
        assert status == 400
        assert told in answer["error"]["message"]


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "shown", "shown_with_tools"),
    [
        ("hermes", "deepseek_r1", False, True),
        ("llama3_json", "deepseek_r1", False, False),
        ("llama3_json", "kimi_k2", True, True),
        ("granite4", "granite", False, True),
        ("qwen3_xml", "deepseek_r1", True, True),
    ],
)
def test_parsers_are_shown_the_special_tokens_that_they_look_for(
    rendered: Any, tool_parser: str, reasoning_parser: str, shown: bool, shown_with_tools: bool
) -> None:
    """Such as ``<tool_call>``; what else these parsers know is the worker's to look at."""
    by = without_parsers(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    for tools, expected in ({}, shown), ({"tools": [WEATHER]}, shown_with_tools):
        status, answer = rendered(*chat(**tools), by)
        assert (status, answer["sampling_params"].get("skip_special_tokens", True)) == (200, not expected)
        assert answer["reasoning_ended"] is None
        assert answer["reasoning_parser_kwargs"] is not None


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
     {"parallel_tool_calls": False}, {"tools": [ADD]}],
)  # fmt: skip
def test_a_call_whose_grammar_is_not_known_here_is_refused(rendered: Any, fields: dict[str, Any]) -> None:
    status, answer = rendered(*chat(**{"tools": [WEATHER], **fields}), without_parsers(tool_parser="llama3_json"))
    assert (status, "needs a render service" in answer["error"]["message"]) == (400, True)


def test_a_deployment_s_own_generation_config_stands_for_what_a_client_left_out(rendered: Any, tmp_path: Any) -> None:
    """As vLLM's --generation-config and --override-generation-config."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "max_new_tokens": 50}')
    asked = chat(max_tokens=80)
    _, folder = rendered(*asked, without_parsers(generation_config=str(tmp_path)))
    assert (folder["sampling_params"]["temperature"], folder["sampling_params"]["max_tokens"]) == (0.3, 50)
    _, over = rendered(*asked, without_parsers(overrides={"top_k": 7, "max_new_tokens": 60}))
    assert (over["sampling_params"]["top_k"], over["sampling_params"]["max_tokens"]) == (7, 60)
    _, none = rendered(*asked, without_parsers(generation_config="vllm"))
    assert {"temperature", "top_k", "top_p"}.isdisjoint(none["sampling_params"])


def test_a_deployment_s_template_kwargs_stand_until_a_client_says_otherwise(rendered: Any) -> None:
    off = without_parsers(template_kwargs={"enable_thinking": False})
    _, thinking = rendered(*chat(chat_template_kwargs={"enable_thinking": True}), off)
    assert rendered(*chat(), off)[1]["token_ids"] != thinking["token_ids"]
    assert thinking["token_ids"] == rendered(*chat())[1]["token_ids"]


def test_a_template_s_own_refusal_reaches_the_client(rendered: Any, tmp_path: Any) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ raise_exception('only one user turn is known') }}")
    status, answer = rendered(*chat(), without_parsers(chat_template=str(file)))
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (
        400, "only one user turn is known", "messages")  # fmt: skip


def test_a_template_that_makes_nothing_is_refused(rendered: Any, tmp_path: Any) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% if false %}{{ messages }}{% endif %}")
    status, answer = rendered(*chat(), without_parsers(chat_template=str(file)))
    assert (status, answer["error"]["message"]) == (400, "No token_ids rendered")


def folder(tmp_path: Any, *without: str, **files: str) -> str:
    for file in MODEL.iterdir():
        if file.name not in without and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return str(tmp_path)


WRONG_FOLDERS = [
    (("tokenizer.json",), {}, "holds no tokenizer.json"),
    ((), {"tekken__json": "{}"}, "holds tekken.json, of Mistral's own format: vLLM renders such a model its own way"),
    (("tokenizer.json",), {"tekken__json": "{}"}, "holds tekken.json, of Mistral's own format"),
    (("tokenizer.json",), {"tokenizer__model__v3": ""}, "holds tokenizer.model.v3, of Mistral's own format"),
    ((), {"config__json": '{"model_type": "gpt_oss"}'}, "is a gpt_oss model, which vLLM renders its own way"),
    ((), {"chat_template__json": "{}"}, "holds a processor's chat_template.json"),
    ((), {"tokenizer__json": "{}"}, "transformers cannot load a tokenizer from it"),
    ((), {"chat_template__jinja": "{% if %}"}, "the chat template is no Jinja template"),
]


@pytest.mark.parametrize(("without", "files", "sentence"), WRONG_FOLDERS, ids=lambda value: str(value)[:40])
def test_a_folder_that_cannot_be_rendered_from_is_refused(
    tmp_path: Any, without: Any, files: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Renderer(Model(folder(tmp_path, *without, **files), 4096), threads=1)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install 'pd-coordinator\[render\]'"):
        Renderer(Model(folder(tmp_path), 4096), threads=1)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="/nowhere is no folder"):
        Renderer(Model("/nowhere", 4096), threads=1)


def test_a_tokenizer_other_than_the_one_that_was_meant_is_refused() -> None:
    good = without_parsers()
    assert without_parsers(sha256=good.tokenizer.sha256).tokenizer.sha256 == good.tokenizer.sha256
    with pytest.raises(ValueError, match=f"has the SHA-256 {good.tokenizer.sha256}, not that of tokenizer_sha"):
        without_parsers(sha256="0" * 64)


def test_what_is_loaded_is_kept_until_its_files_change(rendered: Any, tmp_path: Any) -> None:
    """A configuration that is applied anew must not stall streams."""
    model = Model(folder(tmp_path), 4096)
    first = Renderer(model, threads=1)
    assert Renderer(model, threads=1).tokenizer is first.tokenizer
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    changed = Renderer(model, threads=1)
    assert changed.tokenizer is not first.tokenizer
    assert len(rendered(*chat(), changed)[1]["token_ids"]) < len(rendered(*chat(), first)[1]["token_ids"])


def test_a_model_without_a_template_still_has_completions(rendered: Any, tmp_path: Any) -> None:
    base = Renderer(Model(folder(tmp_path, "chat_template.jinja"), 4096), threads=1)
    assert rendered(*text(), base)[0] == 200
    status, answer = rendered(*chat(), base)
    assert (status, "chat template" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("{% for m in messages %}{{ m.role[0] }}{% endfor %}", "usu"),
        ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.role[0] }}{% endfor %}", "suu"),
    ],
)  # fmt: skip
def test_system_messages_of_messages_clients_come_first_where_a_template_insists(
    rendered: Any, tmp_path: Any, template: str, roles: str
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template)
    messages = [*HI, {"role": "system", "content": "Now."}, *HI]
    by = without_parsers(chat_template=str(file))
    _, answer = rendered(*anthropic(messages=messages), by)
    assert by.tokenizer.encode(roles, add_special_tokens=False).token_ids == answer["token_ids"]


@pytest.mark.parametrize(
    ("template", "effort"),
    [("{{ reasoning_effort }}", "none"), ("x{{ 'thinks' if enable_thinking else '' }}", "none"), ("always", "low"),
     ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}x", "low")],
)  # fmt: skip
def test_disabled_thinking_is_the_effort_that_the_template_knows(
    rendered: Any, tmp_path: Any, template: str, effort: str
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template)
    status, answer = rendered(*anthropic(thinking={"type": "disabled"}), without_parsers(chat_template=str(file)))
    assert (status, answer["parse_context"]["chat_template_kwargs"]["reasoning_effort"]) == (200, effort)


def test_a_model_without_generation_config_has_the_api_s_defaults(rendered: Any, tmp_path: Any) -> None:
    bare = Renderer(Model(folder(tmp_path, "generation_config.json"), 4096), threads=1)
    assert {"temperature", "top_k", "top_p"}.isdisjoint(rendered(*chat(), bare)[1]["sampling_params"])


def test_a_reasoning_parser_whose_tokens_the_model_lacks_is_refused(tmp_path: Any) -> None:
    renamed = (MODEL / "tokenizer.json").read_text().replace("<think>", "<ponder>").replace("</think>", "</ponder>")
    with pytest.raises(ValueError, match="qwen3 needs the tokens <think> and </think>"):
        Renderer(Model(folder(tmp_path, tokenizer__json=renamed), 4096, reasoning_parser="qwen3"), threads=1)

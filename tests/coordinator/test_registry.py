"""The steps that a file names, and each rule that refuses a pipeline which cannot work."""

# ruff: noqa: E501  # a sentence stands on one line, as the operator reads it
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from coordinator.config import ConfigError, load
from coordinator.registry import RULES, STEP_TYPES, build, json_schema
from envelope.connectors import KV_CONNECTORS
from envelope.formats import Format

if TYPE_CHECKING:
    from pathlib import Path

GATEWAY = {"address": "http://g"}
RENDER = {"type": "render", "params": {"address": "http://r"}}
SERVED = {"type": "decode", "params": {"derender": "service"}}
DERENDER = {"type": "derender", "params": {"address": "http://r"}}
NIXL_POOLS = {"prefill": {"endpoints": ["http://a"]}, "decode": {"endpoints": ["http://b"]}}


class NoEvents:
    def handover_sent(self, age_s: float) -> None: ...

    def handover_missing(self, reason: str, policy: str) -> None: ...

    def prefill_skipped(self, reason: str) -> None: ...


@pytest.fixture
def made(tmp_path: Path):
    """Build the steps of a configuration; a step may be named by its type alone."""

    def build_steps(*steps: str | dict[str, Any], gateway: Any = GATEWAY, pools: Any = None, **pipeline: Any):
        named = [{"type": step} if isinstance(step, str) else step for step in steps]
        file = tmp_path / "pd.yaml"
        file.write_text(json.dumps({"gateway": gateway, "pools": pools, "pipeline": {**pipeline, "steps": named}}))
        return build(load(str(file), {}), NoEvents())

    return build_steps


@pytest.fixture
def refused(made, tmp_path: Path):
    """Return the sentences that a configuration is refused with, the file's name taken off."""

    def sentences(*steps: str | dict[str, Any], **config: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            made(*steps, **config)
        return [problem.removeprefix(f"{tmp_path}/pd.yaml: ") for problem in caught.value.problems]

    return sentences


def step(type_: str, **params: Any) -> dict[str, Any]:
    return {"type": type_, "params": params}


def test_every_step_of_the_file_is_made_in_its_order(made) -> None:
    named = ["replace-media-urls", RENDER, "conditional-decode", "encode", "prefill", SERVED, DERENDER]
    pair = made("prefill-decode", gateway=None, pools=NIXL_POOLS, kv_connector="kv-sglang")
    *inner, last = made(*named, use_openai_format=False)
    assert [made_step.type for made_step in (*inner, *pair, last)] == list(STEP_TYPES)


def test_a_step_is_registered_under_its_own_type(made) -> None:
    assert {name: kind.make.type for name, kind in STEP_TYPES.items()} == {name: name for name in STEP_TYPES}


@pytest.mark.parametrize(
    ("tokens_in", "steps", "pipeline"),
    [
        (False, (RENDER, "prefill", "decode"), {}),
        (True, (RENDER, "prefill", "decode"), {"use_openai_format": False}),
        (True, (RENDER, step("prefill", use_openai_format=False), "decode"), {}),
        (True, (RENDER, step("encode", use_openai_format=False), "decode"), {}),
        (True, (RENDER, step("decode", use_openai_format="false")), {}),
        (False, (RENDER, step("decode", use_openai_format=True)), {"use_openai_format": False}),
    ],
)
def test_render_is_told_whether_its_prompts_are_sent(made, tokens_in: bool, steps: Any, pipeline: Any) -> None:
    assert made(*steps, **pipeline)[0]._settings.tokens_in is tokens_in


def test_a_step_inherits_the_pipeline_s_settings_and_overrides_them(made) -> None:
    *_, prefill, decode = made(RENDER, step("prefill", use_openai_format=True), "decode", use_openai_format=False)
    assert prefill.plan(Format.CHAT).format is Format.CHAT
    assert decode.plan(Format.CHAT).format is Format.GENERATE


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("prefil", "'prefil' is not a step, did you mean prefill? (replace-media-urls, render, conditional-decode, encode, prefill, decode, prefill-decode, derender)"),
        ("zzz", "'zzz' is not a step, write one of these: (replace-media-urls, render, conditional-decode, encode, prefill, decode, prefill-decode, derender)"),
        ("async-broker", "async-broker (requests that queue) comes in a later release, take the step out"),
        ("force-stream", "force-stream comes in a later release, take the step out"),
    ],
)  # fmt: skip
def test_a_step_that_there_is_not_is_refused_with_those_that_there_are(refused, name: str, sentence: str) -> None:
    assert refused(name, "decode") == [f"pipeline.steps[0].type: {sentence}"]


def test_a_slip_in_the_last_step_s_name_is_the_only_problem(refused) -> None:
    (sentence,) = refused("prefill", "decod")
    assert sentence.startswith("pipeline.steps[1].type: 'decod' is not a step, did you mean decode?")


PARAMS = [
    (step("decode", kv_conector="kv-nixl"), "kv_conector: unknown key, did you mean kv_connector?"),
    (step("decode", output_mode="tokens"), "output_mode: tokens would answer clients with ids and no text; write text or derender, or derender: coordinator or service beside it"),
    (step("decode", output_mode="txt"), "output_mode: 'txt' is not one of tokens, text, derender, did you mean text?"),
    (step("decode", wrap_chat_completion="maybe"), "wrap_chat_completion: 'maybe' is neither true nor false, write one of them"),
    (step("decode", first_byte_timeout=30), "first_byte_timeout: 30 has no unit, write 30s"),
    (step("decode", kv_connector="nixl"), "kv_connector: 'nixl' is not one of kv-shared-storage, kv-nixl, kv-nixl-push, kv-lmcache, kv-mooncake, kv-offloading, kv-sglang, did you mean kv-nixl?"),
]  # fmt: skip


@pytest.mark.parametrize(("decode", "sentence"), PARAMS)
def test_what_is_wrong_with_a_step_s_params(refused, decode: dict[str, Any], sentence: str) -> None:
    assert refused("prefill", decode) == [f"pipeline.steps[1].params.{sentence}"]


def test_render_needs_an_address(refused) -> None:
    assert refused("render", "decode") == [
        "pipeline.steps[0].params.address: missing: write the render service, as http://host:port, or its workers as "
        "pools.render"
    ]


HERE = {"tokenizer": "/models/m", "max_model_len": 4096}


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"max_model_len": 9},
         "max_model_len is for rendering here: write tokenizer: and a model's folder, or take it out"),
        ({"address": "http://r", "tool_parser": "hermes"},
         "tool_parser is for rendering here: write tokenizer: and a model's folder, or take it out"),
        ({**HERE, "address": "http://r"},
         "address is for a service and tokenizer for rendering here: take one of the two out"),
        ({**HERE, "api_key": "k"}, "api_key is for a service and tokenizer for rendering here: take one of the two out"),
        ({"tokenizer": "/m"}, "max_model_len is missing: write the context length that the workers' /v1/models says"),
    ],
)  # fmt: skip
def test_render_needs_one_renderer(refused, params: dict[str, Any], sentence: str) -> None:
    assert refused(step("render", **params), "decode") == [f"pipeline.steps[0].params: {sentence}"]


def test_a_parser_that_is_not_known_here_is_refused(refused) -> None:
    """What it changes of a request would be missing."""
    tool, reasoning = refused(step("render", **HERE, tool_parser="mistral", reasoning_parser="hf"), "decode")
    assert tool.startswith(
        "pipeline.steps[0].params.tool_parser: 'mistral' is not known here, use a render service or write one of "
    )
    assert reasoning.startswith(
        "pipeline.steps[0].params.reasoning_parser: 'hf' is not known here, use a render service"
    )


def test_conditional_decode_has_no_wire_format(refused) -> None:
    (sentence,) = refused(step("conditional-decode", use_openai_format=True), "decode")
    assert sentence.startswith("pipeline.steps[0].params: use_openai_format cannot be set on conditional-decode")


def test_a_param_without_a_value_is_one_that_is_not_there(made) -> None:
    assert made(step("decode", output_mode=None))[0].params.output_mode == "text"


ORDER = [
    (("decode", "prefill"), "steps[1]: prefill must stand before decode (steps[0]), which needs its result"),
    (("prefill", RENDER, "decode"), "steps[1]: render must stand before prefill (steps[0]), which needs its tokens"),
    (("prefill", "conditional-decode", "decode"), "steps[1]: conditional-decode must stand before prefill (steps[0]), whose work it may save"),
    (("prefill", "encode", "decode"), "steps[1]: encode must stand before prefill (steps[0]), which needs its result"),
    ((RENDER, "replace-media-urls", "decode"), "steps[1]: replace-media-urls must stand before render (steps[0]), which would be sent the URLs"),
    (("decode", RENDER), "steps[1]: render must stand before decode (steps[0]), which needs its tokens"),
    (("decode", "decode"), "steps[1]: decode stands at steps[0] already, take one out"),
    (("prefill", "prefill", "decode"), "steps[1]: prefill stands at steps[0] already, take one out"),
    (("prefill",), "steps: no step answers the client, write {type: decode} as the last one"),
    ((RENDER, DERENDER, SERVED), "steps[2]: decode must stand before derender (steps[1]), which takes its tokens"),
    (("conditional-decode",), "steps: no step answers the client, write {type: decode} as the last one"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "sentence"), ORDER)
def test_an_order_that_cannot_work_is_refused(refused, steps: tuple[Any, ...], sentence: str) -> None:
    assert refused(*steps, use_openai_format=SERVED not in steps) == [f"pipeline.{sentence}"]


UNSERVED = [
    ((RENDER, SERVED), False, "steps[1].params.derender: no step asks the service, write {type: derender, params: {address: ...}} as the last one"),
    ((RENDER, "decode", DERENDER), False, "steps[2]: decode leaves it no tokens, write derender: service there or take this step out"),
    ((RENDER, SERVED, DERENDER), True, "steps[1].params.derender: the worker's answer is in the client's envelope already: take this out, or send it tokens-in"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "openai", "sentence"), UNSERVED)
def test_a_derender_service_needs_tokens_and_a_step_that_asks_it(
    refused, steps: Any, openai: bool, sentence: str
) -> None:
    assert refused(*steps, use_openai_format=openai) == [f"pipeline.{sentence}"]


NAMED = {"derender": "coordinator", "tokenizer": "/m", "tool_parser": "hermes"}
PARSED = [
    ({"derender": "coordinator", "tool_parser": "hermes"}, "tokenizer: missing: derender: coordinator needs the folder of the tokenizer"),
    ({"derender": "coordinator", "tokenizer": "/m"}, "derender: coordinator has nothing to do, write the workers' tool_parser, reasoning_parser or both"),
    ({"reasoning_parser": "qwen3"}, "reasoning_parser: nobody parses here, write derender: coordinator or take it out"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "sentence"), PARSED)
def test_the_coordinator_s_parsers_are_named_where_it_parses(refused, params: Any, sentence: str) -> None:
    decode = step("decode", **params)
    assert refused(RENDER, decode, use_openai_format=False) == [f"pipeline.steps[1].params.{sentence}"]


@pytest.mark.parametrize("more", [{}, {"reasoning_parser": "qwen3"}, {"output_mode": "tokens"}])
def test_the_coordinator_may_parse_text_or_tokens(made, more: dict[str, Any]) -> None:
    assert len(made(RENDER, step("decode", **NAMED, **more), use_openai_format=False)) == 2


def test_workers_without_a_tokenizer_may_have_their_tokens_made_text_with_no_parser(made) -> None:
    decode = step("decode", derender="coordinator", tokenizer="/m", output_mode="tokens")
    assert len(made(RENDER, decode, use_openai_format=False)) == 2


BOTH = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
PARSED = {"derender": "coordinator", "tokenizer": "/m"}


@pytest.mark.parametrize(
    ("render", "decode", "sentences"),
    [
        (BOTH, {**BOTH, "tool_parser": "qwen3_coder"}, ["tool_parser: render (steps[0]) has hermes and this has qwen3_coder, write the workers' --tool-call-parser in both"]),
        (BOTH, {"tool_parser": "hermes"}, ["reasoning_parser: render (steps[0]) has qwen3 and this has none, write the workers' --reasoning-parser in both"]),
        ({}, BOTH, [
            "tool_parser: render (steps[0]) has none and this has hermes, write the workers' --tool-call-parser in both",
            "reasoning_parser: render (steps[0]) has none and this has qwen3, write the workers' --reasoning-parser in both",
        ]),
    ],
)  # fmt: skip
def test_what_is_rendered_and_parsed_here_is_for_the_same_parsers(
    refused, made, render: Any, decode: Any, sentences: list[str]
) -> None:
    """Else the text would lack the special tokens that decode's look for, or have a grammar of another kind."""
    rendering = step("render", **HERE, **render)
    assert refused(rendering, step("decode", **PARSED, **decode), use_openai_format=False) == [
        f"pipeline.steps[1].params.{sentence}" for sentence in sentences
    ]
    assert made(step("render", **HERE, **decode), step("decode", **PARSED, **decode), use_openai_format=False)
    assert made(RENDER, step("decode", **PARSED, **decode), use_openai_format=False), "a service has its own"
    assert made(rendering, step("decode", output_mode="derender"), use_openai_format=False), "and so have workers"


MODES = [
    ({"derender": "service", "output_mode": "text"}, "output_mode: a derender service takes tokens and no text; write tokens or take it out"),
    ({"derender": "coordinator", "output_mode": "derender"}, "output_mode: the worker would have parsed already; write text, or tokens where it has no tokenizer"),
    ({"derender": "services"}, "derender: 'services' is not one of worker, coordinator, service, did you mean service?"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "sentence"), MODES)
def test_an_output_mode_that_nobody_could_make_an_answer_of_is_refused(refused, params: Any, sentence: str) -> None:
    decode = step("decode", **params)
    assert refused(RENDER, decode, use_openai_format=False) == [f"pipeline.steps[1].params.{sentence}"]


def test_conditional_decode_may_ask_before_render_makes_tokens(made) -> None:
    assert len(made("conditional-decode", RENDER, "decode")) == 3


def test_a_role_without_a_pool_or_a_gateway_is_refused(refused) -> None:
    assert refused("prefill", "decode", gateway=None, pools={"decode": {"endpoints": ["http://a"]}}) == [
        "pipeline.steps[0]: prefill has no workers, write pools.prefill.endpoints or gateway.address"
    ]


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_every_role_needs_workers_of_its_own(refused, made, role: str) -> None:
    pools = {name: {"endpoints": [f"http://{name}"]} for name in ("encode", "prefill", "decode") if name != role}
    index = ("encode", "prefill", "decode").index(role)
    assert refused("encode", "prefill", "decode", gateway=None, pools=pools) == [
        f"pipeline.steps[{index}]: {role} has no workers, write pools.{role}.endpoints or gateway.address"
    ]
    assert made("encode", "prefill", "decode", pools=pools)


def test_embeddings_may_go_to_a_decode_that_computes_the_prompt_itself(made) -> None:
    assert len(made("encode", "decode")) == 2


def test_a_role_may_have_a_pool_while_another_goes_by_the_gateway(made) -> None:
    assert len(made("prefill", "decode", pools={"decode": {"endpoints": ["http://a"]}})) == 2


def test_render_has_an_address_or_a_pool(refused, made) -> None:
    pools = {"render": {"dns": "render:8000"}}
    assert len(made("render", "decode", pools=pools)) == 2
    assert refused(RENDER, "decode", pools=pools) == [
        "pipeline.steps[0].params.address: pools.render says how render servers are reached: take one out"
    ]
    assert refused(step("render", idle_conn_timeout="3s"), "decode", pools=pools) == [
        "pipeline.steps[0].params.idle_conn_timeout: pools.render says how render servers are reached: take one out"
    ]
    assert refused("decode", pools=pools) == [
        "pools.render: no step asks these workers, add a render step or take the pool out"
    ]


@pytest.mark.parametrize("way", ["dns", "kubernetes"])
def test_a_missing_extra_is_named(refused, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    lookup = {"dns": "decode:8000", "kubernetes": {"service": "decode"}}
    monkeypatch.setattr("coordinator.settings.rules.find_spec", lambda package: None)
    assert refused("prefill", "decode", pools={"decode": {way: lookup[way]}}) == [
        f"pools.decode.{way}: a package is not installed, pip install 'pd-coordinator[{way}]'"
    ]


def test_a_pool_or_gateway_that_no_step_asks_is_refused(refused) -> None:
    assert refused("decode", pools={"prefill": {"endpoints": ["http://a"]}}) == [
        "pools.prefill: no step asks these workers, add a prefill step or take the pool out"
    ]
    assert refused("decode", pools={"encode": {"endpoints": ["http://a"]}}) == [
        "pools.encode: no step asks these workers, add an encode step or take the pool out"
    ]
    assert refused("prefill", "decode", pools=NIXL_POOLS) == [
        "gateway: every role has a pool, so no leg goes to the gateway: take one of them out"
    ]


def test_a_worker_in_both_pools_is_refused_where_it_would_fetch_from_itself(refused, made) -> None:
    pools = {"prefill": {"endpoints": ["http://a"]}, "decode": {"endpoints": ["http://b", "http://a:80"]}}
    assert refused("prefill", "decode", gateway=None, pools=pools, kv_connector="kv-nixl") == [
        "pools.decode.endpoints[1]: http://a:80 is in pools.prefill too, and with kv-nixl a worker cannot fetch from itself: take one out"
    ]
    assert made("prefill", "decode", gateway=None, pools=pools, kv_connector="kv-shared-storage")
    (sentence,) = refused("prefill-decode", gateway=None, pools=pools, kv_connector="kv-mooncake")
    assert "and with kv-mooncake a worker cannot fetch from itself" in sentence


def test_one_header_cannot_name_two_workers(refused) -> None:
    pool = {"header": "x-worker", "allow": ["10.0.0.0/8"]}
    assert refused("prefill", "decode", gateway=None, pools={"prefill": pool, "decode": pool}) == [
        "pools.decode.header: x-worker names the prefill worker already, write another"
    ]
    assert refused("encode", "prefill", "decode", pools={"encode": pool, "prefill": pool}) == [
        "pools.prefill.header: x-worker names the encode worker already, write another"
    ]


def test_encode_and_prefill_speak_of_one_encoder_cache(refused, made) -> None:
    assert refused(step("encode", ec_connector="ec-nixl"), "prefill", "decode") == [
        "pipeline.steps[0].params.ec_connector: encode leaves its result by ec-nixl and prefill takes it by ec-shared-storage, write the same for both"
    ]
    assert refused("encode", step("prefill", ec_connector="ec-nixl"), "decode") == [
        "pipeline.steps[1].params.ec_connector: encode leaves its result by ec-shared-storage and prefill takes it by ec-nixl, write the same for both"
    ]
    assert made(step("encode", ec_connector="ec-nixl"), step("prefill", ec_connector="ec-nixl"), "decode")
    assert made("encode", "prefill", "decode", ec_connector="ec-nixl")


def test_legs_with_different_connectors_are_refused(refused, made) -> None:
    assert refused(step("prefill", kv_connector="kv-nixl"), "decode") == [
        "pipeline.steps[0].params.kv_connector: prefill leaves its result by kv-nixl and decode takes it by kv-shared-storage, write the same for both"
    ]
    assert made(step("prefill", kv_connector="kv-nixl"), step("decode", kv_connector="kv-nixl"))


def test_tokens_in_without_a_render_step_is_refused(refused, made) -> None:
    rest = "false sends token ids, and no render step makes them: add one before the first leg, or write true"
    assert refused("prefill", "decode", use_openai_format=False) == [f"pipeline.use_openai_format: {rest}"]
    assert refused("prefill", step("decode", use_openai_format=False)) == [
        f"pipeline.steps[1].params.use_openai_format: {rest}"
    ]
    assert made(RENDER, "prefill", "decode", use_openai_format=False)
    assert made("prefill", "decode", use_openai_format=True)


def test_wrap_without_a_tokens_in_decode_is_refused(refused, made) -> None:
    assert refused(RENDER, "prefill", step("decode", wrap_chat_completion=True)) == [
        "pipeline.steps[2].params.wrap_chat_completion: the answer is in the client's envelope already, take it out or send this leg tokens-in"
    ]
    assert made(RENDER, "prefill", step("decode", wrap_chat_completion=True), use_openai_format=False)


AFFINE = {**NIXL_POOLS, "decode": {"endpoints": ["http://b"], "policy": "prefix_affinity"}}


def test_skipping_prefill_by_what_decode_remembers_needs_its_table_and_tokens(refused, made) -> None:
    legs = step("prefill", min_uncached_tokens=500), "decode"
    assert len(made(RENDER, *legs, pools=AFFINE, gateway=None)) == 3
    at = "pipeline.steps[{}].params.min_uncached_tokens: "
    remembers = "it goes by what pools.decode remembers, write policy: prefix_affinity there"
    assert refused(RENDER, *legs, pools=NIXL_POOLS, gateway=None) == [at.format(1) + remembers]
    assert refused(RENDER, *legs) == [at.format(1) + remembers]
    assert refused(*legs, pools=AFFINE, gateway=None) == [
        at.format(0) + "it counts tokens, and no render step makes them: add one before it or take it out"
    ]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_token_ids_beside_an_openai_body_need_a_render_step_and_that_format(refused, made, leg: str) -> None:
    legs = [step(name, send_prompt_token_ids=name == leg) for name in ("prefill", "decode")]
    index = ["prefill", "decode"].index(leg)
    assert refused(*legs) == [
        f"pipeline.steps[{index}].params.send_prompt_token_ids: no render step makes token ids, add one before it or take it out"
    ]
    assert refused(RENDER, *legs, use_openai_format=False) == [
        f"pipeline.steps[{index + 1}].params.send_prompt_token_ids: a leg on the generate route carries the token ids anyway, take it out"
    ]
    assert made(RENDER, *legs)


ONE_AFTER_THE_OTHER = (
    "needs both legs in flight at once: write {type: prefill-decode} in place of the prefill and the decode step"
)
AT_ONCE = "needs prefill to end first: write {type: prefill} and {type: decode} in place of the prefill-decode step"


@pytest.mark.parametrize("name", [name for name, kind in KV_CONNECTORS.items() if kind.concurrent])
def test_a_connector_of_legs_in_flight_together_is_refused_with_two_steps(refused, name: str) -> None:
    assert refused("prefill", "decode", kv_connector=name) == [f"pipeline.kv_connector: {name} {ONE_AFTER_THE_OTHER}"]
    legs = [step("prefill", kv_connector=name), step("decode", kv_connector=name)]
    assert refused(*legs) == [f"pipeline.steps[0].params.kv_connector: {name} {ONE_AFTER_THE_OTHER}"]


@pytest.mark.parametrize("name", [name for name, kind in KV_CONNECTORS.items() if not kind.concurrent])
def test_a_connector_of_one_leg_after_the_other_is_refused_in_a_pair(refused, name: str) -> None:
    where = {"gateway": None, "pools": NIXL_POOLS}
    assert refused("prefill-decode", **where, kv_connector=name) == [f"pipeline.kv_connector: {name} {AT_ONCE}"]
    assert refused(step("prefill-decode", kv_connector=name), **where) == [
        f"pipeline.steps[0].params.kv_connector: {name} {AT_ONCE}"
    ]


def test_legs_that_are_paired_by_their_id_take_one_route(refused, made) -> None:
    """NIXL in push mode: the route is part of the id."""
    two = (RENDER, step("prefill", use_openai_format=False), "decode")
    rest = "kv-nixl-push pairs the legs by an id that the route is part of, write the same for both"
    assert refused(*two, kv_connector="kv-nixl-push") == [f"pipeline.steps[1].params.use_openai_format: {rest}"]
    assert made(*two, kv_connector="kv-nixl")
    assert made(RENDER, "prefill", "decode", kv_connector="kv-nixl-push", use_openai_format=False)


def pair_pools(**prefill: Any) -> dict[str, Any]:
    return {**NIXL_POOLS, "prefill": {**NIXL_POOLS["prefill"], **prefill}}


def test_a_pair_and_one_of_its_legs_are_one_leg_too_many(refused) -> None:
    (sentence,) = refused("prefill-decode", "decode", gateway=None, pools=NIXL_POOLS, kv_connector="kv-sglang")
    assert sentence == "pipeline.steps[1]: prefill-decode (steps[0]) makes this leg already, take one of them out"


def test_a_pair_needs_to_know_where_prefill_is(refused, made) -> None:
    assert refused("prefill-decode", kv_connector="kv-sglang") == [
        "pipeline.steps[0]: decode is told where prefill is, and behind a gateway nobody knows: write pools.prefill with endpoints"
    ]
    pools = {"prefill": NIXL_POOLS["prefill"]}
    assert made("prefill-decode", pools=pools, kv_connector="kv-sglang")
    assert refused("prefill-decode", gateway=None, pools=pools, kv_connector="kv-sglang") == [
        "pipeline.steps[0]: prefill-decode has no workers, write pools.decode.endpoints or gateway.address"
    ]


def test_a_port_of_prefill_workers_is_written_where_it_is_asked_for(refused, made) -> None:
    pools = pair_pools(bootstrap_port=9000)
    assert refused("prefill", "decode", gateway=None, pools=pools) == [
        "pools.prefill.bootstrap_port: no prefill-decode step asks for it, take the key out"
    ]
    assert refused("prefill-decode", gateway=None, pools=NIXL_POOLS, kv_connector="kv-offloading") == [
        "pools.prefill: bootstrap_port is missing: write the port of the workers' P2P tier"
    ]
    assert made("prefill-decode", gateway=None, pools=pools, kv_connector="kv-offloading")


def test_a_pair_has_no_second_prefill(refused) -> None:
    (sentence,) = refused(
        "encode",
        "prefill-decode",
        gateway=None,
        pools={**NIXL_POOLS, "encode": {"endpoints": ["http://e"]}},
        kv_connector="kv-mooncake",
        on_encode_failure="prefill_encodes",
    )
    assert sentence.startswith("pipeline.on_encode_failure: prefill_encodes sends prefill a second time")


def test_what_sglang_workers_cannot_do_is_refused(refused) -> None:
    fleet = {"gateway": None, "pools": NIXL_POOLS, "kv_connector": "kv-sglang"}
    behind = "the workers behind kv-sglang have"
    assert refused(RENDER, "conditional-decode", "prefill-decode", **fleet, use_openai_format=False) == [
        f"pipeline.steps[0]: {behind} nothing for render to ask, take it out",
        f"pipeline.steps[1]: {behind} nothing for conditional-decode to ask, take it out",
        f"pipeline.use_openai_format: {behind} no route for token ids, write true",
    ]
    no_prompts = "a decode worker behind kv-sglang computes no prompts, take it out"
    assert refused(step("prefill-decode", min_output_tokens=2), **fleet) == [
        f"pipeline.steps[0].params.min_output_tokens: {no_prompts}"
    ]
    alone = "a decode worker behind kv-sglang computes no prompts, write fail"
    assert refused(
        "prefill-decode", **fleet, on_prefill_failure="decode_alone", on_missing_handover="decode_alone"
    ) == [
        f"pipeline.on_prefill_failure: {alone}",
        f"pipeline.on_missing_handover: {alone}",
    ]


def test_faults_of_steps_and_of_their_order_are_told_at_once(refused) -> None:
    assert refused("decode", step("prefill", kv_conector="x"), "rendr", gateway=None) == [
        "pipeline.steps[1].params.kv_conector: unknown key, did you mean kv_connector?",
        "pipeline.steps[2].type: 'rendr' is not a step, did you mean render? (replace-media-urls, render, conditional-decode, encode, prefill, decode, prefill-decode, derender)",
        "pipeline.steps[1]: prefill must stand before decode (steps[0]), which needs its result",
        "pipeline.steps[2]: render must stand before decode (steps[0]), which needs its tokens",
        "pipeline.steps[0]: decode has no workers, write pools.decode.endpoints or gateway.address",
        "pipeline.steps[1]: prefill has no workers, write pools.prefill.endpoints or gateway.address",
    ]


def test_every_rule_has_a_name_that_says_what_holds() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


SCHEMA = json_schema()


def test_the_schema_is_a_schema_and_writes_defaults_as_the_file_does() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$defs"]["Server"]["properties"]["read_timeout"]["default"] == "30s"
    assert SCHEMA["$defs"]["Server"]["properties"]["listen_addr"]["default"] == ":8080"


@pytest.mark.parametrize(
    ("steps", "valid"),
    [
        ([{"type": "decode"}], True),
        ([{"type": "decode", "params": {"output_mode": "derender"}}], True),
        ([RENDER, {"type": "decode"}], True),
        ([], False),
        ([{"type": "decoder"}], False),
        ([{"type": "render", "params": {"url": "http://r"}}], False),
        ([{"type": "decode", "params": {"output_mode": "ids"}}], False),
        ([{"type": "derender"}], False),
        ([{"type": "render", "params": HERE}], True),
        ([{"type": "render", "params": {"tokenizer": "/m"}}], False),
        ([{"type": "render", "params": {"tool_parser": "hermes"}}], False),
        ([{"type": "render", "params": {**HERE, "address": "http://r"}}], False),
        ([{"type": "decode", "params": {"address": "http://r"}}], False),
        ([{"type": "decode", "params": {"idle_timeout": 30}}], False),
    ],
)
def test_the_schema_knows_the_params_of_each_step(steps: list[Any], valid: bool) -> None:
    assert Draft202012Validator(SCHEMA).is_valid({"pipeline": {"steps": steps}}) is valid


def test_every_key_of_the_schema_has_a_description() -> None:
    bare = [
        f"{section}.{key}"
        for section, described in SCHEMA["$defs"].items()
        for key, value in described["properties"].items()
        if not value.get("description")
    ]
    assert bare == []

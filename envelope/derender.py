"""Bodies of the derender routes, and what their answers make of a generate answer in tokens mode.

A derender service turns token ids into text, reasoning and tool calls, and keeps nothing: whole answers take one call;
a stream takes one call per chunk, each with the state that the call before gave back.

What comes out is in generate's own format, as a worker in ``derender`` mode sends it: a ``message`` on each choice, or
a ``delta`` on each choice of a stream; for completions, which nobody parses, ``text``. Envelopes are rebuilt from that.

Source: vLLM 0.33 ``entrypoints/scale_out/derender`` and ``token_in_token_out/protocol.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.errors import LegUnreadable
from envelope.formats import PATHS, Format
from envelope.generate import DERENDER, TEXT, TOKENS
from envelope.json_codec import without
from envelope.parse_context import with_parse_context
from envelope.rebuild import choices_of, reading

if TYPE_CHECKING:
    from envelope.json_codec import Json

# What of sampling decides how tokens become text.
_DECODING = (
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
# What of a client's body decides what is shown beside the text.
_SHOWN = ("logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids")

_CHOICE = ("index", "token_ids", "finish_reason", "stop_reason", "logprobs")

_CONTEXT = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")

# It is not read, but refused where it is empty.
_PROMPT = "prompt"
_CALL = {"id": "call", "type": "function", "function": {"name": "call", "arguments": "{}"}}


def derender_path(api: Format) -> str:
    """Return the route that an API's answers are made on: completions are text, all else is a chat turn."""
    return PATHS[Format.COMPLETIONS if api is Format.COMPLETIONS else Format.CHAT] + "/derender"


def request_of(api: Format, rendered: Json, body: Json) -> Json:
    """Return the original request as the service wants it, of what it reads: no messages, no media, no prompt.

    Its ``messages`` only tell how many tool calls the conversation holds: some parsers number on from there.
    """
    sampling = rendered.get("sampling_params") or {}
    asked = {name: sampling[name] for name in _DECODING if sampling.get(name) is not None}
    if api is Format.COMPLETIONS:
        return {"prompt": _PROMPT, **asked, **_given(body, _SHOWN)}
    context: Json = with_parse_context(rendered, api, body)["parse_context"]
    calls = context.get("history_tool_call_cnt") or 0
    chat = {"messages": [{"role": "assistant", "content": None, "tool_calls": [_CALL] * calls}] if calls else []}
    asked |= _given(context, _CONTEXT)
    if not asked.get("tools"):
        asked = {name: value for name, value in asked.items() if name not in ("tools", "tool_choice")}
    # With its own token ids it says whether they may be shown: not where they would tell of hidden reasoning.
    return {**chat, **asked, **(_given(body, _SHOWN) if api is Format.CHAT else {}), "return_token_ids": True}


def whole_body(api: Format, reply: Json, rendered: Json, request: Json) -> Json:
    """Return the one call that derenders a whole answer.

    Raises:
        LegUnreadable: the answer has no choices.
    """
    generated = {
        "request_id": reply.get("request_id") or "",
        "output_mode": TOKENS,
        "choices": [_choice(choice) for choice in choices_of(reply) if choice.get("token_ids")],
    }
    prompt = rendered["token_ids"]
    if api is Format.COMPLETIONS:
        return {
            "generate_responses": [generated],
            "prompt_tokens": [len(prompt)],
            "prompt_token_ids": [prompt],
            "completion_request": request,
        }
    return {
        "generate_response": generated,
        "prompt_tokens": len(prompt),
        "prompt_token_ids": prompt,
        "chat_request": request,
    }


def chunk_body(api: Format, chunk: Json, state: Json | None, rendered: Json, request: Json) -> Json:
    """Return the call that derenders one chunk of a stream; ``state`` is what the choice's last call gave back."""
    (choice,) = chunk["choices"]
    generated = {
        "request_id": chunk.get("request_id") or "",
        "output_mode": TOKENS,
        "choices": [_choice(choice)],
    }
    prompt = rendered["token_ids"]
    return {
        "stream": True,
        "generate_chunk": generated,
        "stream_state": state,
        "prompt_tokens": len(prompt),
        "prompt_token_ids": prompt,
        "completion_request" if api is Format.COMPLETIONS else "chat_request": request,
    }


def text_body(token_ids: list[int], finish: Json, state: Json | None, rendered: Json) -> Json:
    """Return the call that tells the text of some tokens of a choice, unparsed, as the engine has it.

    Args:
        finish: why and how the choice ended with these, empty while it goes on.
        state: what the call for the tokens before gave back.
    """
    sampling = rendered.get("sampling_params") or {}
    # A stream's text cannot be cut, so the service takes no stop strings here.
    asked = without(_given(sampling, _DECODING), frozenset(("stop",)))
    choice = _choice({"index": 0, "token_ids": token_ids, **finish})
    return {
        "stream": True,
        "generate_chunk": {"request_id": "", "output_mode": TOKENS, "choices": [choice]},
        "stream_state": state,
        "prompt_token_ids": rendered["token_ids"] if state is None else None,
        "completion_request": {"prompt": _PROMPT, **asked},
    }


def derendered(api: Format, reply: Json, answer: Json) -> Json:
    """Return a whole generate answer with what the service has made of its tokens.

    Raises:
        LegUnreadable: the service's answer has other choices than it was given, or none that can be read.
    """
    given = choices_of(reply)
    with reading("derender"):
        # Completions number choices on from one answer to the next; here there is one.
        made = sorted(answer["choices"], key=lambda choice: choice["index"])
        spoken = [choice["index"] for choice in given if choice.get("token_ids")]
        if len(made) != len(spoken):
            raise LegUnreadable("derender", f"the service was given {len(spoken)} choices and answered {len(made)}")
        by_index = dict(zip(spoken, made, strict=True))
        choices = [_merged(api, choice, by_index.get(choice["index"])) for choice in given]
    return {**reply, "output_mode": TEXT if api is Format.COMPLETIONS else DERENDER, "choices": choices}


def derendered_chunk(api: Format, chunk: Json, made: Json) -> Json:
    """Return one chunk of a generate stream with what the service has made of its tokens."""
    (choice,) = chunk["choices"]
    (ours,) = made["choices"]
    shown: Json = {**choice, "finish_reason": ours["finish_reason"], "stop_reason": ours.get("stop_reason")}
    if api is Format.COMPLETIONS:
        shown |= {"text": ours["text"], "logprobs": _chat_logprobs(ours.get("logprobs"))}
        return {**chunk, "output_mode": TEXT, "choices": [shown]}
    delta = {name: value for name, value in ours["delta"].items() if value and name != "role"}
    for call in delta.get("tool_calls") or ():
        delta.setdefault("content", None)
        call["function"] = {name: value for name, value in (call["function"] or {}).items() if value is not None}
        for name in ("id", "type"):
            if call.get(name) is None:
                call.pop(name, None)
    shown |= {"delta": delta or None, "logprobs": ours.get("logprobs"), "token_ids": ours.get("token_ids")}
    return {**chunk, "output_mode": DERENDER, "choices": [shown]}


def _merged(api: Format, choice: Json, made: Json | None) -> Json:
    """Return a choice with its text or its message; one that ended without a token says nothing."""
    if api is Format.COMPLETIONS:
        return {
            **choice,
            "text": "" if made is None else made["text"],
            "stop_reason": choice.get("stop_reason") if made is None else made.get("stop_reason"),
            "logprobs": None if made is None else _chat_logprobs(made.get("logprobs")),
        }
    if made is None:
        return {**choice, "message": {"role": "assistant", "content": "", "reasoning": None}}
    names = ("message", "logprobs", "finish_reason", "stop_reason", "token_ids")
    return {**choice, **{name: made.get(name) for name in names}}


def _choice(choice: Json) -> Json:
    """Return a choice for the service, which names the stop token: to a worker without a tokenizer the end is one."""
    given = _given(choice, _CHOICE)
    if isinstance(given.get("stop_reason"), int):
        del given["stop_reason"]
    return given


def _chat_logprobs(logprobs: Json | None) -> Json | None:
    """Return a completion's logprobs in chat's shape, in which generate tells them."""
    if logprobs is None:
        return None
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    content = [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": name, "logprob": value} for name, value in (top or {}).items()],
        }
        for token, logprob, top in rows
    ]
    return {"content": content}


def _given(body: Json, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}

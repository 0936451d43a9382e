"""A program that has SGLang's request models read bodies; for the environment of sglang_env.py.

It is given ``[[path, body], ..]``, and its last line is a list of what was made of each: its ``tie`` and its
``stream``, and the fields that are ``unknown`` or ``refused``. The models skip what they do not know, without a word.
"""

import json
import sys

from pydantic import ValidationError
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

# As srt/entrypoints/http_server.py has them.
MODELS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
}


def reading(path, body):
    model = MODELS[path]
    unknown = sorted(body.keys() - model.model_fields.keys())
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        return {"refused": sorted({str(problem["loc"][0]) for problem in error.errors()}), "unknown": unknown}
    tie = {name: value for name, value in request.pd_routing_kwargs().items() if value is not None}
    return {"refused": [], "unknown": unknown, "tie": tie, "stream": request.stream}


print(json.dumps([reading(path, body) for path, body in json.load(sys.stdin)]))

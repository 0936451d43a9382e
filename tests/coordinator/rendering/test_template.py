"""How a template takes content, by vLLM's own walk of its tree: each way in which known templates loop over it."""

from __future__ import annotations

import pytest

from coordinator.rendering.template import content_format, variables

LOOPS = "{% for part in message.content %}{{ part.text }}{% endfor %}"

OPENAI = {
    "attribute": "{% for message in messages %}" + LOOPS + "{% endfor %}",
    "key": "{% for m in messages %}{% for part in m['content'] %}{% endfor %}{% endfor %}",
    "filtered": "{% for m in messages %}{% for part in m['content'] | list %}{% endfor %}{% endfor %}",
    "alias": "{% set all = messages %}{% for m in all %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "slice": "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "namespace": "{% set ns = namespace(rest=messages) %}{% for m in ns.rest %}"
    "{% for p in m.content %}{% endfor %}{% endfor %}",
    "set in a namespace": "{% set ns = namespace() %}{% set ns.rest = messages %}{% for m in ns.rest %}"
    "{% for p in m.content %}{% endfor %}{% endfor %}",
    "variable called content": "{% for m in messages %}{% set content = m.content %}"
    "{% for p in content %}{% endfor %}{% endfor %}",
    "macro": "{% macro show(it) %}{% for p in it %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "macro by name": "{% macro show(it, n=1) %}{% for p in it %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(n=2, it=m.content) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}"
    "{% for p in m.content %}{% endfor %}{% endgeneration %}{% endfor %}",
}
STRING = {
    "none": "",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    "tools": "{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}",
    "other list": "{% for m in history %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "macro of another value": "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.tools) }}{% endfor %}",
    "pairs": "{% for i, m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", OPENAI)
def test_a_template_that_loops_over_content_takes_parts(name: str) -> None:
    assert content_format(OPENAI[name]) == "openai"


@pytest.mark.parametrize("name", STRING)
def test_any_other_template_takes_text(name: str) -> None:
    assert content_format(STRING[name]) == "string"


def test_the_variables_of_a_template_are_those_it_reads_and_does_not_set() -> None:
    template = "{% set x = y %}{% for m in messages %}{{ m }}{{ x }}{% endfor %}{{ enable_thinking }}"
    assert variables(template) == {"y", "messages", "enable_thinking"}

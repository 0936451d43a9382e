"""What a chat template tells of itself: how it takes message content, and which variables it reads.

A template that loops over the parts of ``message.content`` is given a list of parts, any other one a string. vLLM finds
out by walking the template's syntax tree, and its walk is repeated here: a guess of our own would make other prompts.

Source: vLLM 0.33 ``renderers/hf.py`` (Apache-2.0), ``_detect_content_format`` and what it calls.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2.parser import Parser

ContentFormat = Literal["string", "openai"]


class _Generation(jinja2.ext.Extension):
    """Reads ``{% generation %}`` blocks, as transformers' own environment does."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)


def parse(template: str) -> nodes.Template:
    """
    Raises:
        jinja2.TemplateSyntaxError
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    return environment.parse(template)


def variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set."""
    return frozenset(jinja2.meta.find_undeclared_variables(parse(template)))


def takes_system_later(template: str) -> bool:
    """Say whether a template takes a system message after the first one; many refuse it.

    Source: vLLM 0.33 ``AnthropicServingMessages._detect_merge_inline_system``.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(template).render(messages=messages, add_generation_prompt=False)
    except jinja2.TemplateError:
        return False
    return True


def content_format(template: str) -> ContentFormat:
    """Return ``openai`` for a template that loops over content, ``string`` for any other."""
    try:
        return "openai" if next(_content_loops(parse(template)), None) is not None else "string"
    except AssertionError:  # a loop over pairs, which vLLM's walk gives up on
        return "string"


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    messages = list(_message_names(root))
    by_loop, in_macros = _macros(root, messages)
    for loop in root.find_all(nodes.For):
        over, known = loop.iter, by_loop.get(id(loop), set())
        if id(loop) not in in_macros:
            known = known | {"content"}
        if any(_reads(over, name, "content") for name in messages) or _is_one_of(over, known):
            assert isinstance(loop.target, nodes.Name)
            yield loop


def _is_one_of(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _message_names(root: nodes.Template) -> Iterator[str]:
    """Yield the names under which a loop over ``messages`` has each message."""
    lists = list(_aliases(root, "messages"))
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            assert isinstance(loop.target, nodes.Name)
            yield loop.target.name


def _macros(root: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Return, of each loop inside a macro, the parameters that some call gives a message's content; and all loops."""
    by_loop: dict[int, set[str]] = {}
    in_macros: set[int] = set()
    calls = list(root.find_all(nodes.Call))
    for macro in root.find_all(nodes.Macro):
        given: set[str] = set()
        names = {argument.name for argument in macro.args}
        for call in calls:
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            positional = zip((argument.name for argument in macro.args), call.args, strict=False)
            named = ((keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword))
            for name, value in (*positional, *named):
                if name in names and any(_reads(value, message, "content") for message in messages):
                    given.add(name)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if given:
                by_loop[id(loop)] = given
    return by_loop, in_macros


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    """Yield a variable's name, then those of variables that some assignment sets to it or to a part of it."""
    yield name
    seen, left = {name}, deque([name])
    while left:
        current = left.popleft()
        for assign in root.find_all(nodes.Assign):
            for alias in _assigned(assign, current):
                yield alias
                if alias not in seen:
                    seen.add(alias)
                    left.append(alias)


def _assigned(assign: nodes.Assign, name: str) -> Iterator[str]:
    target, value = assign.target, assign.node
    if isinstance(target, nodes.Name):
        if _reads(value, name):
            yield target.name
        if isinstance(value, nodes.Call) and isinstance(value.node, nodes.Name) and value.node.name == "namespace":
            yield from (f"{target.name}.{pair.key}" for pair in value.kwargs if _reads(_value(pair), name))
    elif isinstance(target, nodes.Getattr | nodes.NSRef) and _reads(value, name):
        dotted = _dotted(target)
        if dotted is not None:
            yield dotted


def _value(pair: nodes.Node) -> nodes.Node:
    return pair.value if isinstance(pair, nodes.Keyword) else pair


def _dotted(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    parts: list[str] = []
    while isinstance(node, nodes.Getattr):
        parts.append(node.attr)
        node = node.node
    return ".".join((node.name, *reversed(parts))) if isinstance(node, nodes.Name) else None


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Say whether an expression is the variable, or its key; filters, tests and slices are looked through."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if node is None:
        return False
    return _is_variable(node, name) if key is None else _is_key(node, name, key)


def _is_variable(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Name):
        return node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr) and "." in name:
        base, _, attribute = name.rpartition(".")
        return node.attr == attribute and _is_variable(node.node, base)
    return False


def _is_key(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return _is_variable(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_variable(node.node, name) and node.attr == key

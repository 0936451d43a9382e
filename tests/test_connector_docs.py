"""docs/connectors.md shows the table that the code goes by."""

from __future__ import annotations

from pathlib import Path

from envelope.connectors import KV_CONNECTORS, KvConnector, Several

DOCS = Path(__file__).resolve().parents[1] / "docs" / "connectors.md"

HEAD = (
    "`kv_connector`",
    "Workers run",
    "Steps",
    "Prefill is sent",
    "Decode is sent",
    "When decode is given up, prefill",
    "Blocks that nobody fetched are freed by",
    "`n` above 1",
    "Formats",
    "Held against",
)

SEVERAL = {
    Several.SHARED: "each reads",
    Several.DECODE_ALONE: "decode computes the prompt",
    Several.REFUSED: "400",
}


def code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def row(kind: KvConnector) -> tuple[str, ...]:
    body = "the client's request" if kind.own_body else "one token"
    names = (*kind.prefill, *kind.prefill_adds)
    decode = code(kind.decode_adds) if kind.concurrent else "nothing"
    if kind.needs_handover:
        decode = f"all that prefill returned, if it has {code(kind.required)}"
    return (
        f"`{kind.name}`",
        kind.engine,
        "`prefill-decode`" if kind.concurrent else "`prefill`, `decode`",
        f"{body}, {code(names)}" if names else body,
        decode,
        "runs to its end" if kind.prefill_runs_on else "is given up too" if kind.concurrent else "has ended",
        kind.freed,
        SEVERAL[kind.several],
        "OpenAI" if kind.openai_only else "OpenAI, tokens-in",
        kind.checked,
    )


def table() -> list[str]:
    lines = [HEAD, tuple("---" for _ in HEAD), *map(row, KV_CONNECTORS.values())]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def test_the_docs_show_the_table_of_contracts_as_it_is() -> None:
    """A connector that is added or changed is a line to be copied from here."""
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    assert "\n".join(shown[: len(table())]) == "\n".join(table())


def test_the_docs_say_what_each_connector_s_workers_are_started_with() -> None:
    text = DOCS.read_text()
    assert [name for name in KV_CONNECTORS if f"## {name}" not in text] == []


def test_the_readme_names_each_connector_with_its_steps() -> None:
    readme = (DOCS.parents[1] / "README.md").read_text().splitlines()
    rows = [line for line in readme if line.startswith("| `kv-")]
    named = {name: line for line in rows for name in KV_CONNECTORS if f"`{name}`" in line}
    assert {name: "`prefill-decode`" in line for name, line in named.items()} == {
        name: kind.concurrent for name, kind in KV_CONNECTORS.items()
    }

"""Files that change are read again, once for each change, and a bad one is reported and no more."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from coordinator.security import watch
from coordinator.security.watch import Watch
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_a_file_is_read_again_when_it_has_changed_and_only_then(tmp_path: Path) -> None:
    file, read = tmp_path / "key", []
    file.write_text("one")
    watching = Watch()
    watching.add([str(file)], lambda: read.append(file.read_text()))
    await watching.look()
    assert read == []
    file.write_text("number two")
    await watching.look()
    await watching.look()
    assert read == ["number two"]


async def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """Kubernetes renews a mounted secret so: the files stay, and a link above them moves."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text("same size")
    data, read = tmp_path / "..data", []
    data.symlink_to("old")
    watching = Watch()
    watching.add([str(data / "key")], lambda: read.append(1))
    (tmp_path / "..tmp").symlink_to("new")
    os.replace(tmp_path / "..tmp", data)
    await watching.look()
    assert read == [1]


async def test_what_cannot_be_read_is_reported_once_and_tried_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("one")
    watching, read = Watch(), []

    def renew() -> None:
        if not file.exists():
            raise ValueError(f"{file} cannot be read")
        read.append(file.read_text())

    watching.add([str(file)], renew)
    file.unlink()
    with caplog.at_level(logging.INFO):
        await watching.look()
        await watching.look()
        file.write_text("two")
        await watching.look()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} cannot be read; what was read before is kept",
        f"read again: {file}",
    ]
    assert read == ["two"]


async def test_it_looks_by_itself_and_not_at_all_where_there_is_nothing_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)
    await asyncio.wait_for(Watch().run(), HANG_S)
    file, changed = tmp_path / "key", asyncio.Event()
    file.write_text("one")
    loop, watching = asyncio.get_running_loop(), Watch()
    watching.add([str(file)], lambda: loop.call_soon_threadsafe(changed.set))
    running = asyncio.create_task(watching.run())
    file.write_text("two..")
    await asyncio.wait_for(changed.wait(), HANG_S)
    running.cancel()

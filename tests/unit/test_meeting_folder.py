# SPDX-License-Identifier: Apache-2.0
"""The folder where ranks of one host meet: private, removed by its maker, refused when it is not what it should be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from nvcomm.memory import meeting_folder
from nvcomm.memory.meeting_folder import MeetingFolder


@pytest.fixture(autouse=True)
def folders(monkeypatch):
    """Where a meeting folder is made. Not `tmp_path`, which is too long for a socket's path under pytest-xdist."""
    with tempfile.TemporaryDirectory(prefix="nvcomm-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_it_is_private_and_removed_by_its_maker(folders):
    maker, guest = MeetingFolder(), MeetingFolder()
    maker.create()
    guest.join(maker.path)
    assert maker.path.stat().st_mode & 0o777 == 0o700
    (maker.path / "symm_mem-1").touch()
    guest.remove()
    assert maker.path.exists()
    maker.remove()
    maker.remove()
    assert not list(folders.iterdir())


def test_a_folder_open_to_others_a_link_and_a_missing_one_are_refused(folders):
    maker = MeetingFolder()
    maker.create()
    link = folders / "link"
    link.symlink_to(maker.path)
    with pytest.raises(PermissionError, match="mode 0700"):
        MeetingFolder().join(link)
    maker.path.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 0777"):
        MeetingFolder().join(maker.path)
    with pytest.raises(FileNotFoundError):
        MeetingFolder().join(folders / "missing")


def test_a_folder_of_another_user_is_refused(monkeypatch):
    maker = MeetingFolder()
    maker.create()
    monkeypatch.setattr(meeting_folder.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="owner"):
        MeetingFolder().join(maker.path)


def test_a_path_that_does_not_fit_into_a_socket_address_is_refused(folders, monkeypatch):
    deep = folders / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match="Set TMPDIR to a shorter one"):
        MeetingFolder().create()
    assert not list(deep.iterdir())

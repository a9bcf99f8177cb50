# SPDX-License-Identifier: Apache-2.0
"""The cache folder: nothing that another user could have written is ever returned."""

from __future__ import annotations

import multiprocessing
import os
import stat

import pytest

from nvcomm import kernel_cache
from nvcomm.errors import UsageError
from nvcomm.kernel_cache import KernelCache


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "deep" / "cache")


def test_what_is_stored_is_loaded(cache):
    assert cache.load("a") is None
    cache.store("a", b"object")
    assert cache.load("a") == b"object"
    assert cache.exists("a")
    assert not cache.exists("b")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_open_to_others_is_refused_and_the_error_says_what_to_do(cache, mode):
    cache.store("a", b"object")
    cache.path.chmod(mode)
    for use in (lambda: cache.load("a"), lambda: cache.store("b", b"x"), lambda: cache.exists("a")):
        with pytest.raises(UsageError, match=r"chmod 700"):
            use()
    cache.path.chmod(0o700)
    assert cache.load("a") == b"object"


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.store("a", b"object")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="NVCOMM_CACHE_DIR"):
        cache.load("a")


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a file away: root only")
def test_an_entry_of_another_user_is_refused(cache):
    cache.store("a", b"object")
    os.chown(cache.path / "a", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        cache.load("a")


def test_an_entry_open_to_others_is_refused(cache):
    cache.store("a", b"object")
    (cache.path / "a").chmod(0o622)
    with pytest.raises(UsageError, match="mode 0622"):
        cache.load("a")


def test_a_link_is_not_followed(cache, tmp_path):
    cache.store("a", b"object")
    (cache.path / "b").symlink_to(cache.path / "a")
    with pytest.raises(UsageError, match="Remove it"):
        cache.load("b")


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="NVCOMM_CACHE_DIR"):
        KernelCache(tmp_path / "file").load("a")


def test_a_wrong_umask_opens_nothing(cache):
    before = os.umask(0)
    try:
        cache.store("a", b"object")
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache.path / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize("failing", ["open", "replace"])
def test_a_disk_that_takes_nothing_is_a_warning_and_leaves_nothing(cache, failing, monkeypatch, caplog):
    cache.store("a", b"old")
    real = getattr(os, failing)

    def fail(*args, **kwargs):
        if failing == "replace" or args[1] & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, failing, fail)
    cache.store("a", b"new")
    monkeypatch.undo()
    assert "No space left" in caplog.text
    assert cache.load("a") == b"old"
    assert [entry.name for entry in cache.path.iterdir()] == ["a"]


def test_an_entry_that_is_too_large_to_be_ours_is_damage(cache, monkeypatch):
    cache.store("a", b"object" * 100)
    monkeypatch.setattr(kernel_cache, "MAX_ENTRY_BYTES", 100)
    assert cache.load("a") is None


def test_a_reader_sees_all_of_an_entry_or_none(cache):
    bodies = [bytes([i]) * 200_000 for i in range(4)]
    cache.store("a", bodies[0])
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_store_often, args=(cache, body)) for body in bodies]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        body = cache.load("a")
        assert body in bodies
        seen.add(body[0])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [entry.name for entry in cache.path.iterdir()] == ["a"]


def _store_often(cache, body):
    for _ in range(50):
        cache.store("a", body)

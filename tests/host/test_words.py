# SPDX-License-Identifier: Apache-2.0
"""The assumptions about stores, and the pieces that a gather is made of."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from nvcomm.errors import UnsupportedError
from nvcomm.host import escapes, headers, words
from nvcomm.host import waiting as waiting_module
from nvcomm.host.views import MailboxViews
from nvcomm.host.waiting import SPIN_S, Waiting
from nvcomm.mailbox import EMPTY, ESCAPE, RECORD_TAG, MailboxLayout
from tests.host.conftest import LATE_S

# A peer that clears every word the moment it arrives, faster than Python could, and counts.
WATCHER = """
#include <stdint.h>
void watch(volatile uint32_t *row, int64_t num_words, uint32_t empty, volatile int32_t *stop, int64_t *arrivals) {
    int64_t count = 0;
    for (int last = 0; !last;) {
        last = *stop;
        for (int64_t i = 0; i < num_words; i++)
            if (row[i] != empty) { row[i] = empty; count++; }
    }
    *arrivals = count;
}
"""
ROW_WORDS = 4200


@pytest.fixture(scope="module")
def watcher(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the watcher has to be faster than Python")
    folder = tmp_path_factory.mktemp("watcher")
    (folder / "watch.c").write_text(WATCHER)
    library = folder / "watch.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, folder / "watch.c"], check=True)
    return ctypes.CDLL(str(library))


def arrivals_beyond(watcher, store, sizes: list[int], rounds: int) -> int:
    """How many more words arrived than were sent."""
    row = np.full(ROW_WORDS, EMPTY, np.uint32)
    payload = np.arange(ROW_WORDS, dtype=np.uint32)
    stop, arrivals = np.zeros(1, np.int32), np.zeros(1, np.int64)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (row, stop, arrivals)]
    arguments = (addresses[0], ctypes.c_int64(ROW_WORDS), ctypes.c_uint32(EMPTY), addresses[1], addresses[2])
    thread = threading.Thread(target=watcher.watch, args=arguments)
    thread.start()
    sent = 0
    for call in range(rounds):
        size, offset = sizes[call % len(sizes)], call % 7  # any alignment of whole words
        store(row[offset : offset + size], payload[:size])
        sent += size
        while np.count_nonzero(row != words.EMPTY_WORD):
            pass
    stop[0] = 1
    thread.join()
    return int(arrivals[0]) - sent


SMALL, LARGE = [1, 5, 9, 13, 17, 21, 33, 65, 100, 127], [257, 1001, 2047, 4095]


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_R4_a_word_is_stored_once(watcher, sizes):
    """What the host world is built on: a word stored twice could land behind the peer's clear."""
    assert arrivals_beyond(watcher, words.store_words, sizes, 2000) == 0


def test_R4_a_copy_stores_words_twice(watcher):
    """The negative control, and why `store_words` is no copy: memcpy's head and tail overlap.

    The watcher has to look between two stores, for which it needs a processor of its own: on a busy machine that takes
    more rounds.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: the watcher never looks between two stores")
    deadline = time.monotonic() + 60
    while not (seen := arrivals_beyond(watcher, np.copyto, LARGE, 2000)) and time.monotonic() < deadline:
        pass
    assert seen > 0


def test_other_processors_are_refused(monkeypatch):
    words.require_x86_64()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnsupportedError, match="aarch64"):
        words.require_x86_64()


def test_R1_barrier_takes_a_lock(monkeypatch):
    """On x86-64 taking a lock is a locked instruction; nothing weaker may stand there."""
    taken = []
    real = threading.Lock

    class Counted:
        def __init__(self):
            self._lock = real()

        def __enter__(self):
            taken.append(self._lock.acquire())

        def __exit__(self, *args):
            self._lock.release()

    monkeypatch.setattr(words, "threading", SimpleNamespace(Lock=Counted))
    words.full_barrier()
    assert taken == [True]


def test_first_empty():
    row = np.arange(8, dtype=np.uint32)
    assert words.first_empty(row) == -1
    row[[3, 5]] = EMPTY
    assert words.first_empty(row) == 3


@pytest.mark.parametrize("count", [4, 128, 132, 1024])
def test_R5_escape_and_restore(count, seed):
    numbers = np.random.default_rng(seed)
    plain = numbers.integers(0, 1 << 31, count, np.uint32)
    assert escapes.escape(plain)[0] is plain
    assert escapes.escape(plain)[1:] == ([], 0)
    payload = np.where(numbers.random(count) < 0.3, numbers.choice([EMPTY, ESCAPE], count), plain).astype(np.uint32)
    payload[0] = EMPTY
    before = payload.copy()
    sent, runs, num_chunks = escapes.escape(payload)
    assert (payload == before).all()
    assert (sent != EMPTY).all()
    assert num_chunks == (((payload | 1) == ESCAPE).reshape(-1, 4).any(axis=1)).sum()
    records = np.full((count // 128 + 1, 8), EMPTY, np.uint32)
    for first, run in runs:
        assert (run >> 16 == RECORD_TAG >> 16).all()
        records[first : first + len(run)] = run
    needed = escapes.records_needed(sent)
    assert (escapes.restore(sent, needed, records[needed]) == payload).all()


def test_R5_only_touched_records_travel():
    payload = np.zeros(128 * 6, np.uint32)
    payload[[128 * 1 + 17, 128 * 2, 128 * 5 + 127]] = EMPTY
    _, runs, num_chunks = escapes.escape(payload)
    assert [(first, len(run)) for first, run in runs] == [(1, 2), (5, 1)]
    assert num_chunks == 3
    assert runs[0][1][0].tolist() == [RECORD_TAG, RECORD_TAG | 2, *[RECORD_TAG] * 6]
    assert runs[1][1][0].tolist() == [*[RECORD_TAG] * 7, RECORD_TAG | 1 << 15]


def test_R11_headers_carry_every_field_and_never_look_empty():
    for call in (
        headers.Call("all_gather", "bfloat16", 0, 0, 0),
        headers.Call("all_gather", "complex128", (1 << 48) - 1, 0xFFFAFFFA, headers.MAX_TAG),
        headers.Call("all_gather", "uint8", EMPTY, EMPTY, 0xFFFA),
    ):
        encoded = headers.encode(call)
        assert words.first_empty(encoded) == -1
        assert headers.decode(encoded) == call
    assert headers.decode(headers.encode(headers.Call("all_gather", "quint8", 1, 1, 1))).dtype == "other"


def test_views_cover_the_mailbox_and_do_not_overlap():
    layout = MailboxLayout(3, 1000)
    memory = np.zeros(layout.size_bytes // 4, np.uint32)
    views = MailboxViews(memory, layout)
    for slot in range(2):
        for rank in range(3):
            views.rows[slot][rank] += 1
            views.records[slot][rank] += np.uint32(1)
            views.headers[slot][rank] += 1
    views.faults += np.uint32(1)
    assert (memory == 1).all()
    views.armed += np.uint32(1)
    assert (memory[: layout.faults_base // 4] == 2).all()
    assert (views.faults == 1).all()


def test_waiting_counts_from_the_first_failed_poll_and_ends():
    waiting = Waiting(0.05)
    assert waiting.waited_s == 0.0
    polls = 0
    while waiting.pause():
        polls += 1
    assert polls > 1
    assert waiting.is_long
    assert 0.05 <= waiting.waited_s < 0.05 + LATE_S
    waiting.progress()
    assert not waiting.is_long
    assert waiting.waited_s >= 0.05  # the deadline stays


@pytest.mark.parametrize("timeout_s", [1e-4, 0.02])
def test_a_wait_spins_for_a_moment_and_then_sleeps(monkeypatch, timeout_s):
    """On a clock that only yields (10 us each) and sleeps move."""
    clock, yields, sleeps = [1.0], [], []

    def sleep(seconds):
        sleeps.append(seconds)
        clock[0] += seconds

    def give_way():
        yields.append(clock[0])
        clock[0] += 1e-5

    monkeypatch.setattr(waiting_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(waiting_module, "os", SimpleNamespace(sched_yield=give_way))
    waiting = Waiting(timeout_s)
    while waiting.pause():
        pass
    assert len(yields) == pytest.approx(min(SPIN_S, timeout_s) / 1e-5, abs=1)
    assert sleeps == sorted(sleeps)
    assert all(seconds <= 1e-3 for seconds in sleeps)
    assert bool(sleeps) is (timeout_s > SPIN_S)  # who has to be quick is not put to sleep beyond his time
    spun, slept = len(yields), len(sleeps)
    again = Waiting(1.0)
    while len(sleeps) == slept:
        again.pause()
    again.progress()
    again.pause()
    assert len(yields) == pytest.approx(spun + SPIN_S * 1e5 + 1, abs=1)  # after progress it spins again


def test_a_long_wait_leaves_the_processor_to_others():
    waiting = Waiting(0.3)
    began = time.thread_time()
    while waiting.pause():
        pass
    assert time.thread_time() - began < 0.1

# SPDX-License-Identifier: Apache-2.0
"""A call that may never return is waited for up to a deadline, and not beyond."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from nvcomm.bounded_call import BoundedCall


def test_the_result_comes_back():
    call = BoundedCall(lambda: {"a": 1}, "test")
    assert call.ended(60.0)
    assert call.result() == {"a": 1}


def test_what_the_call_raises_is_raised_where_it_is_waited_for():
    def fail():
        raise KeyError("gone")

    call = BoundedCall(fail, "test")
    assert call.ended(60.0)
    with pytest.raises(KeyError, match="gone"):
        call.result()


def test_past_the_deadline_the_caller_goes_on_and_the_call_may_still_end():
    release = threading.Event()
    call = BoundedCall(lambda: release.wait(60.0), "test")
    started = time.monotonic()
    assert not call.ended(0.1)
    assert 0.1 <= time.monotonic() - started < 20.0
    assert not call.ended()
    release.set()
    assert call.ended(60.0)
    assert call.result() is True


def test_a_thread_that_is_left_behind_keeps_no_process_alive():
    release = threading.Event()
    call = BoundedCall(release.wait, "test")
    assert call._thread.daemon
    release.set()
    assert call.ended(60.0)


def test_an_error_does_not_keep_what_the_call_held():
    """A traceback refers to frames, which refer to the call: a cycle would keep a store until the next collection."""

    class Held:
        pass

    def work(held):
        raise ValueError("no")

    held = Held()
    seen = weakref.ref(held)
    call = BoundedCall(lambda held=held: work(held), "test")
    assert call.ended(60.0)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            call.result()
        del call, held
        # pytest's record of the exception goes with the statement; its frames go with it
        assert seen() is None
    finally:
        gc.enable()

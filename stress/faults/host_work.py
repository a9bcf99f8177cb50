# SPDX-License-Identifier: Apache-2.0
"""What ranks do in a fault between processes: each function is a rank's part, the odd rank's and the others'."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

import torch

from stress.faults.common import WORDS
from stress.faults.host_scene import LIMIT_S, Scene, SignallingTransport

Work = Callable[[Scene], None]


def never_arrives(scene: Scene) -> None:
    if not scene.odd:
        scene.gather_in_vain()


def signals_itself(number: signal.Signals, *, in_time: bool = False) -> Work:
    """Before a call; `in_time`: it goes on before the others give up."""

    def work(scene: Scene) -> None:
        if scene.odd:
            os.kill(os.getpid(), number)
        if scene.odd or in_time:
            scene.gather()
        else:
            scene.gather_in_vain()

    return work


def signals_itself_between_stores(number: signal.Signals) -> Work:
    """In mid-collective: the odd rank's words have reached rank 0 alone."""

    def work(scene: Scene) -> None:
        if scene.odd:
            scene.port.transport = SignallingTransport(number)
        if scene.comm.rank == 0 or scene.odd:
            scene.gather()
        scene.gather_in_vain()

    return work


def one_call_fewer(scene: Scene) -> None:
    for _ in range(2):
        scene.gather()
    never_arrives(scene)


def raises_between_calls(scene: Scene) -> None:
    with contextlib.suppress(ArithmeticError):
        if scene.odd:
            raise ArithmeticError("raised between two calls")
        scene.gather_in_vain()


def leaves_between_calls(scene: Scene) -> None:
    """An exception that nobody catches ends the process, through every `with` and `finally` of it."""
    if scene.odd:
        scene.comm.close()
        os._exit(0)
    scene.gather_in_vain()


def interrupted(scene: Scene) -> None:
    """Ctrl-C while it waits for the others, which come when that has happened."""
    if scene.odd:
        waits = scene.when_it_waits()

        def interrupt() -> None:
            waits.wait(LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with contextlib.suppress(KeyboardInterrupt):
            scene.gather()
    scene.group.barrier("interrupted", LIMIT_S)
    if not scene.odd:
        scene.gather()  # its words are there
        scene.gather_in_vain()


def other_tensor(x: torch.Tensor) -> Work:
    """The odd rank gathers `x`."""

    def work(scene: Scene) -> None:
        scene.gather(x if scene.odd else None)

    return work


def other_operation(scene: Scene) -> None:
    if scene.odd:
        scene.comm.all_reduce(torch.ones(WORDS))
    else:
        scene.gather()


def overlapping_threads(scene: Scene) -> None:
    """Another thread of rank 0 calls while the first waits for the others, and is refused without harm."""
    if scene.comm.rank != 0:
        scene.group.barrier("refused", LIMIT_S)
        scene.gather()
        return
    waits = scene.when_it_waits()
    caller = threading.Thread(target=scene.gather)
    caller.start()
    waits.wait(LIMIT_S)
    try:
        scene.gather()
    finally:
        scene.group.barrier("refused", LIMIT_S)
        caller.join()


def many_calls(scene: Scene) -> None:
    for _ in range(5):
        scene.gather()

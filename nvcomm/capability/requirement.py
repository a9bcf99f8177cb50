# SPDX-License-Identifier: Apache-2.0
"""A named requirement, and what its probe found on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nvcomm.capability.texts import described, one_line

Stage = Literal["config", "device", "weights", "caches", "graph"]
Scope = Literal["same", "rank", "collective"]
Probe = Callable[[], "str | Sequence[str] | None"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Something that has to hold on every rank.

    Attributes:
        name: what is required, for people; unique in a check.
        stage: when it can be known. Probes run stage by stage, within a stage in the order in which they are listed.
        scope: "same": the probe looks at what all ranks share, so its answer is the same everywhere, which is checked.
            "rank": answers may differ, as for a GPU. "collective": the probe itself talks to the peers; it runs on
            every rank once nothing else stands against it, and must end within the timeout of the check.
        probe: returns None or an empty list where it holds, else the reason or reasons why not. Whatever exception it
            raises is a reason, SystemExit included; KeyboardInterrupt alone is not.
    """

    name: str
    stage: Stage
    scope: Scope
    probe: Probe


def position(stage: str) -> int:
    """Where a stage stands in the order in which probes run; one that is none, behind all."""
    stages = get_args(Stage)
    return stages.index(stage) if stage in stages else len(stages)


def label(requirement: Requirement) -> str:
    """How reasons name it."""
    return f"[{requirement.stage}] {requirement.name}"


def reasons_of(requirement: Requirement) -> list[str]:
    """What the probe found, as a list. A rank that left here would leave its peers waiting."""
    try:
        found = requirement.probe()
        if found is None:
            return []
        if isinstance(found, str):
            return [one_line(found) or "the probe gave an empty reason"]
        if isinstance(found, Sequence) and all(isinstance(each, str) for each in found):
            return [one_line(each) or "the probe gave an empty reason" for each in found]
    except KeyboardInterrupt:  # somebody ends this rank, and means to
        raise
    except BaseException as error:  # `sys.exit` in what a probe imports is a reason too
        return [described(error)]
    return [f"the probe returned a {type(found).__name__}; wanted None, a text or a list of texts"]


def mistakes(requirements: Sequence[Requirement]) -> list[str]:
    """What is wrong with the list itself. A reason like any other: raised here, it would leave the peers waiting."""
    names = [each.name for each in requirements]
    twice = sorted({name for name in names if names.count(name) > 1})
    wrong = [f"requirement {name!r} is listed more than once" for name in twice]
    for each in requirements:
        if each.stage not in get_args(Stage) or each.scope not in get_args(Scope):
            wrong.append(
                f"requirement {each.name!r} has stage {each.stage!r}, scope {each.scope!r}; "
                f"wanted one of {get_args(Stage)} and of {get_args(Scope)}"
            )
    return wrong

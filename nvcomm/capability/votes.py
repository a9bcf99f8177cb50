# SPDX-License-Identifier: Apache-2.0
"""The vote: every rank tells what it found, and all of them go on or raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvcomm.capability.facts import PACKAGES, bounded, facts_of
from nvcomm.capability.requirement import Requirement, label, mistakes, position, reasons_of
from nvcomm.capability.texts import described, fitting
from nvcomm.errors import CapabilityError

if TYPE_CHECKING:
    from nvcomm.group import JSON, Group


def check(
    requirements: Sequence[Requirement],
    group: Group,
    timeout_s: float,
    *,
    config: Mapping[str, Any] | None = None,
    packages: Sequence[str] = PACKAGES,
) -> None:
    """Returns on every rank if every requirement holds on every rank, and all run the same versions and configuration.

    Collective. One exchange, and one more for each "collective" requirement.

    Args:
        requirements: the same names, in the same order, on every rank; which is checked.
        group: the ranks.
        timeout_s: bound of the exchange; twice that where the probe before it talked to the peers.
        config: what has to be equal on all ranks: name -> anything with a stable JSON or repr.
        packages: distributions whose versions have to be equal.

    Raises:
        CapabilityError: a rank has a reason, or ranks differ; the same text on every rank, `.reasons` by rank.
        GroupError: a rank did not answer; `.missing` names it.
    """
    ordered = sorted(requirements, key=lambda each: position(each.stage))
    local = [each for each in ordered if each.scope != "collective"]
    found = [(each, reasons_of(each)) for each in local]
    facts = facts_of(ordered, found, config or {}, packages)
    reasons = [f"{label(each)}: {reason}" for each, texts in found for reason in texts]
    reasons += mistakes(ordered)
    told: dict[str, JSON] = {"facts": bounded(facts), "reasons": fitting(reasons)}
    _decide("not every rank can take part", group.exchange("nvcomm.capability", told, timeout_s))
    for each in ordered:
        if each.scope == "collective":
            reasons = [f"{label(each)}: {reason}" for reason in reasons_of(each)]
            answers = group.exchange(f"nvcomm.capability/{each.name}", {"reasons": fitting(reasons)}, 2 * timeout_s)
            _decide("not every rank can take part", answers)


def vote(group: Group, tag: str, attempt: Callable[[], JSON], timeout_s: float) -> list[JSON]:
    """Tries `attempt` on every rank; returns what it returned on each, by rank. Collective.

    What an attempt that succeeded here has built is the caller's to give back if this raises.

    Args:
        group: the ranks.
        tag: names the step, the same on every rank.
        attempt: returns small JSON; its exception is told to all ranks, SystemExit included.
        timeout_s: bound of the wait for the others, from the end of this rank's attempt.

    Raises:
        CapabilityError: it failed on some rank; the same text on every rank. On a rank where it failed, its exception
            is the cause (`__cause__`).
        GroupError: a rank did not answer.
    """
    error: BaseException | None = None
    told: dict[str, JSON] = {}
    try:
        told["value"] = attempt()
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # told to all ranks, and raised on all
        error = caught
        told = {"reasons": [described(caught)]}
    answers = group.exchange(tag, told, timeout_s)
    try:
        _decide(f"{tag} failed", answers)
    except CapabilityError as refusal:
        raise refusal from error
    return [_field(answer, "value") for answer in answers]


def agree(features: Mapping[str, bool], group: Group, timeout_s: float) -> dict[str, bool]:
    """What of the optional `features` every rank has: the AND over the ranks. Collective, one exchange.

    Decide once and keep the answer: a feature that one rank looks up again on its own may be gone there alone.

    Args:
        features: name -> whether this rank has it; the same names on every rank.
        group: the ranks.
        timeout_s: bound of the exchange.

    Raises:
        CapabilityError: ranks name different features; the same text on every rank.
        GroupError: a rank did not answer.
    """
    told: dict[str, JSON] = {name: bool(value) for name, value in features.items()}
    facts: dict[str, JSON] = {"features": ", ".join(told) or "none"}
    answers = group.exchange("nvcomm.features", {"facts": facts, "features": told}, timeout_s)
    _decide("ranks cannot choose their features", answers)
    return {name: all(_field(answer, "features")[name] for answer in answers) for name in told}


def _decide(what: str, answers: Sequence[JSON]) -> None:
    """Raises the same CapabilityError on every rank if any rank has a reason, or if facts differ."""
    reasons = {rank: [str(each) for each in _field(answer, "reasons") or ()] for rank, answer in enumerate(answers)}
    lines = [f"rank {rank}: {text}" for rank, texts in reasons.items() for text in texts]
    facts = [_field(answer, "facts") or {} for answer in answers]
    for name in dict.fromkeys(name for told in facts for name in told):  # in the order in which they were told
        values = [told.get(name, "no value") for told in facts]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            lines.append(f"ranks disagree on {name}: {listed}")
            for rank, value in enumerate(values):
                reasons[rank].append(f"{name}={value}")
    if lines:
        raise CapabilityError(
            "\n".join([f"{what}; start all ranks alike, on machines that meet what is listed:", *lines]),
            {rank: texts for rank, texts in reasons.items() if texts},
        )


def _field(answer: JSON, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None

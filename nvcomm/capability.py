# SPDX-License-Identifier: Apache-2.0
"""Named requirements, and the vote on them: all ranks go on, or all raise the same error that says who cannot and why.

A rank that finds out alone that it cannot take part must not leave: its peers would wait for it, each until its own
deadline, and then name a rank without a reason. So whatever a probe finds, an exception included, is told to the group
first, and every rank decides on the same answers.

    check(requirements, group, timeout_s)   one exchange: reasons, configuration, versions of packages
    vote(group, tag, attempt, timeout_s)    one step of work that may fail on some rank, such as an allocation
    agree(features, group, timeout_s)       optional features: the AND over the ranks

All are collective and blocking, need a group of CPU processes only (`nvcomm.group`), and belong to start-up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvcomm._version import __version__
from nvcomm.errors import CapabilityError, NvcommError

if TYPE_CHECKING:
    from nvcomm.group import JSON, Group

Stage = Literal["config", "device", "weights", "caches", "graph"]
Scope = Literal["same", "rank", "collective"]
Probe = Callable[[], "str | Sequence[str] | None"]

# What compiles and maps memory: ranks that differ here may run different kernels.
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")

# An answer has to fit `nvcomm.group.MAX_ANSWER_BYTES`, escapes included.
MAX_REASON_CHARS = 500
_REASONS_BYTES, _FACTS_BYTES, _FACT_CHARS = 24 << 10, 24 << 10, 200


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
            raises is a reason.
    """

    name: str
    stage: Stage
    scope: Scope
    probe: Probe


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
    ordered = sorted(requirements, key=lambda each: _position(each.stage))
    local = [each for each in ordered if each.scope != "collective"]
    found = [(each, _reasons(each)) for each in local]
    facts = _facts(ordered, found, config or {}, packages)
    reasons = [f"{_label(each)}: {reason}" for each, texts in found for reason in texts]
    reasons += _mistakes(ordered)
    told: dict[str, JSON] = {"facts": _bounded(facts), "reasons": _fitting(reasons)}
    _decide("not every rank can take part", group.exchange("nvcomm.capability", told, timeout_s))
    for each in ordered:
        if each.scope == "collective":
            reasons = [f"{_label(each)}: {reason}" for reason in _reasons(each)]
            answers = group.exchange(f"nvcomm.capability/{each.name}", {"reasons": _fitting(reasons)}, 2 * timeout_s)
            _decide("not every rank can take part", answers)


def vote(group: Group, tag: str, attempt: Callable[[], JSON], timeout_s: float) -> list[JSON]:
    """Tries `attempt` on every rank; returns what it returned on each, by rank. Collective.

    What an attempt that succeeded here has built is the caller's to give back if this raises.

    Args:
        group: the ranks.
        tag: names the step, the same on every rank.
        attempt: returns small JSON; its exception is told to all ranks.
        timeout_s: bound of the wait for the others, from the end of this rank's attempt.

    Raises:
        CapabilityError: it failed on some rank; the same text on every rank. On a rank where it failed, its exception
            is the cause (`__cause__`).
        GroupError: a rank did not answer.
    """
    error: Exception | None = None
    told: dict[str, JSON] = {}
    try:
        told["value"] = attempt()
    except Exception as caught:  # told to all ranks, and raised on all
        error = caught
        told = {"reasons": [_described(caught)]}
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


def _position(stage: str) -> int:
    stages = get_args(Stage)
    return stages.index(stage) if stage in stages else len(stages)


def _label(requirement: Requirement) -> str:
    return f"[{requirement.stage}] {requirement.name}"


def _reasons(requirement: Requirement) -> list[str]:
    """What the probe found, as a list. Never raises: a rank that leaves here would leave its peers waiting."""
    try:
        found = requirement.probe()
        if found is None:
            return []
        if isinstance(found, str):
            return [_one_line(found) or "the probe gave an empty reason"]
        if isinstance(found, Sequence) and all(isinstance(each, str) for each in found):
            return [_one_line(each) or "the probe gave an empty reason" for each in found]
    except Exception as error:
        return [_described(error)]
    return [f"the probe returned a {type(found).__name__}; wanted None, a text or a list of texts"]


def _mistakes(requirements: Sequence[Requirement]) -> list[str]:
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


def _facts(
    requirements: Sequence[Requirement],
    found: Sequence[tuple[Requirement, list[str]]],
    config: Mapping[str, Any],
    packages: Sequence[str],
) -> dict[str, str]:
    """What has to be equal on all ranks: fact -> text."""
    facts = {"requirements": ", ".join(f"{_label(each)} ({each.scope})" for each in requirements) or "none"}
    facts["version of nvcomm"] = __version__
    facts |= {f"version of {name}": _version(name) for name in packages}
    facts |= {name: _stable(value) for name, value in config.items()}
    for each, reasons in found:
        if each.scope == "same":
            facts[f"answer to {_label(each)}"] = "; ".join(reasons) or "holds"
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # broken metadata differs from sound metadata, and must not skip the vote
        return f"unknown ({type(error).__name__})"


def _stable(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except Exception as error:  # a circular structure, keys that cannot be sorted, a repr that fails
        return f"cannot be compared ({_described(error)})"


def _bounded(facts: Mapping[str, str]) -> dict[str, JSON]:
    """The facts within their limit: long values keep their beginning and a digest, far too many become one digest."""
    short: dict[str, JSON] = {
        _clipped(name, _FACT_CHARS): text if len(text) <= _FACT_CHARS else f"{text[:80]}... ({_digest(text)})"
        for name, text in facts.items()
    }
    if len(json.dumps(short)) <= _FACTS_BYTES:
        return short
    return {"configuration": f"{len(facts)} items ({_digest(json.dumps(dict(facts), sort_keys=True))})"}


def _fitting(reasons: Sequence[str]) -> list[JSON]:
    """As many reasons as fit, and how many did not."""
    fitting: list[JSON] = []
    left = _REASONS_BYTES
    for reason in reasons:
        left -= len(json.dumps(reason))
        if left < 0:
            return [*fitting, f"and {len(reasons) - len(fitting)} more reasons"]
        fitting.append(reason)
    return fitting


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


def _described(error: Exception) -> str:
    try:
        text = _one_line(str(error))
    except Exception:  # its __str__ is broken: its type has to do
        text = ""
    if isinstance(error, NvcommError) and text:
        return _clipped(text, MAX_REASON_CHARS)
    return _clipped(f"{type(error).__name__}: {text}" if text else type(error).__name__, MAX_REASON_CHARS)


def _one_line(text: str) -> str:
    return _clipped(" ".join(text.split()), MAX_REASON_CHARS)


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _digest(text: str) -> str:
    return "sha256 " + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

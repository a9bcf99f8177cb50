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

from nvcomm.capability.facts import PACKAGES
from nvcomm.capability.requirement import Probe, Requirement, Scope, Stage
from nvcomm.capability.votes import agree, check, vote

__all__ = ["PACKAGES", "Probe", "Requirement", "Scope", "Stage", "agree", "check", "vote"]

# SPDX-License-Identifier: Apache-2.0
"""What help() and an editor show of the public constructors: every option by name, as `Options` has it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import nvcomm
from nvcomm.options import Options


@pytest.mark.parametrize("build", [nvcomm.Communicator, nvcomm.virtual_world])
def test_every_option_stands_in_the_signature_with_its_type_and_default(build):
    parameters = inspect.signature(build).parameters.values()
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters)
    shown = {each.name: (each.annotation, each.default) for each in parameters if each.kind is each.KEYWORD_ONLY}
    wanted = {field.name: (field.type, field.default) for field in dataclasses.fields(Options)}
    wanted["timeout_s"] = ("float | None", None)  # of NVCOMM_TIMEOUT_S
    assert shown == wanted
    assert list(shown) == list(wanted)

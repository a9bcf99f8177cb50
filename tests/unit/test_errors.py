# SPDX-License-Identifier: Apache-2.0
"""Errors: one base, the documented relations, attributes and messages."""

from __future__ import annotations

import pickle

import pytest

from nvcomm import errors


def test_every_error_has_one_base() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) >= 8
    assert all(issubclass(cls, errors.NvcommError) for cls in classes)


def test_a_usage_error_is_a_value_error() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert not issubclass(errors.UnsupportedError, ValueError)


def test_cuda_error_names_call_and_code() -> None:
    error = errors.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate")
    assert (error.code, error.name, error.call) == (2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate")
    assert str(error) == "cuMemCreate returned CUDA_ERROR_OUT_OF_MEMORY (2)"


def _timeout(root_rank: int | None) -> errors.PeerTimeoutError:
    return errors.PeerTimeoutError(1, 2, generation=7, slot=1, word=40, waited_s=30.0, root_rank=root_rank)


def test_peer_timeout_names_both_ranks_and_the_word() -> None:
    error = _timeout(None)
    assert error.root_rank == 2
    for part in ("rank 1", "30.000 s", "rank 2", "generation 7", "slot 1", "word 40", "reset()"):
        assert part in str(error)
    assert "published nothing" not in str(error)


def test_peer_timeout_follows_the_chain_to_its_root() -> None:
    error = _timeout(3)
    assert (error.src_rank, error.root_rank) == (2, 3)
    assert "rank 3 published nothing" in str(error)


@pytest.mark.parametrize("error", [errors.CapabilityError("no", {1: ["why"]}), errors.GroupError("no", (1, 2))])
def test_details_stay_with_the_error(error: errors.NvcommError) -> None:
    assert vars(error) in ({"reasons": {1: ["why"]}}, {"missing": (1, 2)})


def test_details_default_to_nothing() -> None:
    assert errors.CapabilityError("no").reasons == {}
    assert errors.GroupError("no").missing == ()


@pytest.mark.parametrize(
    "error",
    [errors.UsageError("a"), _timeout(3), errors.CudaError(1, "INVALID", "f"), errors.GroupError("no", (4,))],
)
def test_errors_survive_the_way_from_a_worker_process(error: errors.NvcommError) -> None:
    """Launchers hand a child's exception to the parent through pickle."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)

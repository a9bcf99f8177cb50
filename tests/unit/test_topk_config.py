# SPDX-License-Identifier: Apache-2.0
"""Which top-k kernel a buffer's size takes: it fits shared memory, holds the rows, and few rows take turns."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.topk_config import MAX_COLUMNS, MAX_ROWS, MAX_STEPS, SUPPORTED_K, SharedLayout, choose_config


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, MAX_ROWS),
    st.integers(1, MAX_COLUMNS),
    st.sampled_from(SUPPORTED_K),
    st.sampled_from(["columns", "blocks"]),
    st.sampled_from([78, 114, 132, 148]),
)
def test_every_size_has_a_configuration_that_fits(rows, columns, k, mode, num_sms):
    config = choose_config(rows, columns, k, mode=mode, num_sms=num_sms)
    assert config.quota * config.cluster >= k
    assert config.groups_per_thread * config.threads >= config.quota
    assert config.batches * 8 * config.step_vectors * 8 >= columns
    # Names of batches and vectors have 16 bits, marks of a thread's batches 32.
    assert config.threads * config.batches * 8 <= MAX_STEPS
    assert config.batches <= 32
    # Packed counts have 16 bits for the candidates of all CTAs and for k equal elements of each; headers 13 and 12.
    assert config.cluster * (config.candidate_capacity + k) < 1 << 16
    assert config.candidate_capacity < 1 << 13
    assert config.candidate_capacity % 8 == 0
    assert SharedLayout(config).total_bytes <= 227 * 1024
    assert SharedLayout(config).maxima % 16 == 0
    assert SharedLayout(config).received % 16 == 0


def test_all_rows_are_resident_at_once_up_to_one_a_multiprocessor():
    clusters = [choose_config(rows, 65_536, 512).cluster for rows in range(1, 193)]
    assert all(rows * cluster <= 132 for rows, cluster in enumerate(clusters[:132], 1))
    assert [clusters[rows - 1] for rows in (1, 15, 16, 30, 31, 66, 67, 192)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert choose_config(192, MAX_COLUMNS, 512).cluster == 2


def test_large_buffers_keep_their_place_between_calls():
    always = {(1, 1 << 20), (12, 1 << 20), (24, 1 << 19), (64, 1 << 19), (64, 1 << 20)}
    short = {(24, 1 << 20), (48, 1 << 19), (48, 1 << 20)}
    assert {choose_config(rows, columns, 512).pdl for rows, columns in always} == {"always"}
    assert {choose_config(rows, columns, 512).pdl for rows, columns in short} == {"short"}

# SPDX-License-Identifier: Apache-2.0
"""The oracle: both definitions agree, it can be inverted, and a wrong word tells where it came from."""

from __future__ import annotations

import numpy as np
import pytest

from nvcomm import mailbox
from nvcomm.errors import UsageError
from stress import host_oracle, oracle
from stress.decode import Origin, decode
from stress.host_oracle import HostOracle

WORDS = 4096
RANKS = 4


def sizes(gather: int, replay: int) -> int:
    """Row sizes in words that change from gather to gather."""
    return 512 + 1024 * gather + 64 * (replay % 7)


def not_reserved(row: np.ndarray, first: int = 0) -> int:
    """The first index of a row whose word travels as it is."""
    return next(i for i in range(first, len(row)) if not mailbox.is_reserved(int(row[i])))


def test_mix_is_a_permutation_that_unmix_inverts(seed):
    words = np.random.default_rng(seed).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    assert np.array_equal(host_oracle.unmix(oracle.mix(words, np.uint32)), words)
    assert not np.array_equal(oracle.mix(words, np.uint32), words)


def test_about_one_percent_of_the_words_are_reserved_and_both_kinds_occur():
    rows = HostOracle(3, RANKS).rows(1, 12, 1 << 16)
    share = np.mean((rows | 1) == mailbox.ESCAPE)
    assert 0.009 < share < 0.011
    assert 0.4 < np.mean(rows == mailbox.EMPTY) / share < 0.6


def test_without_reserved_words_the_others_stay_as_they_are():
    plain, mixed = HostOracle(3, RANKS, 0).row(0, 1, 2, WORDS), HostOracle(3, RANKS).row(0, 1, 2, WORDS)
    assert not np.any((plain | 1) == mailbox.ESCAPE)
    assert np.array_equal(
        plain[plain != mixed] & 0xFFFF < oracle.RESERVED_PER_65536, (mixed[plain != mixed] | 1) == mailbox.ESCAPE
    )


def test_no_two_gathers_share_a_key(seed):
    keys = np.concatenate(
        [
            host_oracle.row_keys(host_oracle.seed_key(seed), oracle.MAX_RANKS, gather, replay)
            for gather in range(oracle.GATHERS_PER_REPLAY)
            for replay in [*range(500), oracle.REPLAY_MASK, oracle.REPLAY_MASK - 1]
        ]
    )
    assert len(np.unique(keys)) == len(keys)


def test_a_row_is_the_row_of_rows_and_seeds_differ():
    one, two = HostOracle(1, RANKS), HostOracle(2, RANKS)
    assert np.array_equal(one.rows(2, 9, 100)[3], one.row(3, 2, 9, 100))
    assert np.mean(one.row(0, 0, 0, WORDS) == two.row(0, 0, 0, WORDS)) < 0.01


def test_a_seed_outside_64_bits_is_refused():
    with pytest.raises(UsageError, match="seed -1 is outside"):
        HostOracle(-1, RANKS)


@pytest.mark.parametrize(("age", "kind"), [(0, "stale"), (1, "stale"), (40, "stale"), (-1, "early")])
def test_a_foreign_word_tells_its_rank_gather_replay_and_index(age, kind):
    # A fixed seed: one random word in a thousand passes for another.
    host = HostOracle(21, RANKS)
    replay = 1_000_000
    origin_replay, rank, gather = replay - age, 3, 1
    index = not_reserved(host.row(rank, gather, origin_replay, sizes(gather, origin_replay)), 100)
    seen = int(host.row(rank, gather, origin_replay, index + 1)[index])
    bad = decode(host, 2, Origin(0, 2, replay, 17), seen, sizes)
    assert bad.seen == Origin(rank, gather, origin_replay, index)
    assert bad.kind == kind
    assert bad.expected_word == int(host.row(0, 2, replay, 18)[17])
    assert f"word {index} of rank {rank}, gather {gather} of replay {origin_replay}" in str(bad)
    assert bad.as_json()["seen"] == {"rank": rank, "gather": gather, "replay": origin_replay, "index": index}


def test_a_word_of_the_same_gather_is_misplaced():
    host = HostOracle(5, RANKS)
    index = not_reserved(host.row(1, 0, 77, 512), 8)
    bad = decode(host, 0, Origin(1, 0, 77, 0), int(host.row(1, 0, 77, 512)[index]), sizes)
    assert (bad.kind, bad.seen) == ("misplaced", Origin(1, 0, 77, index))


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (mailbox.EMPTY, "reserved"),
        (mailbox.ESCAPE, "reserved"),
        (0xFFFFFFFF, "filled"),
        (0x418041A8, "addend"),  # 16 and 21 in bf16
        (0x41804208, "addend"),  # 16 and 34: a sum
        (0x4180C1A8, "unknown"),  # 16 and -21
        (0x12345678, "unknown"),
    ],
)
def test_words_without_an_origin_are_named(word, kind):
    bad = decode(HostOracle(11, RANKS), 0, Origin(1, 0, 500, 3), word, sizes)
    assert (bad.kind, bad.seen) == (kind, None)
    assert bad.as_json()["seen_word"] == f"0x{word:08x}"


def test_an_origin_beyond_the_size_of_its_gather_is_not_believed():
    host = HostOracle(5, RANKS)
    beyond = sizes(1, 99)
    index = not_reserved(host.row(2, 1, 99, WORDS), beyond)
    bad = decode(host, 0, Origin(1, 0, 100, 0), int(host.row(2, 1, 99, WORDS)[index]), sizes)
    assert bad.seen != Origin(2, 1, 99, index)


def test_the_late_time_is_bounded_and_varies():
    host = HostOracle(5, RANKS)
    times = {host.late_ns(replay) for replay in range(200)}
    assert len(times) > 150
    assert 0 <= min(times) <= max(times) <= oracle.MAX_LATE_NS

# SPDX-License-Identifier: Apache-2.0
"""Publish: stores into every rank's mailbox, of any bits (R5)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr

from nvcomm import mailbox
from nvcomm.device.view import Mailbox
from nvcomm.mailbox import CHUNK_WORDS, EMPTY, ESCAPE
from nvcomm.outbox import post
from nvcomm.ptx import memory as ptx


def send_words(box: Mailbox, k: int, offset: Int64, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes into the mailbox of the k-th rank after this one, alone."""
    if box.outbox is None:
        ptx.st_relaxed_sys_v4(box.handle.peers[k] + offset, words)
    else:
        post(box.outbox, box.handle.peers[k] + offset, words)


def publish_words(box: Mailbox, offset: Int64, words: tuple[Uint32, ...]) -> None:
    """Stores 16 bytes into every rank's mailbox, this rank's own included."""
    if box.multicast:
        ptx.multimem_st_relaxed_sys_v4(box.handle.multicast_ptr + offset, words)
    else:
        for k in range(box.layout.world_size):
            send_words(box, k, offset, words)


def publish_word(box: Mailbox, offset: Int64, word: Uint32) -> None:
    """Stores 4 bytes into every rank's mailbox, this rank's own included."""
    if box.multicast:
        ptx.multimem_st_relaxed_sys(box.handle.multicast_ptr + offset, word)
    else:
        for peer in box.handle.peers:
            if box.outbox is None:
                ptx.st_relaxed_sys(peer + offset, word)
            else:
                post(box.outbox, peer + offset, (word,))


@cute.jit
def publish_chunk(
    box: Mailbox, row: Int64, chunk: Int32, words: tuple[Uint32, Uint32, Uint32, Uint32], active: Boolean
) -> None:
    """A warp publishes 32 chunks of any bits (R5); lanes whose chunk is not `active` only take part in the vote."""
    reserved = [Boolean((word | Uint32(1)) == Uint32(ESCAPE)) for word in words]
    sent = tuple(word | Uint32(flag) for word, flag in zip(words, reserved, strict=True))
    if active:
        publish_words(box, row + Int64(chunk) * mailbox.CHUNK_BYTES, sent)
    escaped = active & (reserved[0] | reserved[1] | reserved[2] | reserved[3])
    if cute.arch.vote_any_sync(escaped):
        publish_record(box, chunk, words, escaped)


@cute.jit
def publish_record(box: Mailbox, chunk: Int32, words: tuple[Uint32, Uint32, Uint32, Uint32], escaped: Boolean) -> None:
    """A warp publishes which words of its 32 chunks were EMPTY: 4 bits a lane, 16 bits a record word (R5)."""
    lane = cute.arch.lane_idx()
    was_empty = Uint32(0)
    for i in range_constexpr(CHUNK_WORDS):
        was_empty = was_empty | (Uint32(words[i] == Uint32(EMPTY)) << Uint32(i))
    bits = (was_empty * Uint32(escaped)) << Uint32((lane % CHUNK_WORDS) * CHUNK_WORDS)
    bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=1)
    bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=2)
    if lane % CHUNK_WORDS == 0:
        offset = box.record(box.rank, chunk // mailbox.CHUNKS_PER_RECORD) + Int64(lane // CHUNK_WORDS) * 4
        publish_word(box, offset, bits | Uint32(mailbox.RECORD_TAG))
    if escaped:
        ptx.red_add_relaxed_gpu(box.handle.state + mailbox.STATE_ESCAPES * 4, Uint32(1))

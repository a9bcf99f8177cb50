# SPDX-License-Identifier: Apache-2.0
"""Breaks of the GPU code, at least one for each rule of docs/mailbox.md that a kernel or its engine keeps."""

from __future__ import annotations

from tests.mutation import Edit, Mutant

GATHER = "nvcomm/collectives/all_gather.py"
TURN = "nvcomm/collectives/turn.py"
PUBLISH = "nvcomm/device/publish.py"
COLLECT = "nvcomm/device/collect.py"
ESCAPES = "nvcomm/device/escapes.py"
WAIT = "nvcomm/device/wait.py"
CHECKS = "nvcomm/device_checks.py"
TESTS = "tests/kernel"
CPU = "tests/unit/test_gather_on_cpu.py"
HOST = "tests/unit/test_device_engine_host.py"
COMPILED = (
    "tests/unit/test_compile_check_collectives.py::test_compile_check_each_kernel_and_transport"
    "[all_gather 4 ranks, peer, 16-byte accesses-sm_90a]"
)
RESIDENCY = "tests/unit/test_residency.py::test_R8_all_ctas_of_all_ranks_and_their_waiting_dependents_fit"
PUBLISHER = "test_R8_a_publisher_takes_no_shared_memory_and_no_cluster"
OVERLAP = (
    "tests/unit/test_boundary_launches.py::test_R8_a_call_and_what_may_overlap_with_it_have_places[early-two_shot]"
)

MISSING = "missing = any_equals(words, EMPTY, num_rows * CHUNK_WORDS)"
COLLECT_CHUNK = "@cute.jit\ndef collect_chunk("
OTHERS_MISSING = """def others_missing(box, words, src_rank, num_rows):
    found = Boolean(False)
    for r in range(num_rows):
        for i in range(CHUNK_WORDS):
            found = found | ((words[r * CHUNK_WORDS + i] == Uint32(EMPTY)) & (box.rank != src_rank + r))
    return Boolean(found)


"""
FIRST_MISSING = """def first_missing(words, num_rows):
    found = Boolean(False)
    for r in range(num_rows):
        found = found | (words[r * CHUNK_WORDS] == Uint32(EMPTY))
    return Boolean(found)


"""

MUTANTS = (
    Mutant(
        "R1",
        "with an early trigger, a kernel does not wait for the one before it",
        (Edit(TURN, "        cute.arch.griddepcontrol_wait()  # R1 (i)\n", ""),),
        f"{TESTS}/test_back_to_back.py::test_R1_a_call_does_not_overtake_the_one_before[early]",
        on_cpu=f"{CPU}::test_R1_a_call_does_not_overtake_the_one_before[early]",
    ),
    Mutant(
        "R1",
        "no fence between the last store and the trigger",
        (Edit(TURN, "        cute.arch.fence_acq_rel_gpu()\n", ""),),
        COMPILED,
        on_cpu=COMPILED,
    ),
    Mutant(
        "R2",
        "a rank takes its own row as it is, arrived or not",
        (
            Edit(COLLECT, COLLECT_CHUNK, OTHERS_MISSING + COLLECT_CHUNK),
            Edit(COLLECT, MISSING, "missing = others_missing(box, words, src_rank, num_rows)", 2),
        ),
        f"{TESTS}/test_delayed.py::test_delayed_graphs_show_no_wrong_word",
        on_cpu=f"{CPU}::test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink[0]",
    ),
    Mutant(
        "R3",
        "of each chunk one word is cleared",
        (
            Edit(
                COLLECT,
                "ptx.st_relaxed_sys_v4(addr + r * box.layout.row_bytes, (Uint32(EMPTY),) * CHUNK_WORDS)",
                "ptx.st_relaxed_sys(addr + r * box.layout.row_bytes, Uint32(EMPTY))",
            ),
        ),
        f"{TESTS}/test_back_to_back.py::test_R1_a_call_does_not_overtake_the_one_before[safe]",
        on_cpu=f"{CPU}::test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink[0]",
    ),
    Mutant(
        "R3",
        "the last chunk of a call is not cleared",
        (
            Edit(
                GATHER,
                "                device.clear_chunk(box, addr, num_rows)\n",
                "                if chunk < num_chunks - 1:\n"
                "                    device.clear_chunk(box, addr, num_rows)\n",
            ),
        ),
        f"{TESTS}/test_back_to_back.py::test_R1_a_call_does_not_overtake_the_one_before[safe]",
        on_cpu=f"{CPU}::test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink[0]",
    ),
    Mutant(
        "R4",
        "a chunk counts as complete when its first word is there",
        (
            Edit(COLLECT, COLLECT_CHUNK, FIRST_MISSING + COLLECT_CHUNK),
            Edit(COLLECT, MISSING, "missing = first_missing(words, num_rows)", 2),
        ),
        f"{TESTS}/test_delayed.py::test_delayed_graphs_show_no_wrong_word",
        on_cpu=f"{CPU}::test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink[0]",
    ),
    Mutant(
        "R5",
        "reserved words travel as payload",
        (
            Edit(
                PUBLISH,
                "sent = tuple(word | Uint32(flag) for word, flag in zip(words, reserved, strict=True))",
                "sent = words",
            ),
        ),
        f"{TESTS}/test_back_to_back.py::test_R5_reserved_words_in_calls_of_many_sizes[mixed]",
        on_cpu=f"{CPU}::test_R5_words_that_mean_something_else_arrive[4294639610]",
    ),
    Mutant(
        "R5",
        "an escape record is not cleared",
        (
            Edit(
                ESCAPES,
                "                ptx.st_relaxed_sys(addr, Uint32(EMPTY))\n",
                "                ptx.st_relaxed_sys(addr, flags)\n",
            ),
        ),
        f"{TESTS}/test_back_to_back.py::test_R5_reserved_words_in_calls_of_many_sizes[mixed]",
        on_cpu=f"{CPU}::test_R5_words_that_mean_something_else_arrive[4294639610]",
    ),
    Mutant(
        "R6",
        "the slot comes from a host argument, which a graph freezes",
        (
            Edit(
                GATHER,
                "        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)\n",
                "        slot, generation, _, broken = ptx.ld_relaxed_gpu_v4(handle.state)\n"
                "        slot = call.site % Uint32(mailbox.NUM_SLOTS)\n",
            ),
        ),
        f"{TESTS}/test_all_gather.py::test_R6_graphs_of_different_sizes_replay_in_any_order[safe]",
        (16, 8, 4),
        on_cpu=f"{CPU}::test_R2_R3_R4_R6_late_words_of_calls_that_grow_and_shrink[0]",
    ),
    Mutant(
        "R7",
        "whoever finds another call's mark in the busy word goes on",
        (
            Edit(
                CHECKS,
                "if (held != Uint32(0)) & (held != call.site):",
                "if (held != Uint32(0)) & (held == Uint32(0)):",
            ),
        ),
        f"{TESTS}/test_faults.py::test_R7_with_checks_overlapping_graphs_are_recorded",
        on_cpu=f"{CPU}::test_R7_with_checks_overlapping_calls_are_recorded",
    ),
    Mutant(
        "R7",
        "an eager call from another stream does not wait for the last one",
        (Edit("nvcomm/streams.py", "            stream.wait_event(self._event)\n", "            pass\n"),),
        f"{TESTS}/test_all_gather.py::test_R7_an_eager_call_from_another_stream_runs_behind_the_last_one[safe]",
        on_cpu=f"{HOST}::test_R7_an_eager_call_from_another_stream_waits_for_the_last_one",
    ),
    Mutant(
        "R8",
        "the other ranks of a device are not counted",
        (Edit("nvcomm/residency.py", "grids = ranks_on_device * (2 if early_trigger else 1)", "grids = 1"),),
        f"{RESIDENCY}[4-False-0.5-65]",
        on_cpu=f"{RESIDENCY}[4-False-0.5-65]",
    ),
    Mutant(
        "R8",
        "a publisher asks for shared memory, as those that wait for it do",
        (
            Edit(
                "nvcomm/collectives/all_reduce_mhc_kernel.py",
                "        if config.collects:  # a publisher does without",
                "        if True:  # a publisher does without",
            ),
        ),
        f"{TESTS}/test_residency.py::test_R8_a_publisher_finds_room_beside_all_that_wait_for_it[off]",
        on_cpu=f"tests/unit/test_boundary_launches.py::{PUBLISHER}",
    ),
    Mutant(
        "R8",
        "a launch that takes the places of dependents lets them in early",
        (
            Edit(
                "nvcomm/collectives/all_reduce_mhc_launch.py",
                'return 2 * self._max_clusters, "off"',
                "return 2 * self._max_clusters, pdl",
            ),
        ),
        OVERLAP,
        on_cpu=OVERLAP,
    ),
    Mutant(
        "R9",
        "kernels are loaded by their first launch",
        (Edit("nvcomm/collectives/mailbox_kernel.py", "    jit.preload(compiled)  # R9\n", ""),),
        f"{HOST}::test_R9_every_kernel_is_loaded_before_the_first_call_and_fits_as_counted[4]",
        on_cpu=f"{HOST}::test_R9_every_kernel_is_loaded_before_the_first_call_and_fits_as_counted[4]",
    ),
    Mutant(
        "R10",
        "a wait lasts eight times as long as asked",
        (Edit(WAIT, "if now - wait[0] > box.handle.timeout_ns:", "if now - wait[0] > box.handle.timeout_ns * 8:"),),
        f"{TESTS}/test_faults.py::test_R10_a_rank_that_never_arrives_is_named_in_time[100]",
        (16, 8, 4),
        on_cpu=f"{CPU}::test_R10_a_rank_that_does_not_come_is_named_in_time_and_to_everybody",
    ),
    Mutant(
        "R10",
        "a broken communicator goes on as if nothing had happened",
        (Edit(GATHER, "live = Boolean(broken == 0)", "live = Boolean(True)"),),
        f"{TESTS}/test_faults.py::test_R10_a_graph_on_a_broken_communicator_fills_and_touches_nothing",
        on_cpu=f"{CPU}::test_R10_a_rank_that_does_not_come_is_named_in_time_and_to_everybody",
    ),
    Mutant(
        "R10",
        "a rank that gives up tells the host and no other rank",
        (Edit(WAIT, "in (box.handle.fault_record, *targets):", "in (box.handle.fault_record, *targets[:1]):"),),
        f"{TESTS}/test_fault_table.py::test_a_rank_behind_another_that_waits_names_the_root",
        on_cpu=f"{CPU}::test_R10_a_rank_that_does_not_come_is_named_in_time_and_to_everybody",
    ),
    Mutant(
        "R10b",
        "reset() leaves the words of the call that failed",
        (
            Edit(
                "nvcomm/collectives/engine.py",
                "        words[: self.layout.faults_base // 4].fill_(_signed(mailbox.EMPTY))\n",
                "        if generation == self.options.generation:\n"
                "            words[: self.layout.faults_base // 4].fill_(_signed(mailbox.EMPTY))\n",
            ),
        ),
        f"{TESTS}/test_faults.py::test_R10_a_rank_that_never_arrives_is_named_in_time[100]",
        (16, 8, 4),
        on_cpu=f"{HOST}::test_R10b_arming_empties_mailbox_and_state_and_keeps_the_counts[7]",
    ),
    Mutant(
        "R10b",
        "with multicast, reset() does not blank the mailbox before the markers",
        (Edit("nvcomm/collectives/engine.py", "                self._marker.blank()\n", "                pass\n"),),
        f"{HOST}::test_R10b_with_multicast_markers_stand_between_blank_and_arm",
        on_cpu=f"{HOST}::test_R10b_with_multicast_markers_stand_between_blank_and_arm",
    ),
    Mutant(
        "R10b",
        "escape records get no marker",
        (
            Edit(
                "nvcomm/collectives/marker.py",
                "                if lane % CHUNK_WORDS == 0:\n",
                "                if lane == WARP:\n",
            ),
        ),
        f"{TESTS}/test_reset.py::test_R10b_a_marker_is_EMPTY_in_every_word",
        on_cpu="tests/unit/test_marker_on_cpu.py::test_R10b_markers_cover_the_own_rows_and_nothing_else[whole]",
    ),
    Mutant(
        "R11",
        "headers are exchanged and not compared",
        (
            Edit(
                CHECKS,
                "if (seen != mine) & (seen != Uint32(EMPTY)):",
                "if (seen != mine) & (seen == Uint32(EMPTY)):",
            ),
        ),
        f"{TESTS}/test_faults.py::test_R11_a_rank_that_calls_something_else_is_named[odd1-400 bytes of float32]",
        on_cpu=f"{CPU}::test_R11_with_checks_ranks_agree_on_the_call[size]",
    ),
    Mutant(
        "R12",
        "a rank that owns no row is sent nothing",
        (
            Edit(
                "nvcomm/collectives/reduce_scatter.py",
                "return cutlass.max((num_bytes + (CHUNK_BYTES - 1)) // CHUNK_BYTES, 1)",
                "return (num_bytes + (CHUNK_BYTES - 1)) // CHUNK_BYTES",
            ),
        ),
        f"{TESTS}/test_back_to_back.py::test_R12_a_rank_without_rows_waits_for_everybody",
        on_cpu=f"{CPU}::test_R12_a_rank_without_rows_waits_for_everybody",
    ),
    Mutant(
        "R13",
        "ranks are added one after the other",
        (
            Edit(
                "nvcomm/collectives/all_reduce_tree.py",
                "    split = 1 << (len(values) - 1).bit_length() - 1\n",
                "    split = len(values) - 1\n",
            ),
        ),
        f"{TESTS}/test_all_reduce.py::test_R13_rows_growing_and_shrinking_in_one_mailbox[safe-ll]",
        on_cpu="tests/unit/test_reductions_on_cpu.py::test_R13_reductions_in_one_mailbox[fp32-16-5]",
    ),
)

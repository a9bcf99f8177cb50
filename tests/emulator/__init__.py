# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of compiled kernels on the CPU, with numpy: for tests on machines without a GPU.

All threads of a program are one array; an instruction is done for all threads that stand at it at once. Which threads
go on is random, so ranks, warps and lanes come at each other in any order, from a seed.

    ptx         text -> instructions; the compile checks use it too
    names       operands: registers as arrays, constants, addresses
    values      number formats and rounding
    arithmetic  what the arithmetic instructions compute
    accesses    loads, stores, atomics, cp.async
    warps       shuffles, votes, reductions, matrices
    barriers    of CTAs and clusters, mbarriers, st.async, dependent launches
    program     a kernel as steps, and its launches
    threads     what the threads of one program hold and wait for
    memory      global memory, every access checked; words that arrive late
    machine     turns: who goes on, what lands, what the clock says
    ranks       mailboxes and states for the collectives' kernels

It shows that a kernel computes the right thing whatever the order of its threads and the delay of what travels
(published words, asynchronous stores, copies that nobody waited for), touches nothing that it may not, uses shared
memory of CTAs that run, and ends; where it does not end, who waits for what. It does not show that fences are
sufficient: apart from what travels, memory is sequentially consistent. And it says nothing of speed.

An instruction that it does not know is an error when the program is built.
"""

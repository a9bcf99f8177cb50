# SPDX-License-Identifier: Apache-2.0
"""Faults: what may go wrong with a rank, how it has to end, worlds in which it happens. `python -m stress.faults`."""

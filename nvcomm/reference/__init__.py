# SPDX-License-Identifier: Apache-2.0
"""Slow and obviously right: what kernels, transports and stress runs are compared with."""

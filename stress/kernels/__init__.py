# SPDX-License-Identifier: Apache-2.0
"""The harness on the device: kernels that fill inputs and check outputs by the oracle, and one that is late."""

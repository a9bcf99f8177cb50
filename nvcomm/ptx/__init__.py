# SPDX-License-Identifier: Apache-2.0
"""One function per PTX instruction, by kind: `memory`, `cluster`, `mma`. Memory order and scope are in the name."""

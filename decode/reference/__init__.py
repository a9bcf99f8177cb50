# SPDX-License-Identifier: Apache-2.0
"""Plain references, slow and obviously right."""

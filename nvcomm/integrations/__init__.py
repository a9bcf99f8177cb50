# SPDX-License-Identifier: Apache-2.0
"""nvcomm inside other software. Nothing is loaded or patched before its module is imported."""

# SPDX-License-Identifier: Apache-2.0
"""One collective per file: contract, config, kernel, launch."""

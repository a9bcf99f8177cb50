# SPDX-License-Identifier: Apache-2.0
"""The decode step itself: one operation per module, a plain reference beside it in `decode.reference`."""

# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. Builds on a machine without a GPU and without the CuTe DSL; torch may be its CPU build."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nvcomm import __version__  # noqa: E402

project = "nvcomm"
author = "the nvcomm authors"
copyright = "the nvcomm authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"nvcomm {release}"
default_role = "literal"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["cutlass", "cuda", "tvm_ffi", "mpi4py", "vllm"]
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app):
    """Our docstrings write `(*shape)` as Python does; to Sphinx a lone star opens emphasis."""
    app.connect("autodoc-process-docstring", _escape_lone_stars)


def _escape_lone_stars(app, what, name, obj, options, lines):
    lines[:] = [re.sub(r"(?<![\w*`\\])\*(?=\w)(?!\w+\*)", r"\\*", line) for line in lines]

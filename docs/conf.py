"""Sphinx settings."""

import zclip_jax

project = "zclip_jax"
author = "the zclip_jax maintainers"
version = release = zclip_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = [
    "_build",
    "choosing_table.md",
    "evidence/*.md",
    "level_tables.md",
    "muon_table.md",
    "overhead_table.md",
    "overhead_torch_table.md",
]
nitpicky = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
html_theme = "furo"
html_title = f"zclip_jax {release}"

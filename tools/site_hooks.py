"""Hooks of mkdocs.yml: result files of benchmarks become pages, and no page loads anything from elsewhere."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*href=["']?(?:https?:)?//"""
    r"""|class=["']?mermaid""",
    re.IGNORECASE,
)
"""What makes a browser load a file of another host: the theme fetches its library for mermaid diagrams."""
LOADED_BY_STYLE = re.compile(r"""@import\s|url\(["']?(?:https?:)?//""")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the result files of the benchmarks as pages `results/NAME.md`."""
    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the result files at their pages."""
    return re.sub(r"\]\((?:\.\./)+bench/results/", f"]({'../' * page.file.src_uri.count('/')}results/", markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse a site whose pages or style sheets load anything from another host."""
    site = Path(config.site_dir)
    for pattern, suffix in ((LOADED, "*.html"), (LOADED_BY_STYLE, "*.css")):
        for path in site.rglob(suffix):
            if (found := pattern.search(path.read_text())) is not None:
                raise PluginError(f"{path.relative_to(site)} loads something from elsewhere: {found.group()!r}")

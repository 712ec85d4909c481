"""MkDocs hook: pages for files outside of docs/, and links to them.

The files of ``PAGES`` and the notebooks of docs/ become pages. Any other file of the repository that a
page links to becomes a page that shows its source, so that no link of the site needs the repository beside it.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel
from pymdownx import slugs

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "envs/README.md": "trial_envs.md",
    "cluster/README.md": "cluster_files.md",
}
"""Paths on the site by path in the repository."""
NOTEBOOK = ".ipynb"
SOURCES = "repository"
"""Folder of the site with the pages that show source files."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}

# A fenced block or a code span, in which nothing is a link, or the target of a link.
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|(?<=\]\()(?P<path>[^)\s#:]+)(?=[#)])", re.MULTILINE | re.DOTALL)
# The same, or a table's escaped bar: GitHub drops the backslash within code, Python-Markdown keeps it.
_ESCAPED_BAR = re.compile(r"^```.*?^```|(?P<code>`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them, so that one link serves both."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugs.slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``PAGES``, of notebooks and of every file that a page links to.

    Raises:
        PluginError: a link leads to nothing or to a folder.
    """
    root = Path(config.config_file_path).parent
    for origin, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(root / origin).read_text(encoding="utf-8")))
    for notebook in [file for file in files if file.src_uri.endswith(NOTEBOOK)]:
        uri = notebook.src_uri.removesuffix(NOTEBOOK) + ".md"
        files.append(File.generated(config, uri, content=_notebook_page(notebook)))
    for page in list(files.documentation_pages()):
        origin = _origin(page.src_uri)
        for path in _outside_paths(origin, page.content_string):
            uri = _site_uri(path)
            if path in PAGES or files.get_file_from_path(uri):
                continue
            if not (root / path).is_file():
                raise PluginError(f"{origin} links to {path}, which is no file of the repository: link to a file.")
            files.append(_source_page(config, root / path, path, uri))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of the repository to their pages on the site, and table bars for Python-Markdown."""
    here = page.file.src_uri
    if here.startswith(f"{SOURCES}/"):
        return markdown
    origin = _origin(here)

    def target(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        return posixpath.relpath(_site_uri(path), posixpath.dirname(here) or ".")

    text = _LINK.sub(target, markdown)
    return _ESCAPED_BAR.sub(lambda match: match[0].replace(r"\|", "|") if match["code"] else match[0], text)


def _origin(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((origin for origin, page in PAGES.items() if page == uri), f"docs/{uri}")


def _site_uri(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if not path.startswith("docs/"):
        return f"{SOURCES}/{path}.md"
    path = path.removeprefix("docs/")
    return path.removesuffix(NOTEBOOK) + ".md" if path.endswith(NOTEBOOK) else path


def _outside_paths(origin: str, markdown: str) -> set[str]:
    """Return the paths in the repository, outside of docs/, that a page links to."""
    found = {match["path"] for match in _LINK.finditer(markdown)} - {None}
    paths = {posixpath.normpath(posixpath.join(posixpath.dirname(origin), path)) for path in found}
    return {path for path in paths if not path.startswith("docs/")}


def _notebook_page(file: File) -> str:
    """Return a page with a notebook's texts, code and outputs, and a link to the file."""
    name = posixpath.basename(file.src_uri)
    title, *parts = [part for cell in json.loads(file.content_string)["cells"] for part in _cell(cell)]
    heading, _, rest = title.partition("\n")
    link = f'<a href="{name}" download>The notebook itself</a>, to run it in Jupyter.'
    return "\n\n".join([heading, link, rest.strip(), *parts]) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    return [f"```python\n{source}\n```"] + ([f"```text\n{printed.rstrip()}\n```"] if printed else [])


def _source_page(config: MkDocsConfig, file: Path, path: str, uri: str) -> File:
    """Return a page that shows a file."""
    text = file.read_text(encoding="utf-8")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    content = f"# {path}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)

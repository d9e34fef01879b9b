"""Parts of the site that are no pages in docs/: a page for each source file that a page links to,
the pages at the root of the repository, the decisions in the navigation, and llms.txt with the
plain text of each page.

mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

OF_THE_ROOT = {
    "changelog.md": "CHANGELOG.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Pages of the site, and the file of the repository that each shows."""

LINK = re.compile(r"(?<=\]\()([^()#:\s]+)(?=[)#])")
"""A link to a file, not to an address."""

CODE = re.compile(r"(^ *```.*?^ *```$|`[^`]+`)", re.DOTALL | re.MULTILINE)
"""Code in a page, where `models["critic"](batch)` is no link."""

SHOWN = {".json": "json", ".md": "markdown", ".py": "python", ".toml": "toml"}

UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def repository_path(uri: str) -> str:
    """Return the repository's file that holds the text of a page."""
    return OF_THE_ROOT.get(uri, f"docs/{uri}")


def site_uri(path: str) -> str:
    """Return the page or file of the site that shows a file or folder of the repository."""
    for uri, origin in OF_THE_ROOT.items():
        if path == origin:
            return uri
    for shown in (path, f"{path}/index.html"):
        if shown.startswith("docs/") and not shown.endswith(".py") and (ROOT / shown).is_file():
            return shown.removeprefix("docs/")
    return f"source/{path}.md"


def target(origin: str, link: str) -> str:
    """The file or folder of the repository that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def with_links(text: str, uri: str) -> str:
    """The text of a page with its links as they are in the site."""
    origin = repository_path(uri)

    def replaced(match: re.Match[str]) -> str:
        leads_to = site_uri(target(origin, match[1]))
        return posixpath.relpath(leads_to, posixpath.dirname(uri) or ".")

    pieces = CODE.split(text)  # prose and code in turn
    pieces[::2] = [LINK.sub(replaced, prose) for prose in pieces[::2]]
    return "".join(pieces)


def links_of(text: str) -> list[str]:
    """The files that the prose of a page links to."""
    return [link for prose in CODE.split(text)[::2] for link in LINK.findall(prose)]


def files_in(path: str) -> list[str]:
    """List the files of a repository's folder that the site shows; empty for a file."""
    found = (ROOT / path).rglob("*") if (ROOT / path).is_dir() else ()
    shown = (file for file in found if file.suffix in SHOWN and "__pycache__" not in file.parts)
    return sorted(file.relative_to(ROOT).as_posix() for file in shown)


def source_page(path: str) -> str:
    """A file of the repository as a page; of a folder, the files in it."""
    if (ROOT / path).is_file():
        kind = SHOWN.get(Path(path).suffix, "text")
        return f"{UNSEARCHED}# {path}\n\n~~~~~{kind}\n{(ROOT / path).read_text()}~~~~~\n"
    here = posixpath.dirname(site_uri(path))
    lines = [f"- [{file}]({posixpath.relpath(site_uri(file), here)})" for file in files_in(path)]
    return f"{UNSEARCHED}# {path}\n\n" + "\n".join(lines) + "\n"


def named_sources(pages: dict[str, str]) -> set[str]:
    """The files and folders of the repository that pages link to."""
    links = {target(repository_path(uri), link) for uri in pages for link in links_of(pages[uri])}
    return {path for path in links if site_uri(path).startswith("source/")}


def expanded(nav: Sequence[Any]) -> list[Any]:
    """A navigation in which `Title: folder/*` stands for all pages of the folder."""
    return [_expanded(entry) for entry in nav]


def _expanded(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        return {title: expanded(inside)}
    if not inside.endswith("/*"):
        return entry
    pages = sorted((ROOT / "docs" / inside).parent.glob("*.md"))
    return {title: [page.relative_to(ROOT / "docs").as_posix() for page in pages]}


def on_config(config: MkDocsConfig) -> None:
    """Decisions are pages of the navigation."""
    config.nav = expanded(config.nav or [])


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the root's pages, and the sources that pages name."""
    for uri, path in OF_THE_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    named = named_sources(pages)
    inside = {file for path in named for file in files_in(path)}
    for path in sorted(named | {file for file in inside if site_uri(file).startswith("source/")}):
        files.append(File.generated(config, site_uri(path), content=source_page(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to the pages of the sources."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else with_links(markdown, uri)


def on_post_build(config: MkDocsConfig) -> None:
    """The plain text of each page beside it, and llms.txt that lists them."""
    site, listed = Path(config.site_dir), [f"# {config.site_name}\n\n> {config.site_description}\n"]
    for title, uri in leaves(config.nav or []):
        text = (ROOT / repository_path(uri)).read_text()
        (site / uri).write_text(with_links(text, uri))
        listed.append(f"- [{title or heading(text)}]({uri}): {first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(listed) + "\n")


def leaves(nav: Sequence[Any]) -> Iterator[tuple[str | None, str]]:
    """Title (None: the page's own) and page of each entry of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield None, entry
            continue
        ((title, inside),) = entry.items()
        if isinstance(inside, str):
            yield title, inside
        else:
            yield from leaves(inside)


def heading(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a page after its heading, on one line and without links."""
    prose = re.sub(r"^```.*?^```|^#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part for part in re.split(r"\n\n+", prose) if re.match(r"\s*[\w`*]", part)]
    line = (
        " ".join(paragraphs[0].replace("**", "").split()).removeprefix("What. ")
        if paragraphs
        else ""
    )
    return re.split(r"(?<=\.)\s", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line))[0]

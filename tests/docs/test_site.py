"""The site builds in strict mode. Each page is in the navigation, and each link has a target."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import shown_by_browser, wider_than_shown
from pages import DOCS, ROOT, blocks, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as a reader does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


class Links(HTMLParser):
    """A parser that collects the link targets of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := named.get(key))}
        if link := named.get("href" if tag in ("a", "link") else "src"):
            self.links.add(link)


def broken(page: Path, site: Path, anchors: dict[Path, set[str]]) -> list[str]:
    """Return the links of a page that have no target in the site."""
    found = []
    for link in Links(page.read_text()).links:
        path, anchor = urldefrag(link)
        if re.match(r"[a-z]+:", link):
            continue
        leads_to = (page.parent / unquote(path)).resolve() if path else page
        if leads_to.is_dir():
            leads_to /= "index.html"
        if not leads_to.is_file():
            found.append(f"{page.relative_to(site)}: {link}")
        elif anchor and leads_to.suffix == ".html":
            if leads_to not in anchors:
                anchors[leads_to] = Links(leads_to.read_text()).anchors
            if unquote(anchor) not in anchors[leads_to]:
                found.append(f"{page.relative_to(site)}: {link}")
    return found


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    anchors: dict[Path, set[str]] = {}
    shown = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(shown) > 60
    assert [line for page in shown for line in broken(page, site, anchors)] == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text("<a href='b.html'>b</a><a href='#there'><a href='#not'><p id='there'>")
    assert sorted(broken(page, tmp_path, {})) == ["a.html: #not", "a.html: b.html"]


def test_every_page_is_in_the_navigation_and_listed_for_machines(site: Path) -> None:
    listed = (site / "llms.txt").read_text()
    named = re.findall(r"^- \[.+\]\((.+\.md)\): .+", listed, re.MULTILINE)
    assert len(named) == len(set(named)) == listed.count("\n- ")
    assert {page.relative_to(DOCS).as_posix() for page in pages()} <= set(named)
    assert all((site / uri).read_text().strip() for uri in named)
    start = (site / "index.html").read_text()
    assert all(
        f'href="{uri.removesuffix(".md")}.html"' in start for uri in named if uri != "index.md"
    )


def test_the_reference_shows_all_public_names(site: Path) -> None:
    import drivetrain
    from drivetrain import conformance
    from drivetrain.kernel import contract

    for module, page in (
        (drivetrain, "drivetrain"),
        (contract, "kernel"),
        (conformance, "conformance"),
    ):
        text = (site / "reference" / f"{page}.html").read_text()
        names = [name for name in module.__all__ if name != "__version__"]
        shown = set(re.findall(r'id="drivetrain\.[\w.]*?(\w+)"', text))
        assert set(names) - shown == set()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]+)", page.read_text()
        )
        assert loaded == []


def test_code_is_shown_as_it_is_written(site: Path) -> None:
    for page in pages():
        twin = (site / page.relative_to(DOCS)).read_text()
        assert [block.number for block in blocks(page) if block.text not in twin] == [], page.name
    shown = [page.relative_to(site / "source") for page in (site / "source").rglob("*.html")]
    assert [page for page in shown if not (ROOT / page.with_suffix("")).exists()] == []


def test_the_reference_begins_with_what_every_training_uses(site: Path) -> None:
    text = (site / "reference" / "drivetrain.html").read_text()
    found = re.findall(r'<h[23] id="drivetrain\.(\w+)"', text)
    assert found[:3] == ["fit", "Recipe", "Settings"]


def test_a_reader_chooses_between_light_and_dark(site: Path) -> None:
    text = (site / "guides" / "data.html").read_text()
    switches = re.findall(r'data-md-color-media="([^"]*)"[^>]*aria-label="[^"]+"', text)
    assert switches == [
        "(prefers-color-scheme)",
        "(prefers-color-scheme: light)",
        "(prefers-color-scheme: dark)",
    ]


@pytest.mark.slow
def test_no_page_scrolls_sideways_and_no_code_is_cut(site: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(site, tmp_path / "site")
    wide = copy / "wide.html"
    code = f"<pre style='overflow: auto'><code style='display: block'>{'x' * 300}</code></pre>"
    wide.write_text(f"<!doctype html><p style='width: 800px'>wide</p>{code}")
    shown = [
        *copy.glob("*.html"),
        *(copy / "guides").glob("*.html"),
        *(copy / "meshes").glob("*.html"),
        *copy.glob("conformance/*.html"),
    ]
    shown += [copy / "reference" / f"{name}.html" for name in ("drivetrain", "kernel")]
    reported = wider_than_shown(copy, shown, [1280, 390], tmp_path / "profile")
    assert reported == {"wide.html at 390", "code of wide.html at 1280"}


@pytest.mark.slow
def test_a_site_is_searched_without_a_server(site: Path, tmp_path: Path) -> None:
    found = shown_by_browser(f"{(site / 'guides' / 'data.html').as_uri()}?q=surgery", tmp_path)
    assert "own-step.html" in "".join(re.findall(r"<a[^>]*md-search-result__link[^>]*>", found))

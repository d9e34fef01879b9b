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


REPORTS = """
<script>
addEventListener("load", () => {
  const page = document.documentElement;
  const code = [...document.querySelectorAll("pre > code")];
  const hidden = code.map((block) => block.scrollWidth - block.clientWidth);
  const cut = Math.max(0, ...hidden);
  parent.postMessage([location.hash, page.clientWidth, page.scrollWidth, cut], "*");
});
</script>
"""
"""A script for a page. It reports the page's width, the width of its content, and how much of its
widest code is hidden.
"""
ASKS = """
<body><script>
addEventListener("message", (event) => {
  if (!Array.isArray(event.data)) return;
  const line = document.createElement("p");
  line.textContent = event.data.join(" ");
  document.body.append(line);
});
</script>
"""


def browser() -> str:
    """Return the command of a browser, or skip the test."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium or google-chrome is on this machine")
    return chromium


def shown_by_browser(address: str) -> str:
    """Return the page at an address as it is after its scripts have run."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--virtual-time-budget=60000", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    return done.stdout


def wider_than_shown(folder: Path, shown: list[Path], widths: list[int]) -> set[str]:
    """Return the pages in a folder that scroll sideways in a browser's window of one of the widths,
    and the pages whose code is cut off at the largest.
    """
    frames = []
    for page in shown:
        page.write_text(page.read_text() + REPORTS)
        uri = page.relative_to(folder).as_posix()
        frames += [
            f'<iframe src="{uri}#{uri}" width="{width}" height="800"></iframe>' for width in widths
        ]
    (folder / "frames.html").write_text(ASKS + "\n".join(frames))
    text = shown_by_browser((folder / "frames.html").as_uri())
    reported = re.findall(r"<p>#(\S+) (\d+) (\d+) (\d+)</p>", text)
    assert len(reported) == len(frames)
    wide = {
        f"{uri} at {window}" for uri, window, inside, _ in reported if int(inside) > int(window)
    }
    return wide | {
        f"code of {uri} at {window}"
        for uri, window, _, cut in reported
        if int(cut) > 1 and int(window) > max(widths) - 30
    }


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
    reported = wider_than_shown(copy, shown, [1280, 390])
    assert reported == {"wide.html at 390", "code of wide.html at 1280"}


@pytest.mark.slow
def test_a_site_is_searched_without_a_server(site: Path) -> None:
    found = shown_by_browser(f"{(site / 'guides' / 'data.html').as_uri()}?q=surgery")
    assert "own-step.html" in "".join(re.findall(r"<a[^>]*md-search-result__link[^>]*>", found))

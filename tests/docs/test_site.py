"""The site is built, strictly; each page is in its navigation, each link leads somewhere."""

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
from pages import DOCS, ROOT, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as a reader builds it; a warning is an error."""
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
    """Where the links of a page lead, and what can be led to in it."""

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
    """The links of a page that lead nowhere in the site."""
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


TELLS = """
<script>
addEventListener("load", () => {
  const page = document.documentElement;
  parent.postMessage([location.hash, page.clientWidth, page.scrollWidth], "*");
});
</script>
"""
"""Put into a page, it tells whoever shows it how wide it is, and how wide what is in it."""
ASKS = """
<body><script>
addEventListener("message", (told) => {
  const line = document.createElement("p");
  line.textContent = told.data.join(" ");
  document.body.append(line);
});
</script>
"""


def wider_than_shown(chromium: str, folder: Path, shown: list[Path], widths: list[int]) -> set[str]:
    """The pages in a folder that scroll sideways in a browser's window of one of the widths."""
    frames = []
    for page in shown:
        page.write_text(page.read_text() + TELLS)
        uri = page.relative_to(folder).as_posix()
        frames += [
            f'<iframe src="{uri}#{uri}" width="{width}" height="800"></iframe>' for width in widths
        ]
    (folder / "frames.html").write_text(ASKS + "\n".join(frames))
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=60000",
    ]
    command += ["--dump-dom", (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    told = re.findall(r"<p>#(\S+) (\d+) (\d+)</p>", done.stdout)
    assert len(told) == len(frames), done.stderr
    return {f"{uri} at {window}" for uri, window, inside in told if int(inside) > int(window)}


@pytest.mark.slow
def test_no_page_scrolls_sideways(site: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium or google-chrome is on this machine")
    copy = shutil.copytree(site, tmp_path / "site")
    wide = copy / "wide.html"
    wide.write_text("<!doctype html><p style='width: 800px'>wide</p>")
    shown = [
        *copy.glob("*.html"),
        *(copy / "guides").glob("*.html"),
        *copy.glob("conformance/*.html"),
    ]
    shown += [copy / "reference" / f"{name}.html" for name in ("drivetrain", "kernel")]
    assert wider_than_shown(chromium, copy, shown, [1200, 390]) == {"wide.html at 390"}

"""A browser without a window, where the machine has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_REPORTS = """
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
_ASKS = """
<body><script>
addEventListener("message", (event) => {
  if (!Array.isArray(event.data)) return;
  const line = document.createElement("p");
  line.textContent = event.data.join(" ");
  document.body.append(line);
});
</script>
"""
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def shown_by_browser(address: str, profile: Path, milliseconds: int = 60_000) -> str:
    """Return the page at an address as it is after its scripts have run for a time; skip the test
    if the machine has no browser. `profile`: the folder of the browser's own files."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome is on this machine")
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--virtual-time-budget={milliseconds}", f"--user-data-dir={profile}", address]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=400
    )
    return done.stdout


def wider_than_shown(folder: Path, shown: list[Path], widths: list[int], profile: Path) -> set[str]:
    """Return the pages in a folder that scroll sideways in a browser's window of one of the widths,
    and the pages whose code is cut off at the largest. The pages are changed: they report their
    width.
    """
    frames = []
    for page in shown:
        page.write_text(_POLICY.sub("", page.read_text()) + _REPORTS)
        uri = page.relative_to(folder).as_posix()
        frames += [
            f'<iframe src="{uri}#{uri}" width="{width}" height="800"></iframe>' for width in widths
        ]
    (folder / "frames.html").write_text(_ASKS + "\n".join(frames))
    text = shown_by_browser((folder / "frames.html").as_uri(), profile)
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

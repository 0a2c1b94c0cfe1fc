"""A page in a real browser: headless Chromium (Debian's package ``chromium``), or a skip."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

MEASURE = """
function labels(root) {
  // Labels of an axis that lie over another one.
  const found = [];
  for (const plot of root.querySelectorAll('.plot')) {
    for (const side of ['i.x', 'i.y']) {
      const boxes = [...plot.querySelectorAll(side)].map(i => i.getBoundingClientRect());
      boxes.filter(b => b.width).forEach((a, n) => boxes.slice(n + 1).forEach(b => {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
          found.push([side, a.left, b.left]);
      }));
    }
  }
  return found;
}
function measure(frame) {
  const root = frame.contentDocument, view = root.documentElement;
  for (const part of root.querySelectorAll('details')) part.open = true;
  const found = {
    page: view.scrollWidth, window: view.clientWidth, labels: labels(root),
    headings: [...root.querySelectorAll('h2')].map(h => h.textContent),
    scrolling: [...root.querySelectorAll('.scroll')]
      .filter(e => e.scrollWidth > e.clientWidth).length,
  };
  return found;
}
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(measure);
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""


def browser() -> str:
    """The browser's command; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here (scripts/install-system-packages.sh installs it)")
    return found


def run(directory: Path, *words: str) -> str:
    """What Chromium prints; in a profile of its own, without a network."""
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={directory / 'profile'}",
            *words,
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measured(directory: Path, pages: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """The geometry of each (page, width in CSS pixels), all in one start of the browser."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for page, width in pages
    )
    wrapper = directory / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><script>{MEASURE}</script>{frames}'
        '<pre id="found"></pre>',
        encoding="utf-8",
    )
    dumped = run(directory, "--dump-dom", wrapper.as_uri())
    (found,) = re.findall(r'<pre id="found">(.+?)</pre>', dumped, re.DOTALL)
    return list(json.loads(html.unescape(found)))

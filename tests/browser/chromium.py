"""Measures a page in a real browser: a copy of the page gets a probe that writes its findings into the DOM."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip

ERRORS = """<script>
window.__errors = [];
window.addEventListener("error", e => window.__errors.push(String(e.message || e.target)), true);
for (const kind of ["error", "warn"]) {
  console[kind] = (...words) => window.__errors.push(words.join(" "));
}
</script>"""

PROBE = """<script>
window.addEventListener("load", () => {
  const more = document.querySelector(".more"), folded = more ? more.getBoundingClientRect().top : document.body.scrollHeight;
  for (const e of document.querySelectorAll("details")) e.open = true;
  requestAnimationFrame(() => requestAnimationFrame(() => {
  const near = 1.5, seen = e => e.getClientRects().length > 0, path = e =>
    (e.id ? "#" + e.id : e.tagName + "." + (e.getAttribute("class") || "")) + " " + (e.textContent || "").slice(0, 40);
  const svgs = [...document.querySelectorAll("svg:not(svg svg)")].filter(seen);
  const outside = [], empty = [], small = [], clipped = [], wide = [];
  for (const svg of svgs) {
    const box = svg.getBoundingClientRect();
    if (box.width < 50 || box.height < 20) empty.push(path(svg));
    for (const text of [...svg.querySelectorAll("text")].filter(seen)) {
      const t = text.getBoundingClientRect();
      if (t.left < box.left - near || t.right > box.right + near ||
          t.top < box.top - near || t.bottom > box.bottom + near) outside.push(text.textContent);
      const px = parseFloat(getComputedStyle(text).fontSize) * box.width / svg.viewBox.baseVal.width;
      if (px < 9) small.push(text.textContent + " " + px.toFixed(1));
    }
  }
  for (const e of document.querySelectorAll("body *:not(svg *)")) {
    if (!seen(e)) continue;
    const style = getComputedStyle(e);
    if (["hidden", "clip", "auto", "scroll"].includes(style.overflowX) && e.scrollWidth > e.clientWidth + 1) clipped.push(path(e));
    if (e.getBoundingClientRect().right > innerWidth + near) wide.push(path(e));
  }
  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  const root = getComputedStyle(document.documentElement);
  const found = {
    name: location.pathname.split('/').pop().replace('.html', ''), folded, inner: innerWidth, scroll: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    svgs: svgs.length, texts: svgs.reduce((n, s) => n + s.querySelectorAll("text").length, 0),
    unnamed: svgs.filter(s => s.getAttribute("role") !== "img" || !s.getAttribute("aria-label")).length,
    outside, empty, small, clipped, wide, errors: window.__errors, links: ids.length - new Set(ids).size,
    broken: [...document.querySelectorAll("use")].filter(u => !document.querySelector(u.getAttribute("href"))).length,
    overlaps: OVERLAPS(svgs),
    resources: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
    dark: matchMedia("(prefers-color-scheme: dark)").matches, paper: getComputedStyle(document.body).backgroundColor,
    colours: Object.fromEntries(["paper", "ink", "muted", "accent", "good", "bad", "warning", "on-fill", "data", "hash",
      "bottom", "embedding", "interaction", "top", "loss", "backward", "update", "sparse", "extra-1", "extra-2",
      "extra-3", "raised"].map(n => [n, root.getPropertyValue("--" + n).trim()])),
  };
  (window.parent === window ? window : window.parent).postMessage(JSON.stringify(found), "*");
  }));
});
function OVERLAPS(svgs) {
  const hits = [];
  for (const svg of svgs) {
    const texts = [...svg.querySelectorAll("text")].filter(t => t.getClientRects().length);
    const boxes = texts.map(t => t.getBoundingClientRect());
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const a = boxes[i], b = boxes[j], x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 2 && y > 4) hits.push(texts[i].textContent + " | " + texts[j].textContent);
    }
  }
  return hits;
}
</script>"""

WRAPPER = """<!doctype html><body style="margin:0">{frames}<pre id="found"></pre><script>
const all = {{}};
window.addEventListener("message", e => {{
  const found = JSON.parse(e.data);
  all[found.name] = found;
  document.getElementById("found").textContent = JSON.stringify(all);
}});
</script>"""
FRAME = '<iframe src="{name}.html" style="border:0;display:block;width:{width}px;height:{height}px"></iframe>'


def _call(folder: Path, *arguments: str, dark: bool) -> str:
    assert BINARY
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        done = subprocess.run(
            [BINARY, *FLAGS, scheme, f"--user-data-dir={profile}", *arguments, (folder / "wrapper.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return done.stdout


def measure(
    pages: dict[str, Path], folder: Path, *, width: int, dark: bool, height: int = 900
) -> dict[str, dict[str, Any]]:
    """What the probe finds in each page at a width. Pages are in frames, since no window is as narrow as a phone."""
    for name, page in pages.items():
        text = page.read_text()
        text = text.replace("<head>", f"<head>{ERRORS}", 1).replace("</body>", f"{PROBE}</body>", 1)
        (folder / f"{name}.html").write_text(text)
    frames = "".join(FRAME.format(name=name, width=width, height=height) for name in pages)
    (folder / "wrapper.html").write_text(WRAPPER.format(frames=frames))
    size = f"--window-size={max(width, 600)},{height * len(pages)}"
    dom = _call(folder, "--dump-dom", size, "--virtual-time-budget=9000", dark=dark)
    printed = re.search(r'<pre id="found">(.+?)</pre>', dom, re.S)
    assert printed, f"the browser printed nothing: {dom[:300]}"
    measured = dict(json.loads(html.unescape(printed[1])))
    assert set(measured) == set(pages)
    return measured

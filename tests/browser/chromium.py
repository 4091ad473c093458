"""Measures a page in a real browser: a copy of the page gets a probe that writes its findings into the DOM."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
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
  const more = document.querySelector(".more") || document.querySelector("footer");
  const folded = more.getBoundingClientRect().top;
  for (const e of document.querySelectorAll("details")) e.open = true;
  setTimeout(() => {
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
    if (style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1) clipped.push(path(e));
    if (e.getBoundingClientRect().right > innerWidth + near) wide.push(path(e));
  }
  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  const root = getComputedStyle(document.documentElement);
  const found = {
    name: location.pathname.split('/').pop().replace('.html', ''), folded,
    inner: innerWidth, scroll: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
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
  }, 200);
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

WRAPPER = """<!doctype html><body style="margin:0"><pre id="found"></pre><script>
const all = {{}};
window.addEventListener("message", e => {{
  const found = JSON.parse(e.data);
  all[found.name] = found;
  document.getElementById("found").textContent = JSON.stringify(all);
}});
</script>{frames}"""
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


class Browser:
    """A running Chromium with one page, driven over its debugging pipe."""

    def __enter__(self) -> Browser:
        assert BINARY
        self._profile = tempfile.TemporaryDirectory()
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        # Chromium reads commands from 3 and writes answers to 4.
        call = f"exec {shlex.join([BINARY, *flags])} 3<&{commands} 4>&{answers}"
        self._process = subprocess.Popen(
            ["bash", "-c", call], pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._commands)
        os.close(self._answers)
        with contextlib.suppress(OSError):
            self._profile.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                block = os.read(self._answers, 1 << 16)
                assert block, "the browser ended"
                self._rest += block
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What a script gives in the page; None where it fails, as while a page is being loaded."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while self.value(expression) is not True:
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

"""Drives a real browser over its debugging pipe, and measures pages in it."""

from __future__ import annotations

import contextlib
import json
import os
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

ERRORS = """
window.__errors = [];
window.addEventListener("error", e => window.__errors.push(String(e.message || e.target)), true);
for (const kind of ["error", "warn"]) console[kind] = (...words) => window.__errors.push(words.join(" "));
"""
OPEN = """
window.__folded = (document.querySelector(".more") || document.querySelector("footer")).getBoundingClientRect().top;
for (const e of document.querySelectorAll("details")) e.open = true;
"""
PROBE = """JSON.stringify((() => {
  const near = 1.5, seen = e => e.getClientRects().length > 0, path = e =>
    (e.id ? "#" + e.id : e.tagName + "." + (e.getAttribute("class") || "")) + " " + (e.textContent || "").slice(0, 40);
  const svgs = [...document.querySelectorAll("svg:not(svg svg)")].filter(seen);
  const outside = [], empty = [], small = [], clipped = [], wide = [], overlaps = [];
  for (const svg of svgs) {
    const box = svg.getBoundingClientRect();
    if (box.width < 50 || box.height < 20) empty.push(path(svg));
    const texts = [...svg.querySelectorAll("text")].filter(seen), boxes = texts.map(t => t.getBoundingClientRect());
    texts.forEach((text, i) => {
      const t = boxes[i];
      if (t.left < box.left - near || t.right > box.right + near ||
          t.top < box.top - near || t.bottom > box.bottom + near) outside.push(text.textContent);
      const px = parseFloat(getComputedStyle(text).fontSize) * box.width / svg.viewBox.baseVal.width;
      if (px < 9) small.push(text.textContent + " " + px.toFixed(1));
      for (let j = i + 1; j < boxes.length; j++) {
        const x = Math.min(t.right, boxes[j].right) - Math.max(t.left, boxes[j].left);
        const y = Math.min(t.bottom, boxes[j].bottom) - Math.max(t.top, boxes[j].top);
        if (x > 2 && y > 4) overlaps.push(text.textContent + " | " + texts[j].textContent);
      }
    });
  }
  for (const e of document.querySelectorAll("body *:not(svg *)")) {
    if (!seen(e)) continue;
    const style = getComputedStyle(e);
    if (style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1) clipped.push(path(e));
    if (e.getBoundingClientRect().right > innerWidth + near) wide.push(path(e));
  }
  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  const root = getComputedStyle(document.documentElement);
  return {
    folded: window.__folded, inner: innerWidth, scroll: document.documentElement.scrollWidth, svgs: svgs.length,
    unnamed: svgs.filter(s => s.getAttribute("role") !== "img" || !s.getAttribute("aria-label")).length,
    outside, empty, small, clipped, wide, overlaps, errors: window.__errors, links: ids.length - new Set(ids).size,
    broken: [...document.querySelectorAll("use")].filter(u => !document.querySelector(u.getAttribute("href"))).length,
    resources: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    colours: Object.fromEntries(["paper", "ink", "muted", "accent", "good", "bad", "warning", "on-fill", "data", "hash",
      "bottom", "embedding", "interaction", "top", "loss", "backward", "update", "sparse", "extra-1", "extra-2",
      "extra-3", "raised"].map(n => [n, root.getPropertyValue("--" + n).trim()])),
  };
})())"""


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
        self.send("Page.enable")
        self.send("Page.addScriptToEvaluateOnNewDocument", source=ERRORS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(120)
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
        self.value("window.__left = true")
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && !window.__left")

    def measure(self, page: Path, *, width: int, dark: bool) -> dict[str, Any]:
        """What the probe finds in a page at a width, with everything unfolded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.open(page.as_uri())
        self.value(OPEN)
        time.sleep(0.2)
        return dict(json.loads(self.value(PROBE)))

    def value(self, expression: str) -> Any:
        """What a script gives in the page; None where it fails, as while a page is being loaded."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 120.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while self.value(expression) is not True:
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

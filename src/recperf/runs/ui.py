"""A local page of all runs in a folder, for `recperf ui`: it only reads, and only this computer can reach it.

The page asks for `/api/runs` and for the curves of running ones every few seconds. Pages of single runs and of
comparisons are those of `recperf report`. A path of a request is never opened: it names a run of the list.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from msgspec import to_builtins

from ..errors import RecperfError, notice_once
from ..files import open_regular
from ..jsonfile import Struct
from ..tasks import named
from . import bench_report
from .bench import BenchModel
from .compare_report import html_of_runs
from .derive import leading_interval
from .evidence import Evidence, curve, read_peaks, read_profile, task_of
from .record import BENCH, PROFILE_MARK
from .report import formats as fmt
from .report import page, run_report
from .report.charts import grouped
from .report.profiles import report_of
from .report.quality_sections import outcome
from .schemas import BadEvent, Event, parse_events

HOST = "127.0.0.1"
FILES = ("config.json", "result.json", "profile.json", BENCH)
MOST, MOST_LOGS = 1000, 8
"""Runs of the list, the newest."""
RECENT = 20.0
"""Seconds since the last line of its log after which a run that nobody holds is not running."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class UnknownRun(RecperfError):
    """A request for what is not in the list."""


class RunEntry(Struct, kw_only=True):
    """A run as the list shows it."""

    name: str
    """Its path below the folder."""
    state: str
    """running, finished, stopped, profile, bench or damaged."""
    changed: float
    date: str = ""
    """When it was last written to, in the time of this computer."""
    workload: str = ""
    data: str = ""
    """Name of the dataset."""
    quality: str = ""
    outcome: str = ""
    """Whether the target was met, or how the model stands beside its best baseline."""
    resume: str = ""
    """The command that resumes a stopped run."""
    speed: str = ""
    step: str = ""
    limit: str = ""
    problem: str = ""
    """What is wrong with a damaged one."""


class Runs:
    """The runs of a folder; a file is read again only after it changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, tuple[object, RunEntry]] = {}
        self._logs: dict[str, Log] = {}
        self._lock = Lock()
        """While a log is read on."""

    def folders(self) -> dict[str, Path]:
        """Folders of runs, profiles and benches by name, also of runs inside the folder of a bench."""
        marks = (*self.folder.glob("*/config.json"), *self.folder.glob("*/*/config.json"))
        marks = (*marks, *self.folder.glob(f"*/{BENCH}"))
        profiles = (path for path in self.folder.glob(f"*/{PROFILE_MARK}"))
        folders = {path.parent for path in (*marks, *profiles)}
        folders |= {path.parent for path in self.folder.glob("*/events.jsonl")}
        newest = sorted(folders, key=_changed, reverse=True)[:MOST]
        return {path.relative_to(self.folder).as_posix(): path for path in newest}

    def entries(self) -> list[RunEntry]:
        entries, folders = [], self.folders()
        for gone in self._entries.keys() - folders.keys():
            self._entries.pop(gone, None)
        for name, folder in folders.items():
            seen = tuple(_stamp(folder / file) for file in (*FILES, PROFILE_MARK))
            known = self._entries.get(name)
            if known is None or known[0] != seen:
                known = self._entries[name] = (seen, _entry(name, folder))
            entry = known[1]
            if entry.state in ("running", "stopped"):
                entry.state = "running" if _running(folder) else "stopped"
            entry.resume = f"recperf run --resume {shlex.quote(str(folder))}" if entry.state == "stopped" else ""
            entry.changed = _changed(folder)
            entry.date = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.changed))
            entries.append(entry)
        return entries

    def named(self, name: str) -> Path:
        """The folder of a run of the list."""
        folder = self.folders().get(name)
        if folder is None:
            raise UnknownRun("there is no such page or run")
        return folder

    def curves(self, name: str) -> dict[str, list[list[float]]]:
        """The loss and the leading metric over the steps, as points that a curve needs."""
        folder = self.named(name)
        with self._lock:
            # The one that was looked at last comes last.
            log = self._logs.get(name, Log(folder / "events.jsonl"))
            self._logs = {**{other: one for other, one in self._logs.items() if other != name}, name: log}
            for other in [*self._logs][:-MOST_LOGS]:
                del self._logs[other]
            events = log.read()
        run = Evidence(folder)
        task = named(run.config.task) if run.has("config.json") and run.config.task else task_of(events)
        metric = task.leading
        series = {"training loss": curve(events, "loss"), fmt.metric(metric): curve(events, metric)}
        return {
            title: [[group.step, group.mean] for group in grouped(points)] for title, points in series.items() if points
        }

    def page(self, names: list[str]) -> str:
        """The page of a run or a profile, or of runs compared."""
        folders = [self.named(name) for name in names]
        if len(folders) == 1 and (folders[0] / BENCH).exists():
            return page.html_of(bench_report.report(bench_report.read(folders[0]), self._link(folders[0])))
        if len(folders) == 1 and (folders[0] / PROFILE_MARK).exists():
            file = folders[0] / "profile.json"
            return page.html_of(report_of(read_profile(file), read_peaks(file.with_name("peaks.json"))))
        runs = [Evidence(folder) for folder in folders]
        if len(runs) == 1:
            return page.html_of(run_report.report(runs[0], "r1"))
        return html_of_runs(*runs)

    def _link(self, folder: Path) -> bench_report.Link:
        """Links to the runs inside the folder of a bench, as far as the list has them."""
        runs = self.folders()

        def link(model: BenchModel) -> str:
            name = f"{folder.relative_to(self.folder).as_posix()}/{Path(model.run).name}"
            return f"/run?run={quote(name)}" if name in runs else ""

        return link


class Log:
    """Follows the log of a run, which may be written meanwhile: every line is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._end, self._events, self._broken = path, 0, list[Event](), False

    def read(self) -> list[Event]:
        try:
            handle = open_regular(self._path)
        except (OSError, RecperfError):
            return self._events
        with open(handle, "rb") as file:
            if os.fstat(handle).st_size < self._end:
                # A run that was resumed goes back to its checkpoint.
                self._end, self._events, self._broken = 0, [], False
            file.seek(self._end)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        if not self._broken:
            try:
                self._events += parse_events(whole.splitlines())
            except BadEvent:
                self._broken = True
        return self._events


def _entry(name: str, folder: Path) -> RunEntry:
    """What the files of a folder say; whatever is wrong with them is said in the list."""
    entry = RunEntry(name=name, state="stopped", changed=0.0)
    try:
        if (folder / BENCH).exists():
            made = bench_report.read(folder)
            entry.state, entry.workload, entry.data = "bench", "bench", made.data
            entry.quality = next((fmt.sentence(table.answer) for table in made.tables), "no model has a result")
            return entry
        if (folder / PROFILE_MARK).exists():
            profile = read_profile(folder / "profile.json")
            entry.state, entry.limit, entry.step = "profile", profile.verdict.limit, fmt.time(profile.step_ms.p50)
            entry.workload = "program" if profile.workload is None else profile.workload.name or ""
            return entry
        run = Evidence(folder)
        entry.workload, entry.data = run.workload, run.data.name if run.has("data.json") else ""
        if not run.has("result.json"):
            return entry
        result = run.result
        entry.state = "finished"
        quality, performance, task = result.quality, result.performance, run.task
        if (metric := task.leading) in quality.metrics:
            ends = leading_interval(task, quality)
            value = quality.metrics[metric]
            entry.quality = f"{fmt.metric(metric)} {fmt.plus_minus(value, ends) if ends else f'{value:.4f}'}"
        entry.outcome, entry.data = outcome(result), result.data.name
        entry.speed = fmt.throughput(performance.steady or performance.overall)
        entry.step = fmt.time(performance.step_ms.p50) if performance.step_ms else ""
        if run.profile:
            entry.limit = run.profile.verdict.limit
    except (RecperfError, OSError) as error:
        entry.state, entry.problem = "damaged", fmt.printable(str(error))
    return entry


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed(folder: Path) -> float:
    """When a file of the folder was last written, as far as the list shows them."""
    stamps = (_stamp(folder / name) for name in (*FILES, "events.jsonl"))
    return max((stamp[0] for stamp in stamps if stamp), default=0) / 1e9


def _running(folder: Path) -> bool:
    """Whether a process holds the run, as Linux lists locks, or has just written to it. Taking the lock to find out
    could stop a run that starts."""
    if time.time() - _changed(folder) < RECENT:
        return True
    try:
        inode = (folder / ".lock").stat().st_ino
        return any(line.split()[5].endswith(f":{inode}") for line in Path("/proc/locks").read_text().splitlines())
    except (OSError, IndexError):
        return False


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of this computer's own pages; the standard library refuses other methods."""

    runs: Runs
    protocol_version, server_version, sys_version = "HTTP/1.1", "recperf", ""
    timeout = 60

    def do_GET(self) -> None:
        # A name of another host that resolves to this address would give its pages access: DNS rebinding.
        if self.headers.get_all("Host", []) not in ([f"{HOST}:{self.port}"], [f"localhost:{self.port}"]):
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "Open this page by its address.\n")
        try:
            address = urlsplit(self.path)
            names = parse_qs(address.query).get("run", [])
        except ValueError:
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", "This is not an address.\n")
        try:
            kind, content = self._answer(unquote(address.path), names)
        except (RecperfError, OSError) as error:
            lines = error.lines() if isinstance(error, RecperfError) else [f"error: {error}"]
            status = HTTPStatus.NOT_FOUND if isinstance(error, UnknownRun) else HTTPStatus.CONFLICT
            return self._send(status, "text/plain", "\n".join(map(fmt.printable, lines)) + "\n")
        self._send(HTTPStatus.OK, kind, content)

    do_HEAD = do_GET

    @property
    def port(self) -> int:
        return int(self.connection.getsockname()[1])

    def _answer(self, path: str, names: list[str]) -> tuple[str, str]:
        """The type and the content of a page."""
        answers: dict[str, Callable[[], Any]] = {
            "/api/runs": lambda: to_builtins(self.runs.entries()),
            "/api/curves": lambda: self.runs.curves(names[0] if names else ""),
        }
        if path in answers:
            return "application/json", json.dumps(answers[path]())
        if path == "/":
            return "text/html", page.fill("ui.html.j2", folder=str(self.runs.folder.resolve()))
        if len(names) != {"/run": 1, "/compare": 2}.get(path):
            raise UnknownRun("there is no such page or run")
        return "text/html", self.runs.page(names)

    def _send(self, status: HTTPStatus, kind: str, content: str) -> None:
        body = content.encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A request is not worth a line in the terminal."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early, or stays silent, is no error; anything else is one line, and the others go on."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            notice_once(f"a request could not be answered: {type(error).__name__}: {error}")


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the runs in a folder, bound to the loopback address; port 0 takes any that is free."""
    handler = type("RunsHandler", (Handler,), {"runs": Runs(folder)})
    return Server((HOST, port), handler)

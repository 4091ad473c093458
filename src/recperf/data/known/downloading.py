"""Downloads one file over HTTP, for the datasets that recperf knows by name."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import MachineError
from ...stop import poll

_TIMEOUT_S = 30


def fetch(url: str, path: Path, *, fix: str, stream: bool = True) -> None:
    """Download a file in a thread, polling for signals here: a server may not answer. `fix` says what to do where it
    fails. A file that is not streamed is held in memory."""
    try:
        pooch, errors = import_module("pooch"), import_module("requests").exceptions
    except ImportError as error:
        raise MachineError(f"downloading needs the package {error.name or 'pooch'}", fix="pip install pooch") from None
    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_S, stream=stream)
    failures: list[Exception] = []

    def retrieve() -> None:
        try:
            pooch.retrieve(url, None, path.name, path.parent, downloader=downloader)
        except Exception as error:
            failures.append(error)

    # A daemon, since nobody waits for it after a signal.
    thread = threading.Thread(target=retrieve, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        poll()
    for failure in failures:
        reasons = {
            errors.Timeout: f"no answer within {_TIMEOUT_S} s",
            errors.ConnectionError: f"no connection to {urlsplit(url).netloc}",
            errors.ChunkedEncodingError: "the connection broke off",
            (errors.RequestException, ValueError): (str(failure) or type(failure).__name__).splitlines()[0],
        }
        reason = next((reason for kinds, reason in reasons.items() if isinstance(failure, kinds)), None)
        if reason is None:
            raise failure
        raise MachineError(f"the download failed: {reason}", where={"url": url}, fix=fix)

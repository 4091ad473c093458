"""recperf ui [FOLDER]"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import DataError, MachineError
from ..terminal import print_text
from .parse import parse

DESCRIPTION = """Show all runs and benches of a folder in a browser: dataset, date, quality, target, speed and limit of
each, curves of running ones, how to resume stopped ones, the page of a run or bench, two runs compared. Reads only, and
answers only this computer. Ctrl-C ends it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder with the folders of runs."""
    port: Annotated[int, tyro.conf.arg(metavar="PORT")] = 8765
    """Port of 127.0.0.1; 0 takes any that is free."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf ui", description=DESCRIPTION)
    if not options.folder.is_dir():
        raise DataError("there is no such folder", where={"folder": options.folder}, fix="recperf run makes one: runs/")
    from ..runs.ui import HOST, server

    try:
        running = server(options.folder, options.port)
    except (OSError, OverflowError) as error:
        raise MachineError(f"port {options.port} cannot be used: {error}", fix="recperf ui --port 0") from None
    with running, suppress(KeyboardInterrupt):
        print_text(f"http://{HOST}:{running.server_address[1]}/ shows the runs in {options.folder}; Ctrl-C ends it")
        running.serve_forever()
    return 0

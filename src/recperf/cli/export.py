"""recperf export RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..terminal import Terminal, print_json
from .parse import parse
from .score import ModelOptions, open_run

DESCRIPTION = """Write the model of a run as files that need no recperf: each table as Parquet with your own ids, the
dense part as safetensors and as a torch.export program for any number of samples, an example, and a description of the
inputs (README.md, manifest.json). With --since the tables have only the rows that changed."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    output: Path
    """The folder to write; it must not exist."""
    since: Path | None = None
    """Folder of another run, such as the one that this run started from: of each table write only the rows that are new
    or differ from that run's, and the ids that are gone."""
    compiled: bool = False
    """Also write compiled.pt2, the program as AOTInductor compiles it for this processor; needs a C++ compiler."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf export", description=DESCRIPTION)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    manifest = open_run(options, terminal).export(options.output, since=options.since, compiled=options.compiled)
    entries = sum(table["entries"] for table in manifest["tables"])
    terminal.say(f"{len(manifest['tables'])} tables with {entries:,} rows and the dense part are in {options.output}")
    terminal.say(f"  model:  seed {manifest['seed']}, checkpoint {manifest['checkpoint']}")
    for table in manifest["tables"] if options.since else ():
        counts = ", ".join(f"{table[name]:,} {name}" for name in ("new", "changed", "unchanged", "dropped"))
        terminal.say(f"  {table['name']} since {options.since}: {counts}")
    program = manifest["program"]
    terminal.say(
        f"  largest difference of the program on the example: {program['largest_difference']:.2g}, of which rounding "
        f"explains up to {program['expected_difference']:.2g}"
    )
    if options.json:
        print_json({"output": str(options.output), **manifest})
    return 0

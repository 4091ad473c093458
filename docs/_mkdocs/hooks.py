"""Adds to the site the pages that follow from other files, so that nothing is written twice.

README becomes the first page, CONTRIBUTING and the notebooks become pages, and the reference of the command line is
what `recperf COMMAND --help` prints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from recperf import workloads
from recperf.cli import COMMANDS, main
from recperf.cli.parse import flags

ROOT = Path(__file__).parents[2]
WORKLOADS = tuple(workloads.WORKLOADS)
KINDS = {("data", "import"): ("", "--clicks FILE")}
"""Actions whose options depend on another option."""
RULER = "───"
COLUMNS = "120"
"""Width of the help. With more, two frames of options stand side by side."""


def on_config(config: Any) -> Any:
    """Enter the generated pages into the navigation."""
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    entry = next(part for part in reference if "Command line" in part)
    entry["Command line"] = [
        {"Commands": "cli/index.md"},
        *({command: f"cli/{command}.md"} for command in COMMANDS),
    ]
    reference.insert(1, {"Config fields": [{name: f"cli/fields-{name}.md"} for name in WORKLOADS]})
    tutorials = next(part["Tutorials"] for part in config.nav if "Tutorials" in part)
    tutorials[:0] = [{title(path): f"tutorials/{path.stem}.md"} for path in notebooks()]
    return config


def on_files(files: Any, config: Any) -> Any:
    for address, text in pages():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """In the repository a page links to README; on the site README is the first page."""
    return markdown.replace("](../README.md", "](index.md").replace("](../CONTRIBUTING.md", "](contributing.md")


@functools.cache
def pages() -> list[tuple[str, str]]:
    """Address and Markdown of every generated page."""
    every = [
        ("index.md", (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")),
        ("contributing.md", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")),
        ("cli/index.md", overview()),
    ]
    first = every[0][1].replace("](CONTRIBUTING.md", "](contributing.md")
    every[0] = ("index.md", re.sub(r"\]\(examples/([\w-]+)\.ipynb\)", r"](tutorials/\1.md)", first))
    every += [(f"tutorials/{path.stem}.md", notebook(path)) for path in notebooks()]
    every += [(f"cli/{command}.md", command_page(command)) for command in COMMANDS]
    every += [(f"cli/fields-{name}.md", fields_page(name)) for name in WORKLOADS]
    return every


def notebooks() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.ipynb"))


def title(path: Path) -> str:
    return notebook(path).splitlines()[0].removeprefix("# ")


def notebook(path: Path) -> str:
    """The cells of a notebook: text as it is, code as blocks."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    link = f"This page is the notebook `examples/{path.name}`; a test runs it."
    first, _, rest = parts[0].partition("\n")
    return "\n\n".join([first, link, rest.strip(), *parts[1:]])


def overview() -> str:
    rows = "\n".join(f"| [`recperf {name}`]({name}.md) | {text} |" for name, text in COMMANDS.items())
    fields = ", ".join(f"[{name}](fields-{name}.md)" for name in WORKLOADS)
    return (
        "# Commands\n\nThese pages are what `recperf COMMAND --help` prints.\n\n| command | effect |\n|---|---|\n"
        f"{rows}\n\nCommands about a workload take every field of its config as an option: {fields}.\n"
    )


def command_page(command: str) -> str:
    """The help of a command; of one with actions, the help of each."""
    module = importlib.import_module(f"recperf.cli.{command}")
    text = help_of(command)
    if workload_of(text):
        link = f"[{workload_of(text)}](fields-{workload_of(text)}.md)"
        others = ", ".join(f"[{name}](fields-{name}.md)" for name in WORKLOADS if name != workload_of(text))
        note = f"Every field of the workload's config is an option too: {link}, {others}.\n"
        return f"# recperf {command}\n\n{as_markdown(text, leave_out=config_flags(workload_of(text)))}\n{note}"
    if not hasattr(module, "ACTIONS"):
        return f"# recperf {command}\n\n{as_markdown(text)}"
    parts = [f"# recperf {command}\n\n```\n{text.strip()}\n```\n"]
    for action in module.ACTIONS:
        names = getattr(module, "NAMED_BY", {}).get(action, ()) or KINDS.get((command, action), ())
        for heading, helped in helps_of_action(command, action, names):
            parts.append(f"## {heading}\n\n{as_markdown(helped, headings=False)}")
    return "\n".join(parts)


def helps_of_action(command: str, action: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The help of an action; of one whose options differ between datasets, each help with the datasets that have it."""
    if not names:
        yield f"{command} {action}", help_of(command, action)
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(help_of(command, action, *name.split()), []).append(name)
    for text, members in groups.items():
        yield f"{command} {action} {', '.join(members)}".strip(), text


def fields_page(name: str) -> str:
    """The config of a workload, as the options that set its fields."""
    text = help_of("run", name)
    page = f"[{name}](../{name}.md)"
    start = f"# Fields of {name}\n\nThe config of {page}; every command about this workload takes these options.\n\n"
    return start + as_markdown(text, only=config_flags(name), usage=False)


def config_flags(name: str) -> set[str]:
    return set(flags(workloads.find(name).config))


def workload_of(text: str) -> str | None:
    """The workload whose options a help lists, because none was named."""
    match = re.match(r"usage: recperf \S+ (\S+)", text)
    return match[1] if match and match[1] in WORKLOADS else None


@functools.cache
def help_of(*arguments: str) -> str:
    """What `recperf ARGUMENTS --help` prints."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    printed.seek(0)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.read())
    if not text.startswith("usage:"):
        raise RuntimeError(f"recperf {' '.join(arguments)} --help printed no usage: {text[:200]!r}")
    return text


def as_markdown(
    text: str,
    *,
    only: set[str] | None = None,
    leave_out: set[str] | None = None,
    usage: bool = True,
    headings: bool = True,
) -> str:
    """A help as usage, description and one definition list for each frame of options."""
    before, *frames = re.split(r"^╭─ (.*?) ─*╮$", text, flags=re.MULTILINE)
    first, _, description = before.partition("\n")
    description = description.strip()
    description = description[:1].upper() + description[1:]
    lines = [f"```\n{first.removeprefix('usage: ')}\n```", "", escape(description), ""] if usage else []
    for name, content in zip(frames[::2], frames[1::2]):
        # A sentence about the whole frame stands above a line.
        about, _, listed = content.rpartition(f"│ {RULER}")
        options = list(options_of(listed))
        if only is not None:
            options = [option for option in options if flag_of(option[0]) in only]
        if leave_out is not None:
            options = [option for option in options if flag_of(option[0]) not in leave_out]
        options = [option for option in options if not option[0].startswith("-h,")]
        if options and headings:
            lines += [f"## {name[0].upper()}{name[1:]}", "", escape(" ".join(re.findall("[^│\\s]+", about))), ""]
        if options:
            lines += [f"`{names.replace('{None}|', '')}`\n:   {escape(said)}\n" for names, said in options]
    return "\n".join(lines) + "\n"


def options_of(frame: str) -> Iterator[tuple[str, str]]:
    """Name and description of each option in a frame of the help."""
    name, said = "", [""]
    for line in frame.splitlines():
        if not line.startswith("│ "):
            continue
        inside = line.strip("│").removeprefix(" ").rstrip()
        if inside and not inside.startswith(" "):
            if name:
                yield name, " ".join(said).strip()
            name, *said = re.split(r"\s{2,}", inside, maxsplit=1)
        else:
            said.append(inside.strip())
    if name:
        yield name, " ".join(said).strip()


def flag_of(names: str) -> str:
    """`--train.clip {None}|FLOAT` sets `--train.clip`."""
    return re.split(r"[ ,]", names, maxsplit=1)[0]


def escape(text: str) -> str:
    """Angle brackets would be read as HTML; in code, between backticks, they are not."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)

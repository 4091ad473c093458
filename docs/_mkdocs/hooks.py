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

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from recperf import workloads
from recperf.cli import COMMANDS, main
from recperf.cli.parse import help_text

ROOT = Path(__file__).parents[2]
WORKLOADS = tuple(workloads.WORKLOADS)
KINDS = {("data", "import"): ("", "--clicks FILE")}
"""Actions whose options depend on another option."""
COLUMNS = "100"
"""Width of the help."""


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
    """In the repository a page links to README; on the site README is the first page. In a code block a link would be
    shown as it is typed."""
    for code in re.findall(r"^ *```.*?^ *```$", markdown, flags=re.DOTALL | re.MULTILINE):
        if found := re.search(r"\]\([\w./#-]+\)", code):
            raise PluginError(f"{page.file.src_uri}: a link in a code block: {found[0]}")
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
    if not hasattr(module, "ACTIONS"):
        every = getattr(module.Options, "__parameters__", ())
        text = help_of(command) if every else help_of(command, everything=True)
        fields = ", ".join(f"[{name}](fields-{name}.md)" for name in WORKLOADS)
        note = f"\nEvery field of the workload's config is an option too: {fields}.\n" if every else ""
        return f"# recperf {command}\n\n{block(text)}{note}"
    parts = [f"# recperf {command}\n\n{block(help_of(command))}"]
    for action in module.ACTIONS:
        names = getattr(module, "NAMED_BY", {}).get(action, ()) or KINDS.get((command, action), ())
        for heading, helped in helps_of_action(command, action, names):
            parts.append(f"## {heading}\n\n{block(helped)}")
    return "\n".join(parts)


def helps_of_action(command: str, action: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The help of an action; of one whose options differ between datasets, each help with the datasets that have it."""
    if not names:
        yield f"{command} {action}", help_of(command, action, everything=True)
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(help_of(command, action, *name.split(), everything=True), []).append(name)
    for text, members in groups.items():
        yield f"{command} {action} {', '.join(members)}".strip(), text


def fields_page(name: str) -> str:
    """The config of a workload, as the options that set its fields."""
    workload = workloads.find(name)
    default = workload.presets[next(iter(workload.presets))]()
    text = help_text(workload.config, f"recperf run {name}", "", default, everything=True)
    page = f"[{name}](../{name}.md)"
    start = f"# Fields of {name}\n\nThe config of {page}; every command about this workload takes these options.\n\n"
    return start + block(text)


def block(text: str) -> str:
    return f"```\n{text.strip()}\n```\n"


@functools.cache
def help_of(*arguments: str, everything: bool = False) -> str:
    """What `recperf ARGUMENTS --help` prints, or --help-all."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*arguments, "--help-all" if everything else "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    printed.seek(0)
    text = printed.read()
    if not text.startswith("usage:"):
        raise RuntimeError(f"recperf {' '.join(arguments)} --help printed no usage: {text[:200]!r}")
    return text

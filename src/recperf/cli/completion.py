"""recperf completion bash|zsh|fish

The script holds every word that the commands know when it is written, so that completing starts no Python. Only the
names of files, run folders and imported datasets are looked up when they are completed.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

from ..workloads import WORKLOADS, find
from .parse import fields_of, parse, parsed_into
from .terminal import print_text

DESCRIPTION = """Print a script that completes commands, workloads, options, their values, datasets and run folders.

bash: recperf completion bash > ~/.local/share/bash-completion/completions/recperf
zsh: recperf completion zsh > ~/.recperf.zsh; then source it in ~/.zshrc after compinit
fish: recperf completion fish > ~/.config/fish/completions/recperf.fish

Write it again after an update of recperf."""


@dataclass(frozen=True)
class Options:
    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell that will read the script."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf completion", description=DESCRIPTION)
    completions = collect()
    if options.shell == "zsh":
        print_text("autoload -U +X bashcompinit && bashcompinit")
    print_text(fish(completions) if options.shell == "fish" else bash(completions))
    return 0


@dataclass
class Completions:
    """The words that may follow."""

    after: dict[str, list[str]] = field(default_factory=dict)
    """By what stands before: "" before the first word, a command, or a command and its action."""
    fields: dict[str, list[str]] = field(default_factory=dict)
    """The options that set the config of a workload."""
    values: dict[str, dict[str, None]] = field(default_factory=dict)
    """The values of an option in any command, or of an option and the workload before it."""
    with_workload: list[str] = field(default_factory=list)
    """Commands about a workload."""
    with_runs: list[str] = field(default_factory=list)
    """Commands, or commands and actions, about run folders."""
    summaries: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, first: Iterable[str], kinds: Iterable[Any], *, leave_out: Iterable[str] = ()) -> None:
        """Add a place: the words that come first there, and the options of the classes that it is parsed into."""
        options: dict[str, None] = {}
        for kind in kinds:
            for name, hint, positional in fields_of(kind):
                if positional:
                    if name in ("run", "runs") and place not in self.with_runs:
                        self.with_runs.append(place)
                    continue
                options |= dict.fromkeys(flags_of(name, hint))
                if values := choices(hint):
                    self.values.setdefault(f"--{name}", {}).update(dict.fromkeys(values))
        self.after[place] = [*first, *(flag for flag in options if flag not in set(leave_out)), "--help"]


def collect() -> Completions:
    """Ask every command which options it has."""
    from . import COMMANDS

    completions = Completions(summaries=COMMANDS)
    for name in WORKLOADS:
        kind = find(name).config
        completions.add(name, (), (kind,))
        completions.fields[name] = completions.after.pop(name)[:-1]
        completions.values[f"--preset {name}"] = dict.fromkeys(find(name).presets)
    config = {flag for flags in completions.fields.values() for flag in flags}
    for name in COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        actions = getattr(module, "ACTIONS", {})
        for action in actions:
            named = getattr(module, "NAMED_BY", {}).get(action, ())
            calls = getattr(module, "CALLS", {}).get(action) or [[one] for one in named] or [[]]
            kinds = [parsed_into(module.command, [action, *call]) for call in calls]
            completions.add(f"{name} {action}", named, [kind for kind in kinds if kind])
        if actions:
            completions.after[name] = [*actions, "--help"]
            continue
        kind = parsed_into(module.command, [])
        about_workload = kind is not None and any(option == "preset" for option, _, _ in fields_of(kind))
        completions.add(name, WORKLOADS if about_workload else (), [kind] if kind else (), leave_out=config)
        completions.with_workload += [name] if about_workload else []
    completions.after[""] = [*COMMANDS, "--help", "--version"]
    return completions


def flags_of(name: str, hint: Any) -> list[str]:
    """The flags that set a field: a switch can also be set off."""
    head, dot, last = name.rpartition(".")
    return [f"--{name}", f"--{head}{dot}no-{last}"] if hint is bool else [f"--{name}"]


def choices(hint: Any) -> list[str]:
    """The words that a type allows, where it names them."""
    if typing.get_origin(hint) is Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [word for part in typing.get_args(hint) for word in choices(part)]


BASH = """# Completion of recperf for bash, and for zsh with bashcompinit: written by `recperf completion`.
_recperf_after() {
    case "$1" in
@AFTER@
    esac
}
_recperf_fields() {
    case "$1" in
@FIELDS@
    esac
}
_recperf_values() {
    case "$1" in
@VALUES@
    esac
}
_recperf_about() {
    case "$1" in
        @WORKLOAD@) echo workload ;;
        @RUNS@) echo runs ;;
    esac
}
_recperf_datasets() {
    local folder
    for folder in "${RECPERF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/recperf}"/data/*/; do
        folder=${folder%/}
        folder=${folder##*/}
        if [ "$folder" != "*" ]; then echo "$folder"; fi
    done
}
_recperf_matching() {
    # Only what begins like the word; names of files are never expanded.
    local word
    while IFS= read -r word; do
        case "$word" in "$1"*) COMPREPLY+=("$word") ;; esac
    done
}
_recperf_files() {
    local word
    compopt -o filenames 2>/dev/null
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$1" -- "$2")
}
_recperf() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"
    local place="$command" about values workload="micro-dlrm" index=2
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        _recperf_matching "$cur" < <(_recperf_after "")
        return
    fi
    if [ "$COMP_CWORD" -gt 2 ] && [ -n "$(_recperf_after "$command ${COMP_WORDS[2]}")" ]; then
        place="$command ${COMP_WORDS[2]}"
    fi
    about=$(_recperf_about "$place")
    while [ "$index" -lt "$COMP_CWORD" ]; do
        if [ -n "$(_recperf_fields "${COMP_WORDS[index]}")" ]; then workload="${COMP_WORDS[index]}"; fi
        index=$((index + 1))
    done
    case "$prev" in
        --resume|--run-dir) _recperf_files -d "${cur:-runs/}"; return ;;
        --data) _recperf_matching "$cur" < <(_recperf_datasets; echo "@BUILTIN@" | tr " " "\n"); return ;;
        --*)
            values=$(_recperf_values "$prev $workload"; _recperf_values "$prev")
            if [ -n "$values" ]; then _recperf_matching "$cur" <<< "$values"; return; fi ;;
    esac
    case "$cur" in
        -*) ;;
        *)
            if [ "$about" = runs ]; then _recperf_files -d "${cur:-runs/}"; return; fi
            case "$place" in
                "data check"|"data info"|"data reuse") _recperf_matching "$cur" < <(_recperf_datasets) ;;
            esac ;;
    esac
    _recperf_matching "$cur" < <(_recperf_after "$place")
    if [ "$about" = workload ]; then _recperf_matching "$cur" < <(_recperf_fields "$workload"); fi
    case "$cur" in
        -*) ;;
        ?*) if [ "${#COMPREPLY[@]}" -eq 0 ]; then _recperf_files -f "$cur"; fi ;;
    esac
}
complete -F _recperf recperf"""


def bash(completions: Completions) -> str:
    """The script for bash: tables of words, and a function that chooses from them."""
    from ..data.datasets import BUILT_IN

    tables = {
        "@AFTER@": completions.after,
        "@FIELDS@": completions.fields,
        "@VALUES@": {flag: list(values) for flag, values in completions.values.items()},
    }
    script = BASH
    for mark, table in tables.items():
        cases = (
            f"        {_quoted(key)}) printf '%s\\n' {' '.join(map(_quoted, row))} ;;" for key, row in table.items()
        )
        script = script.replace(mark, "\n".join(cases))
    script = script.replace("@WORKLOAD@", "|".join(completions.with_workload))
    script = script.replace("@RUNS@", "|".join(map(_quoted, completions.with_runs)))
    return script.replace("@BUILTIN@", " ".join(BUILT_IN))


def fish(completions: Completions) -> str:
    """The script for fish: one line for each word, with the words after which it stands."""
    lines = ["# Completion of recperf for fish: written by `recperf completion`."]
    first = "__fish_use_subcommand"
    lines += [_fish(first, name, completions.summaries.get(name, "")) for name in completions.after[""]]
    for place, listed in completions.after.items():
        seen = " ".join(f"; and __fish_seen_subcommand_from {word}" for word in place.split())[6:]
        lines += [_fish(seen, word) for word in listed if place]
    about = f"__fish_seen_subcommand_from {' '.join(completions.with_workload)}; and __fish_seen_subcommand_from "
    lines += [_fish(about + name, flag) for name, flags in completions.fields.items() for flag in flags]
    for option, values in completions.values.items():
        flag, _, workload = option.partition(" ")
        condition = f" -n '__fish_seen_subcommand_from {workload}'" if workload else ""
        lines.append(f"complete -c recperf{condition} -l {flag[2:]} -x -a {_quoted(' '.join(values))}")
    return "\n".join(lines)


def _fish(condition: str, word: str, summary: str = "") -> str:
    shown = f" -d {_quoted(summary)}" if summary else ""
    kind = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
    return f"complete -c recperf -n {_quoted(condition)} {kind}{shown}"


def _quoted(word: str) -> str:
    """A word in single quotes for a shell."""
    return "'" + word.replace("'", "'\\''") + "'"

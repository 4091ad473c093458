"""recperf doctor"""

from __future__ import annotations

from ..doctor import MISSING, examine
from ..errors import MachineError
from .parse import JsonOption, parse
from .terminal import print_json, print_text

DESCRIPTION = "Check this machine and print the command that fixes each problem."
Options = JsonOption


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf doctor", description=DESCRIPTION)
    findings = examine()
    broken = [finding.name for finding in findings if finding.state == MISSING]
    if options.json:
        print_json({"healthy": not broken, "findings": [vars(finding) for finding in findings]})
        return MachineError.exit_code if broken else 0
    for finding in findings:
        print_text(f"{finding.state:<9} {finding.name:<15} {finding.found}")
        if finding.fix and finding.state != "ok":
            print_text(f"{'':<25} fix: {finding.fix}")
    print_text(f"\n{'needs attention: ' + ', '.join(broken) if broken else 'recperf works here'}")
    return MachineError.exit_code if broken else 0

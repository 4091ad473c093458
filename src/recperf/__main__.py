"""`python -m recperf` is the same as `recperf`."""

from .stop import FLAG


def main() -> int:
    """Run the command, listening for signals before anything slow is imported and until the exit code is decided."""
    FLAG.listen()
    from .cli import main as command

    code = command()
    FLAG.ignore()
    return code


if __name__ == "__main__":
    raise SystemExit(main())

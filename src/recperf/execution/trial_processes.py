"""The processes of trials: one that has imported torch, and the programs that it runs, which take turns."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import mkdtemp
from time import monotonic
from typing import Any

from .program_trial import BECOME, FORK
from .script import Program
from .trial_search import NotTried

CHILD = f"{__package__}.program_trial"


class Ended(NotTried):
    """The program ended before the turn did."""


def refused(effect: str) -> str:
    return f"the program {effect}; --try-fixes runs it again"


class Nursery:
    """A process that has imported torch, and forks others that run programs. Where these use a GPU, which no forked
    process of one that has looked for it can use, it becomes the first of them."""

    def __init__(self, environment: dict[str, str], *, forks: bool) -> None:
        self._forks = forks
        self._socket, theirs = socket.socketpair()
        seed = os.environ.get("PYTHONHASHSEED", "0")
        with theirs:
            self._process = Popen(
                [sys.executable, "-m", CHILD, str(theirs.fileno()), str(os.getpid())],
                stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": seed, **environment},
            )  # fmt: skip
        self._socket.recv(1)

    def start(self, stream: int, messages: int) -> int:
        """Let a program run with this socket and this file for its messages, and return its process's number."""
        try:
            socket.send_fds(self._socket, [FORK if self._forks else BECOME], [stream, messages])
            number = self._socket.recv(8)
        except OSError:
            number = b""
        if len(number) < 8:
            raise NotTried("no process could be started")
        return int.from_bytes(number, "little")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Side:
    """A program in a process group of its own, with its own temporary folder."""

    def __init__(
        self, nursery: Nursery, program: Program, settings: dict[str, Any], warm_ups: int, root: Path, anywhere: bool,
        room: int | None = None,
    ) -> None:  # fmt: skip
        """With `room` it ends where it needs more memory than so many bytes."""
        folder = Path(mkdtemp(dir=root))
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(0.5)
        self._received = b""
        self._messages = folder / "messages"
        with theirs, self._messages.open("wb") as messages:
            self._number = nursery.start(theirs.fileno(), messages.fileno())
        request = {"program": {**asdict(program), "script": str(program.script)}, "environment": _environment(folder)}
        self._send({**request, "settings": settings, "warm_ups": warm_ups, "anywhere": anywhere, "room": room})

    def answer(self, deadline: float) -> dict[str, Any]:
        """The next answer, after which the program stands still."""
        while b"\n" not in self._received:
            if monotonic() > deadline:
                raise NotTried("it took too long")
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                received = b""
            if not received:
                raise NotTried(self._failure())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if effect := answer.get("effect"):
            raise Ended(refused(effect))
        if "ended" in answer:
            raise Ended(self._failure() if answer["code"] else f"the program ends after {answer['ended']} steps")
        return answer

    def turn(self, steps: int, deadline: float) -> int:
        """ns of the next steps."""
        self._send(steps)
        self._signal(signal.SIGCONT)
        return int(self.answer(deadline)["ns"])

    def end(self) -> None:
        """End all of its processes, the last of which closes the other end."""
        self._signal(signal.SIGKILL)
        with suppress(OSError):
            while self._socket.recv(1 << 16):
                pass
        self._socket.close()

    def _send(self, message: Any) -> None:
        # A process that has ended says so in its answer.
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._number, number)

    def _failure(self) -> str:
        """The last line of its messages."""
        lines = self._messages.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "the program ended without a message"


def _environment(folder: Path) -> dict[str, str]:
    """That of a trial: services that log or download stay offline, what is made is in the folder."""
    here = str(folder)
    return {
        "TMPDIR": here, "TORCHINDUCTOR_CACHE_DIR": f"{here}/inductor", "TRITON_CACHE_DIR": f"{here}/triton",
        "WANDB_MODE": "disabled", "WANDB_DIR": here, "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip

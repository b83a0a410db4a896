# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on one machine: one raylet for each, each from an interpreter of its own."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Cluster"]

_START_LIMIT_S, _STOP_LIMIT_S = 120.0, 60.0


class Cluster:
    """Nodes that were started with `ray start`, under Ray's token authentication; nothing is left of them."""

    def __init__(self, folder: Path) -> None:
        """Start nothing yet.

        Args:
            folder: Home and logs of the nodes.
        """
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._folder = folder
        #: Where each node's Ray writes; it stands in the command line of each of its processes.
        self.temporary: list[Path] = []
        self._token = secrets.token_hex(20)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    @property
    def variables(self) -> dict[str, str]:
        """What a process that belongs to this cluster gets; nothing of this one's own but the PATH."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }

    def start(self, python: Path, role: str, *, cwd: Path | None = None, slots: int = 2) -> subprocess.Popen[bytes]:
        """Start a node, the first one as the head, and wait until it has joined.

        Args:
            python: Interpreter whose Ray it is.
            role: Value of its label.
            cwd: Where it starts.
            slots: Its CPUs, as Ray counts them.
        """
        number = len(self._nodes)
        # Ray puts sockets there, whose paths must be short.
        temporary = Path(tempfile.mkdtemp(prefix="nrl-"))
        self.temporary.append(temporary)
        where = ["--head", "--port=0", "--include-dashboard=false"] if number == 0 else [f"--address={self.address}"]
        command = [
            *(str(python), "-c", "from ray.scripts.scripts import main; main()", "start", "--block"),
            *(f"--labels=role={role}", f"--num-cpus={slots}", "--object-store-memory=100000000"),
            # By default the workers of all nodes take ports of one range, which here is that of one machine.
            *(f"--min-worker-port={20000 + 500 * number}", f"--max-worker-port={20499 + 500 * number}"),
            *("--disable-usage-stats", f"--temp-dir={temporary}", *where),
        ]
        log = self._folder / f"node-{number}.log"
        with log.open("wb") as out:
            node = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.variables,
                cwd=cwd or self.home,
                start_new_session=True,
            )
        self._nodes.append(node)
        self._await(node, log, temporary)
        return node

    def run(
        self,
        python: Path,
        *arguments: str,
        cwd: Path | None = None,
        limit_s: float,
        env: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `nemo-rl` as a driver that attaches to this cluster."""
        variables = {**self.variables, "RAY_ADDRESS": self.address, **(env or {})}
        command = [str(python), "-m", "nemo_rl_core", *arguments]
        return subprocess.run(
            command, env=variables, cwd=cwd or self.home, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def stop(self, node: subprocess.Popen[bytes]) -> None:
        """End a node with all of its processes."""
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is ended below
                node.wait(_STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):  # all of it has ended by itself
            os.killpg(node.pid, signal.SIGKILL)
        node.wait(_STOP_LIMIT_S)

    def close(self) -> None:
        """End all nodes, the head last, and take away what they wrote."""
        for node in reversed(self._nodes):
            self.stop(node)
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _await(self, node: subprocess.Popen[bytes], log: Path, temporary: Path) -> None:
        """Wait until Ray says that the node runs; of the head, take its address."""
        deadline = time.monotonic() + _START_LIMIT_S
        while "Ray runtime started" not in (said := log.read_text(errors="replace")):
            assert node.poll() is None, said
            assert time.monotonic() < deadline, f"the node did not start within {_START_LIMIT_S:g} s:\n{said}"
            time.sleep(0.1)
        if not self.address:
            self.address = (temporary / "ray_current_cluster").read_text().strip()
            host, _, port = self.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_START_LIMIT_S).close()

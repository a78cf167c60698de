"""SGLang's own server on the CPU, as somebody else would start it: `python -m sglang.launch_server`."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
from attrs import define, field

from polarnode.engine.embedded.building import STUBS_FOLDER

# a CPU without AMX: SGLang's documented out-of-tree platform, which polarnode registers
ARGUMENTS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention-backend",
    "torch_native",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--mem-fraction-static",
    "0.8",
    "--max-total-tokens",
    "65536",
    "--max-running-requests",
    "16",
    "--log-level",
    "warning",
    "--skip-server-warmup",
    "--host",
    "127.0.0.1",
]
START_S = 120.0


@define(eq=False)
class SglangProcess:
    """One server at a port that stays its own, so that it can be killed and started again."""

    model: Path
    log: Path
    extra: Sequence[str] = ()
    port: int = field(init=False)
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @port.default
    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, without waiting."""
        environment = {
            **os.environ,
            "SGLANG_PLATFORM": "polarnode_cpu",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(STUBS_FOLDER),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)),
                    *("--port", str(self.port), *ARGUMENTS, *self.extra),
                ],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx2.get(f"{self.url}/model_info", timeout=5).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"no answer within {START_S:.0f} s: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it and all its processes at once."""
        if self._process is None:
            return
        for process in psutil.Process(self._process.pid).children(recursive=True):
            os.kill(process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None

    def post(self, path: str, **body: Any) -> Any:
        """Something that its owner orders."""
        answer = httpx2.post(f"{self.url}/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None


@contextmanager
def open_sglang_server(model: Path, log: Path, *extra: str) -> Iterator[SglangProcess]:
    """A server that answers, ended with the block."""
    server = SglangProcess(model, log, extra)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()

"""``python -m deadpool_launch.status.exporter RUN_DIR HOST PORT``: a job's figures over HTTP.

A process of its own, which the launcher starts (``beside.py``) with ``--metrics``: it reads the
journal like anybody, so that nothing that comes to its port, and no defect in it, is anything to
the job. It ends with its standard input. Its first line says where it listens, or why it cannot.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deadpool_launch.follow import JournalTail
from deadpool_launch.status.metrics import CONTENT_TYPE, exposition
from deadpool_launch.view import RunView

#: A connection that asks for nothing is closed after this; so many are served at once.
_PATIENCE_S = 5.0
_MOST_AT_ONCE = 16
#: The journal is read this often, so that who asks need not wait for much of it.
_READ_EVERY_S = 5.0


class Figures:
    """What the journal says, read further whenever somebody asks. For several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = JournalTail(run_dir)
        self._view = RunView(keep_steps=False)
        self._turn = threading.Lock()

    def read(self) -> None:
        """Take in what is new."""
        with self._turn:
            self._read()

    def page(self) -> str:
        """The figures as they are now."""
        with self._turn:
            self._read()
            return exposition(self._view)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for records in self._tail.batches():
                self._view.apply_all(records)


class _Handler(BaseHTTPRequestHandler):
    server: Exporter
    timeout = _PATIENCE_S
    server_version = "deadpool"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "the figures are at /metrics\n")
            return
        self._send(HTTPStatus.OK, CONTENT_TYPE, self.server.figures.page())

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nothing to tell of."""


class Exporter(ThreadingHTTPServer):
    """Serves the figures of one run directory."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, run_dir: Path) -> None:
        self.figures = Figures(run_dir)
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the base class' question to a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it in a thread, or close it if there are too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What the thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is nothing to tell of."""


def url_of(host: str, port: int) -> str:
    """Where the figures are."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def main() -> None:
    """Serve until standard input ends."""
    run_dir, host, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        exporter = Exporter(host, port, run_dir)
    except OSError as error:
        print(f"error {error.strerror or error}", flush=True)
        sys.exit(1)
    serving = threading.Thread(target=exporter.serve_forever, daemon=True)
    reading = threading.Thread(target=_keep_reading, args=(exporter.figures,), daemon=True)
    serving.start()
    reading.start()
    print(f"at {url_of(host, exporter.server_port)}", flush=True)
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    # Not by way of the threads: one may be in the middle of a long journal.
    os._exit(0)


def _keep_reading(figures: Figures) -> None:
    pause = threading.Event()
    while True:
        figures.read()
        pause.wait(_READ_EVERY_S)


if __name__ == "__main__":
    main()

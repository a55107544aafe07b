"""A real web server on the loopback interface, serving a folder, with failures on request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class WebServer:
    """`faults[name]` are met by the next requests for that file, one each: cut, wrong, silent_cut or a status."""

    folder: Path
    url: str = ""
    faults: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    held: str = ""
    """This file is sent only once `hold` is set."""

    def fault(self, name: str) -> str:
        return self.faults[name].pop(0) if self.faults.get(name) else ""


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    state = WebServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            state.asked.append(name)
            if name == state.held:
                state.hold.wait(30)
            fault, path = state.fault(name), state.folder / name
            if fault.isdigit() or not path.is_file():
                self.send_error(int(fault or 404))
                return
            data = path.read_bytes()
            self.send_response(200)
            if fault != "silent_cut":  # else the end of the connection is the end of the file
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if fault == "wrong":
                data = data[: len(data) // 2] + bytes(byte ^ 1 for byte in data[len(data) // 2 :])
            self.wfile.write(data[: len(data) // 2] if fault.endswith("cut") else data)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/packed"
    try:
        yield state
    finally:
        state.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()

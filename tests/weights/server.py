"""A local HTTP server for files of the authors, with the faults of real ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class FileServer(ThreadingHTTPServer):
    """Serves `files` by name, the last part of the path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str | None] = []  # the Range header of every request
        self.stop_after: int | None = None  # close the connection after so many bytes
        self.ranges = True  # whether Range headers are honoured
        self.page = b""  # send this page instead of any file
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if "/mirror/" in self.path:  # as GitHub does, send the client elsewhere
            self.send_response(302)
            self.send_header("Location", self.path.replace("/mirror/", "/"))
            self.end_headers()
            return
        data = self.server.page or self.server.files.get(self.path.rpartition("/")[2])
        if data is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(data) and start:
            self.send_error(416)
            return
        self.send_response(206 if start else self.server.status)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : self.server.stop_after])

    def log_message(self, *_) -> None:
        pass


@contextmanager
def file_server() -> Iterator[FileServer]:
    server = FileServer()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

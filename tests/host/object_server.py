"""A local object store for tests: the part of the S3 protocol that single-object reads and writes use."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        data = self.server.objects.get(self.path)
        if data is None:
            return self.answer(404)
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self.answer(200, data, ETag=etag)
        first, last = wanted.groups()
        start = int(first) if first else max(len(data) - int(last), 0)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            return self.answer(416)
        return self.answer(206, data[start:stop], ETag=etag, Content_Range=f"bytes {start}-{stop - 1}/{len(data)}")

    do_HEAD = do_GET

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuse:
            return self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        self.server.objects[self.path] = body
        return self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def do_DELETE(self):
        if self.server.refuse:
            return self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        self.server.objects.pop(self.path, None)
        return self.answer(204)


@contextmanager
def object_server() -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields the JSON to open it with, and the server: `objects` by path, `refuse` to deny changes."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.objects, server.refuse = {}, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield (
            {
                "driver": "s3",
                "bucket": "pages",
                "path": "cache/",
                "endpoint": f"http://127.0.0.1:{server.server_port}",
                "aws_region": "local",
                "aws_credentials": {"type": "anonymous"},
            },
            server,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

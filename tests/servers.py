"""Small TLS servers in a thread, for tests of what a node sees of a server."""

import socket
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from feddpc.federate import connections


@contextmanager
def listening(context=None):
    """A server that greets everybody, with TLS if there is a context, and hangs up; gives its port."""
    with socket.create_server((connections.HOST, 0)) as server:

        def serve():
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    try:
                        if context is None:
                            peer.sendall(b"HTTP/1.1 400 what?\r\n\r\n")
                        else:
                            context.wrap_socket(peer, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def context_of(made):
    """The TLS of a server with these keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.server_key)
    return context


def showing(made):
    """A server that shows the certificate of ``made``."""
    return listening(context_of(made))


@contextmanager
def answering(made, get, post, date):
    """An HTTPS server with these bodies for GET and POST, each a status and a text, and a date; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, found):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = found(self.headers) if callable(found) else found
            self.send_response_only(status)
            if date is not None:
                self.send_header("Date", date)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(get)

        def do_POST(self):
            self.answer(post)

        def log_message(self, *_):
            pass

    class Server(HTTPServer):
        def handle_error(self, *_):
            pass  # who only looks at the certificate hangs up

    with Server((connections.HOST, 0), Handler) as server:
        server.socket = context_of(made).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()

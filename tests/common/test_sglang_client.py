"""What is asked of a server over HTTP: a stand-in takes the request and gives the answer of a server that went wrong."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import SGLangClient

DONE = {"finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3, "cached_tokens": 0}


@pytest.fixture
def prefill():
    """`prefill(meta, ...)`: prefill a request for each of these `meta_info`, which answer them; returns what was asked."""
    servers = []

    def run(*metas: dict) -> dict:
        asked = []

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                answer = [{"meta_info": {"id": f"request-{n}"} | meta} for n, meta in enumerate(metas)]
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        client = SGLangClient(f"http://127.0.0.1:{servers[-1].server_port}")
        client.prefill([[5, 6, 7]] * len(metas), [f"request-{n}" for n in range(len(metas))])
        [(path, body)] = asked
        assert path == "/generate"
        return body

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def test_whole_sequences_are_asked_in_one_request_under_their_ids(prefill):
    assert prefill(DONE, DONE) == {
        "input_ids": [[5, 6, 7], [5, 6, 7]],
        "rid": ["request-0", "request-1"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
    }


def test_tokens_that_were_found_in_the_prefix_cache_are_refused(prefill):
    with pytest.raises(
        DraftlineError,
        match=r"2 of 3 tokens of request request-1 were found in the prefix cache.*--disable-radix-cache",
    ):
        prefill(DONE, DONE | {"cached_tokens": 2})


def test_a_request_that_was_aborted_is_named_with_the_reason(prefill):
    reason = {"type": "abort", "message": "Input is too long"}
    with pytest.raises(DraftlineError, match=r"request request-1 was aborted: .*Input is too long"):
        prefill(DONE, DONE | {"finish_reason": reason})


@pytest.fixture
def crowd():
    """A server that answers when so many requests wait for it, and keeps count of the connections that it was opened."""
    waiting = threading.Barrier(300)

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            waiting.wait(timeout=60)
            body = b'{"model_path": "target"}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Counting(ThreadingHTTPServer):
        request_queue_size, daemon_threads, block_on_close, opened = 512, True, False, 0

        def get_request(self):
            self.opened += 1
            return super().get_request()

    server = Counting(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_hundreds_of_users_ask_on_the_connections_that_they_have(crowd):
    """A connection opened anew would stand in the time to first token."""
    client = SGLangClient(f"http://127.0.0.1:{crowd.server_port}")
    with ThreadPoolExecutor(300) as users:
        for _ in range(3):
            assert len(list(users.map(lambda _: client.server_info(), range(300)))) == 300
    assert crowd.opened == 300


@pytest.fixture
def forgetful():
    """A server that answers one request on a connection, and closes it as the next one arrives; it counts what it answered."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        is_used = False

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.is_used:
                self.close_connection = True
                return
            self.is_used = True
            self.server.answered += 1
            piece = {"text": "", "output_ids": [7], "meta_info": DONE | {"weight_version": "", "completion_tokens": 1}}
            body = json.dumps(piece).encode()
            body = b"data: " + body + b"\n\n" if self.server.streams else body
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if self.server.streams else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Counting(ThreadingHTTPServer):
        daemon_threads, answered, streams = True, 0, False

    server = Counting(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("streams", [False, True])
def test_a_connection_that_was_closed_as_it_idled_costs_no_answer(forgetful, streams):
    forgetful.streams = streams
    client = SGLangClient(f"http://127.0.0.1:{forgetful.server_port}")
    for _ in range(3):
        assert client.generate([5], {}, stream=streams).output_ids == [7]
    assert forgetful.answered == 3

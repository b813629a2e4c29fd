"""What is asked of a server over HTTP: a stand-in takes the request and gives the answer of a server that went wrong."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import SGLangClient

DONE = {"finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3, "cached_tokens": 0}


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **attributes) -> Iterator[ThreadingHTTPServer]:
    """A server that answers by `handler`, and what it is to keep count of."""
    silent = type("Silent", (handler,), {"protocol_version": "HTTP/1.1", "log_message": lambda *_: None})
    kind = type("Serving", (_Counting,), {"daemon_threads": True, "request_queue_size": 512} | attributes)
    server = kind(("127.0.0.1", 0), silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Counting(ThreadingHTTPServer):
    opened = 0

    def get_request(self):
        self.opened += 1
        return super().get_request()


def reply(handler: BaseHTTPRequestHandler, body: bytes, kind: str = "application/json") -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def prefill():
    """`prefill(meta, ...)`: prefill a request for each of these `meta_info`, which answer them; returns what was asked."""

    def run(*metas: dict) -> dict:
        asked = []

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                answer = [{"meta_info": {"id": f"request-{n}"} | meta} for n, meta in enumerate(metas)]
                reply(self, json.dumps(answer).encode())

        with serving(Answers) as server:
            client = SGLangClient(f"http://127.0.0.1:{server.server_port}")
            client.prefill([[5, 6, 7]] * len(metas), [f"request-{n}" for n in range(len(metas))])
        [(path, body)] = asked
        assert path == "/generate"
        return body

    return run


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
    """A server that answers when so many requests wait for it."""
    waiting = threading.Barrier(300)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            waiting.wait(timeout=60)
            reply(self, b'{"model_path": "target"}')

    with serving(Answers) as server:
        yield server


def test_hundreds_of_users_ask_on_the_connections_that_they_have(crowd):
    """A connection opened anew would stand in the time to first token."""
    client = SGLangClient(f"http://127.0.0.1:{crowd.server_port}")
    with ThreadPoolExecutor(300) as users:
        for _ in range(3):
            assert len(list(users.map(lambda _: client.server_info(), range(300)))) == 300
    assert crowd.opened == 300


class AnswersOnce(BaseHTTPRequestHandler):
    """One request on a connection; it closes it as the next one arrives, after `server.delay_s`."""

    is_used = False

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.is_used:
            time.sleep(self.server.delay_s)
            self.close_connection = True
            return
        self.is_used = True
        self.server.answered += 1
        piece = {"text": "", "output_ids": [7], "meta_info": DONE | {"weight_version": "", "completion_tokens": 1}}
        body = json.dumps(piece).encode()
        if self.server.streams:
            reply(self, b"data: " + body + b"\n\n", "text/event-stream")
        else:
            reply(self, body)


@pytest.mark.parametrize("streams", [False, True])
def test_a_connection_that_was_closed_as_it_idled_costs_no_answer(streams):
    with serving(AnswersOnce, answered=0, streams=streams, delay_s=0) as server:
        client = SGLangClient(f"http://127.0.0.1:{server.server_port}")
        for _ in range(3):
            assert client.generate([5], {}, stream=streams).output_ids == [7]
        assert server.answered == 3


def test_an_answer_that_breaks_off_after_a_while_is_not_asked_for_again():
    """Its time would count as the second one's, and of a request under an id of its own the first may still run."""
    with serving(AnswersOnce, answered=0, streams=False, delay_s=1.5) as server:
        client = SGLangClient(f"http://127.0.0.1:{server.server_port}")
        client.generate([5], {})
        with pytest.raises(DraftlineError, match=r"no answer: .*Remote end closed connection"):
            client.generate([5], {})
        assert server.answered == 1


def test_a_server_that_dies_of_a_request_is_told_by_that_one():
    class Dies(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.server.socket.close()  # nobody is let in any more
            self.close_connection = True

    with serving(Dies) as server, pytest.raises(DraftlineError, match=r"Remote end closed connection"):
        SGLangClient(f"http://127.0.0.1:{server.server_port}").generate([5], {})


def test_what_is_no_http_is_asked_once():
    class Garbles(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.answered += 1
            self.wfile.write(b"nothing of the kind\r\n\r\n")
            self.close_connection = True

    with serving(Garbles, answered=0) as server:
        with pytest.raises(DraftlineError, match="no answer"):
            SGLangClient(f"http://127.0.0.1:{server.server_port}").generate([5], {})
        assert server.answered == 1

"""`--server` at what is no SGLang server, or answers oddly: one sentence, exit code 2, and valid JSON."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tasks.doctor.__main__ import main
from tests.doctor.checkpoints import sglang_draft

INFO = {"model_path": "m", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "version": "0.5.23"}
META = {
    "finish_reason": {"type": "length"},
    "prompt_tokens": 32,
    "cached_tokens": 0,
    "weight_version": "default",
    "spec_verify_ct": 1,
}


@pytest.fixture
def serve():
    """`serve(info, answer)`: a URL whose /server_info and /generate say these; bytes are sent as they are."""
    servers = []

    def start(info, answer=None, status: int = 200) -> str:
        class Odd(BaseHTTPRequestHandler):
            def reply(self, body):
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if text.startswith(b"<") else "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                self.reply(info)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(answer)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


def examined(url: str, tmp_path, capsys) -> tuple[int, dict, str]:
    draft = sglang_draft().write(tmp_path / "draft")
    code = main(["--draft", str(draft), "--server", url, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.mark.parametrize("info", [b"<html>nginx</html>", [], None, "up", b"{broken", b"", {"object": "list"}])
def test_what_is_no_sglang_server_is_called_so(serve, tmp_path, capsys, info):
    code, report, error = examined(serve(info), tmp_path, capsys)
    assert code == 2
    assert "SGLang server" in report["problem"]
    assert "Traceback" not in error


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_refusal_is_passed_on(serve, tmp_path, capsys, status):
    code, report, _ = examined(serve({"error": "\x1b[2Jno"}, status=status), tmp_path, capsys)
    assert code == 2
    assert f"refused with {status}" in report["problem"]
    assert "\x1b" not in report["problem"]


def answer(**changes) -> dict:
    meta = META | {name: value for name, value in changes.items() if name in META}
    whole = {"text": "", "output_ids": [5, 6], "meta_info": meta}
    return whole | {name: value for name, value in changes.items() if name not in META}


@pytest.mark.parametrize(
    "odd",
    [
        b"<html>",
        [],
        None,
        {},
        {"choices": []},
        answer(meta_info=None),
        answer(finish_reason=None),
        answer(finish_reason="length"),
        answer(meta_info=META | {"hidden_states": "AAAA"}),
        answer(meta_info=META | {"hidden_states": [[[0.0], [0.0, 1.0]]]}),
    ],
)
def test_an_answer_of_another_shape_is_one_sentence(serve, tmp_path, capsys, odd):
    code, report, error = examined(serve(INFO, odd), tmp_path, capsys)
    assert code == 2
    assert "/generate" in report["problem"]
    assert "Traceback" not in error


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "", "ftp://x"])
def test_a_url_without_a_scheme_is_no_url(tmp_path, capsys, url):
    code, report, _ = examined(url, tmp_path, capsys)
    assert code == 2
    assert "write http://" in report["problem"]


def test_nobody_listens(tmp_path, capsys):
    code, report, _ = examined("http://127.0.0.1:9", tmp_path, capsys)
    assert code == 2
    assert "Connection refused; does a server run there?" in report["problem"]

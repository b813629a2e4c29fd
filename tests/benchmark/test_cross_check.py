"""The cross-check with SGLang's own benchmark: what passes the proxy, what the tool is given and says, and how pairs are judged."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from tasks.benchmark.cross_check import in_order
from tasks.benchmark.cross_check_pairs import Run, pair_rows
from tasks.benchmark.recording_proxy import Recorded, RecordingProxy
from tasks.benchmark.sglang_tool import ToolResult, question_rows
from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import Completion, SGLangClient
from tasks.common.traffic import Load, Pass, Question, cache_key, run_load

QUESTIONS = (Question("a", "chat", [5, 6]), Question("b", "chat", [7, 8, 9]))
LOAD = Load("heldout", QUESTIONS, 2, 0.0, 8)


def answer_of(tokens: int, rounds: int = 4, correct: int = 6) -> dict:
    """As /generate gives it: `correct` draft tokens in `rounds` rounds, at most 3 in one."""
    histogram = [0, 0, 0, 0]
    for _ in range(rounds):
        taken = min(3, correct)
        histogram[taken] += 1
        correct -= taken
    drafts = sum(position * count for position, count in enumerate(histogram))
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": tokens,
        "weight_version": "v",
        "spec_verify_ct": rounds,
        "spec_num_correct_drafts": drafts,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_length": tokens / rounds,
    }
    return {"text": "x" * tokens, "output_ids": list(range(tokens)), "meta_info": meta}


class Upstream(BaseHTTPRequestHandler):
    """Answers as many tokens as were asked in input_ids, in as many pieces where a stream is wanted."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "input_ids" not in asked:
            self._send(400, "application/json", b'{"error": "no input_ids"}')
            return
        tokens = len(asked["input_ids"])
        if not asked.get("stream"):
            self._send(200, "application/json", json.dumps(answer_of(tokens)).encode())
            return
        events = [f"data: {json.dumps(answer_of(n))}\n\n" for n in range(1, tokens + 1)]
        self._send(200, "text/event-stream", "".join([*events, "data: [DONE]\n\n"]).encode())

    def do_GET(self):
        self._send(200, "application/json", json.dumps({"path": self.path}).encode())

    def _send(self, status: int, kind: str, body: bytes):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with RecordingProxy(f"http://127.0.0.1:{server.server_port}") as running:
        yield running
    server.shutdown()
    server.server_close()


def test_what_passes_the_proxy_is_what_the_server_said_and_is_recorded_once(proxy):
    load = Load("heldout", QUESTIONS * 4, 8, 0.0, 8)  # streams, and answers in one piece
    through = run_load(SGLangClient(proxy.url), load, "ours")
    recorded = in_order(proxy.take(), load.questions)
    assert [one.answer.output_ids for one in recorded] == [answer.output_ids for answer in through.answers]
    assert [len(one.answer.output_ids) for one in recorded] == [2, 3] * 4
    assert {one.answer.verify_rounds for one in recorded} == {4}
    assert [one.spec_accept_length for one in recorded[:2]] == [2 / 4, 3 / 4]
    assert all(one.began < one.ended for one in recorded)
    assert proxy.take() == []


def test_a_refusal_and_what_is_no_answer_pass_and_are_not_recorded(proxy):
    refused = requests.post(f"{proxy.url}/generate", json={"text": "hello"})
    assert (refused.status_code, refused.json()) == (400, {"error": "no input_ids"})
    assert requests.get(f"{proxy.url}/server_info?full=1").json() == {"path": "/server_info?full=1"}
    assert proxy.take() == []


def test_a_proxy_that_cannot_listen_leaves_no_thread_and_no_connection(monkeypatch):
    async def fail(_):
        raise OSError("no port is free")

    monkeypatch.setattr("aiohttp.web.TCPSite.start", fail)
    proxy = RecordingProxy("http://127.0.0.1:1")
    with pytest.raises(OSError, match="no port is free"), proxy:
        pass
    assert "recording proxy" not in {thread.name for thread in threading.enumerate()}
    assert proxy._session.closed


def test_requests_that_overtook_each_other_are_told_apart_by_their_tokens():
    a, b, c = (recorded(ids, began) for ids, began in (([7, 8, 9], 0.0), ([5, 6], 0.1), ([5, 6], 0.2)))
    again = (*QUESTIONS, QUESTIONS[0])
    assert in_order([a, b, c], again) == (b, a, c)
    with pytest.raises(DraftlineError, match="did not send the token ids that it was given"):
        in_order([a, b, recorded([1], 0.2)], again)


def test_the_tool_is_given_token_ids_as_fields_of_the_request():
    assert [row["input_ids"] for row in question_rows(QUESTIONS)] == [[5, 6], [7, 8, 9]]


def test_a_question_that_is_asked_again_is_computed_again_as_in_our_own_traffic():
    keys = [row["extra_key"] for row in question_rows([*QUESTIONS, *QUESTIONS])]
    assert len(set(keys)) == 4
    assert keys == [cache_key(number) for number in range(4)]


def test_what_the_tool_wrote_is_read():
    row = {
        "completed": 2,
        "total_output_tokens": 5,
        "duration": 0.5,
        "output_throughput": 10.0,
        "accept_length": 2.5,
        "x": 1,
    }
    assert ToolResult.of(row) == ToolResult(2, 5, 0.5, 10.0, 2.5)
    with pytest.raises(DraftlineError, match="the server verified nothing"):
        ToolResult.of(row | {"accept_length": None})
    del row["duration"]
    with pytest.raises(DraftlineError, match="wrote no 'duration': its results are known"):
        ToolResult.of(row)


def recorded(input_ids, began=0.0, seconds=1.0, **counts) -> Recorded:
    given = answer_of(8, **counts)
    answer = Completion.of(given, seconds)
    return Recorded(input_ids, began, began + seconds, answer, given["meta_info"]["spec_accept_length"])


def run(*, seconds=2.0, overhead=0.0, counted=2.5, own_seconds=2.0, differing=False, pieces=()) -> Run:
    """Two answers of 8 tokens, each 6 correct draft tokens in 4 rounds: an acceptance length of 2.5."""
    passed = (recorded([5, 6], 10.0, seconds), recorded([7, 8, 9], 10.0, seconds))
    theirs = ToolResult(2, 16, seconds + overhead, 16 / (seconds + overhead), counted)
    own = answer_of(8, correct=4) | {"output_ids": [9] * 8} if differing else answer_of(8)
    ours = Pass("ours", LOAD, 0, own_seconds, (Completion.of(own, 1.0, pieces),) * 2)
    return Run(theirs, passed, counted, ours)


def judged(*runs: Run, overlaps: bool = False) -> dict[tuple[str, str, str], dict]:
    rows = pair_rows(runs, 3, overlaps)
    return {(row["figure"], row["by_us"], row["by_sglang"]): row for row in rows}


SPEED = ("tokens per second", "first request to last answer", "the tool")
IN_TURN = ("tokens per second", "our traffic, in turn", "the tool")
LENGTH = ("acceptance length", "the answers", "/server_info")
LENGTH_IN_TURN = ("acceptance length", "our traffic, in turn", "the tool")
OF_ANSWERS = ("acceptance length", "the answers", "mean of spec_accept_length")


def test_counts_that_agree_are_within_the_limit():
    rows = judged(run(), run())
    disagreeing = [name for name, row in rows.items() if not row["within"]]
    assert disagreeing == [OF_ANSWERS]  # 8 tokens in 4 rounds are 2.0 there: another definition
    assert rows[OF_ANSWERS]["ratio"] == 1.25
    assert "counts the prefill's token" in rows[OF_ANSWERS]["why"]
    assert rows[LENGTH] == {
        **dict(zip(("figure", "by_us", "by_sglang"), LENGTH, strict=True)),
        **dict.fromkeys(("ours", "theirs"), 2.5),
        **dict.fromkeys(("ratio", "least", "most"), 1.0),
        "within": True,
        "why": None,
    }


def test_of_one_run_a_single_pass_beyond_the_limit_counts_and_the_longer_clock_is_named():
    row = judged(run(), run(overhead=0.05), run())[SPEED]
    assert (row["within"], row["ratio"], row["most"]) == (False, 1.0, 1.025)
    assert row["why"] == "its clock runs on until it has read /server_info, 0.05 s of 2.05 s"


def test_a_clock_of_the_tool_that_stops_before_the_last_answer_has_gone_out_is_explained_by_nothing():
    row = judged(run(), run(overhead=-0.1), run(overhead=0.05))[SPEED]
    assert (row["within"], row["why"]) == (False, "nothing that is known explains it")


def test_of_two_runs_the_median_counts_and_the_spread_is_named():
    even = judged(run(own_seconds=1.8), run(), run(own_seconds=2.2))[IN_TURN]
    assert (even["within"], even["least"], even["most"]) == (True, 0.9091, 1.1111)
    faster = judged(run(own_seconds=1.6), run(own_seconds=1.8), run(own_seconds=1.8))[IN_TURN]
    assert (faster["within"], faster["ratio"]) == (False, 1.1111)
    assert "differ by up to 12.5% among themselves" in faster["why"]
    assert "our traffic 0 of 6" in faster["why"]


def test_of_two_runs_a_spread_that_does_not_reach_the_difference_explains_nothing():
    steady = [run(own_seconds=seconds) for seconds in (1.8, 1.81, 1.8)]
    assert judged(*steady)[IN_TURN]["why"].startswith("the tool reads every answer piece by piece")
    streamed = [run(own_seconds=seconds, pieces=((0.1, 1), (1.0, 8))) for seconds in (1.8, 1.81, 1.8)]
    row = judged(*streamed)[IN_TURN]
    assert (row["ratio"], row["why"]) == (1.1111, "nothing that is known explains it")


def test_a_round_beyond_the_end_of_each_answer_explains_a_difference_only_with_overlap_scheduling():
    # 10 rounds and not 8, nothing accepted in the two more: 1 + 12 / 10.
    beyond = judged(run(counted=2.2), overlaps=True)[LENGTH]
    assert (beyond["within"], beyond["ratio"]) == (False, 1.1364)
    assert beyond["why"].startswith("overlap scheduling has begun a round more")
    assert judged(run(counted=2.2))[LENGTH]["why"] == "nothing that is known explains it"
    assert judged(run(counted=2.1), overlaps=True)[LENGTH]["why"] == "nothing that is known explains it"


def test_other_texts_explain_another_acceptance_length():
    row = judged(run(differing=True))[LENGTH_IN_TURN]
    assert (row["ratio"], row["why"]) == (0.8, "2 of 2 answers of the two runs are not the same text")

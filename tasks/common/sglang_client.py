"""What is asked of a running SGLang server over HTTP, and its answers, typed, in the spellings of 0.5.16 and 0.5.23."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.common.errors import DraftlineError

if TYPE_CHECKING:
    import numpy as np
    import requests

# An answer may take long; SGLang's own watchdog ends a server that hangs well before this.
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S, _INFO_TIMEOUT_S = 10, 3600, 60
# As many as benchmark.concurrency may name: one beyond them would be opened anew for each request, in its time to first token.
_CONNECTIONS = 1024
_FLUSH_S = 10
_AT_ONCE_S = 1


@dataclass(frozen=True)
class Completion:
    """One answer of a server.

    Attributes:
        output_ids: generated tokens, the stop token included where one ended the answer.
        finish_reason: 'stop' or 'length'.
        cached_tokens: prompt tokens found in the prefix cache.
        weight_version: what the server was started with; identifies it.
        verify_rounds: target forwards that verified a draft; 0 without speculation.
        correct_drafts: draft tokens that the target agreed with.
        correct_drafts_histogram: [c] counts the rounds with c correct draft tokens.
        hidden_states: float32 [rows, width], prompt tokens first; None unless asked for.
        seconds: from the request's first byte to the answer's last.
        pieces: of a streamed answer, (seconds since the request, tokens so far) at each piece; else empty.
    """

    output_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    verify_rounds: int
    correct_drafts: int
    correct_drafts_histogram: tuple[int, ...]
    hidden_states: "np.ndarray | None"
    seconds: float
    pieces: tuple[tuple[float, int], ...] = ()

    @classmethod
    def of(cls, answer: dict[str, Any], seconds: float, pieces: tuple[tuple[float, int], ...] = ()) -> "Completion":
        """Read an answer of /generate, of a stream the last piece, which holds all."""
        meta = answer["meta_info"]
        return cls(
            output_ids=answer["output_ids"],
            text=answer["text"],
            finish_reason=meta["finish_reason"]["type"],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            weight_version=meta["weight_version"],
            verify_rounds=meta.get("spec_verify_ct", 0),
            correct_drafts=_either(meta, "spec_num_correct_drafts", "spec_accepted_drafts", 0),
            correct_drafts_histogram=tuple(_either(meta, "spec_correct_drafts_histogram", "spec_accept_histogram", ())),
            hidden_states=_rows(meta["hidden_states"]) if meta.get("hidden_states") else None,
            seconds=seconds,
            pieces=pieces,
        )


class SGLangClient:
    """Talks to one server; may be shared by threads."""

    def __init__(self, url: str, answer_timeout_s: float = _ANSWER_TIMEOUT_S):
        """
        Args:
            answer_timeout_s: without a byte, after which a request is given up.

        Raises:
            DraftlineError: the URL has no scheme.
        """
        import requests
        from requests.adapters import HTTPAdapter

        if not url.strip().lower().startswith(("http://", "https://")):
            raise DraftlineError(f"{url!r} is no URL of a server: write http://127.0.0.1:30000, say.")
        self.url = url.strip().rstrip("/")
        self._answer_timeout_s = answer_timeout_s
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy of the environment has no business on loopback
        self._http.mount("http://", HTTPAdapter(pool_connections=1, pool_maxsize=_CONNECTIONS))

    def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        return_hidden_states: bool = False,
        cache_key: str | None = None,
        stream: bool = False,
    ) -> Completion:
        """Continue `input_ids`.

        Args:
            sampling: SGLang's names: temperature, max_new_tokens, ...
            cache_key: a request shares the prefix cache with those of the same key alone.
            stream: read the answer piece by piece, as it is written, and note when each came.

        Raises:
            DraftlineError: the server refused the request, aborted it, or died.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
        if return_hidden_states:
            body["return_hidden_states"] = True
        if cache_key:
            body["extra_key"] = cache_key
        started, pieces = time.perf_counter(), []
        if stream:
            answer = {}
            for answer in self._stream("/generate", body | {"stream": True}):
                pieces.append((time.perf_counter() - started, _tokens_so_far(answer)))
        else:
            answer = self._ask("POST", "/generate", json=body)
        try:
            completion = Completion.of(answer, time.perf_counter() - started, tuple(pieces))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DraftlineError(
                f"{self.url}/generate: no answer of an SGLang server from 0.5.16 on: {type(error).__name__} {error} in it."
            ) from None
        if completion.finish_reason == "abort":
            raise DraftlineError(f"{self.url}: the request was aborted: {answer['meta_info']['finish_reason']}")
        return completion

    def prefill(self, sequences: list[list[int]], request_ids: list[str]) -> None:
        """Run the target over whole sequences, as requests of these ids; what it would say next is dropped.

        Raises:
            DraftlineError: as `generate`, or tokens were found in the prefix cache, and so were not computed.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": sequences, "rid": request_ids, "sampling_params": sampling}
        for answer in self._ask("POST", "/generate", json=body):
            meta = answer["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                raise DraftlineError(f"{self.url}: request {meta['id']} was aborted: {meta['finish_reason']}")
            if meta["cached_tokens"]:
                raise DraftlineError(
                    f"{self.url}: {meta['cached_tokens']} of {meta['prompt_tokens']} tokens of request {meta['id']} were found in the "
                    f"prefix cache and not computed. The server must run with --disable-radix-cache."
                )

    def flush_cache(self) -> None:
        """Empty the prefix cache. A step that was scheduled ahead may outlive its answer: the server waits for it.

        Raises:
            DraftlineError: a request still ran after seconds.
        """
        self._ask("POST", f"/flush_cache?timeout={_FLUSH_S}")

    def require_vocabulary(self, largest_id: int) -> None:
        """Refuse to ask for a token that the target does not have: SGLang would look it up, and die of it.

        Raises:
            DraftlineError: the server's vocabulary ends before this id.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1, "logit_bias": {str(largest_id): 0.0}}
        try:
            self.generate([0], sampling)
        except DraftlineError as error:
            if "logit_bias" not in str(error):
                raise
            raise DraftlineError(
                f"{self.url}: token id {largest_id} is to be asked, and the server's vocabulary ends before it: draft, dump or "
                f"tokenizer are of another target than the one that is served."
            ) from None

    def server_info(self) -> dict[str, Any]:
        """The arguments that the server resolved, and its state.

        Raises:
            DraftlineError: it is no SGLang server.
        """
        info = self._ask("GET", "/server_info", timeout_s=_INFO_TIMEOUT_S)
        if not isinstance(info, dict) or "model_path" not in info:
            raise DraftlineError(f"{self.url}/server_info: no SGLang server: it answers {str(info)[:80]!r}.")
        return info

    def is_healthy(self) -> bool:
        """Whether the server answers /health, which makes it generate a token."""
        import requests

        try:
            return self._http.get(f"{self.url}/health", timeout=30).status_code == 200
        except requests.RequestException:
            return False

    def _ask(self, method: str, path: str, timeout_s: float | None = None, **kwargs: Any) -> Any:
        timeout = (_CONNECT_TIMEOUT_S, timeout_s or self._answer_timeout_s)
        with self._explained(path, timeout[1]):
            response = self._send(method, path, timeout=timeout, **kwargs)
            is_json = "json" in response.headers.get("content-type", "")
            answer = response.json() if response.ok and is_json else response.text
        self._require_ok(response, path)
        return answer

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pieces of an answer, as server-sent events."""
        timeout = (_CONNECT_TIMEOUT_S, self._answer_timeout_s)
        with (
            self._explained(path, timeout[1]),
            self._send("POST", path, json=body, timeout=timeout, stream=True) as response,
        ):
            self._require_ok(response, path)
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[len(b"data: ") :])
                if "error" in piece:  # the status line was sent before the server knew
                    raise DraftlineError(f"{self.url}{path}: refused: {piece['error']!a}{self._diagnosis()}")
                yield piece

    def _send(self, method: str, path: str, **kwargs: Any) -> "requests.Response":
        """Once more where the connection was closed at once: a server closes those that were idle for seconds
        (SGLANG_TIMEOUT_KEEP_ALIVE), and may do so as the request is on its way. What breaks off later had begun."""
        import requests

        started = time.perf_counter()
        try:
            return self._http.request(method, self.url + path, **kwargs)
        except requests.ConnectionError as error:
            if not _was_closed(error) or time.perf_counter() - started > _AT_ONCE_S:
                raise
            self._http.close()  # the others that are idle; what is in flight goes on
            try:
                return self._http.request(method, self.url + path, **kwargs)
            except requests.ConnectionError:
                raise error from None  # the server died: the first one says how

    @contextmanager
    def _explained(self, path: str, timeout_s: float) -> Iterator[None]:
        """Say of a failed request what is known of its cause."""
        import requests

        try:
            yield
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            raise DraftlineError(f"{self.url}{path}: no answer: {_cause(error)}{self._diagnosis()}") from None
        except requests.Timeout:
            raise DraftlineError(
                f"{self.url}{path}: no answer within {timeout_s:.0f} s: the server hangs, or is stopped.{self._diagnosis()}"
            ) from None
        except (requests.RequestException, ValueError, RecursionError) as error:
            raise DraftlineError(
                f"{self.url}{path}: no answer of an SGLang server: {error}{self._diagnosis()}"
            ) from None

    def _require_ok(self, response: "requests.Response", path: str) -> None:
        if not response.ok:
            diagnosis = self._diagnosis() if response.status_code >= 500 else ""
            raise DraftlineError(
                f"{self.url}{path}: refused with {response.status_code}: {ascii(response.text[:500])[1:-1]}{diagnosis}"
            )

    def _diagnosis(self) -> str:
        """What else is known when the server does not answer; a server of our own knows its log."""
        return ""


def _was_closed(error: "requests.ConnectionError") -> bool:
    """Whether there was a connection, and it ended without a byte of an answer."""
    from urllib3.exceptions import ProtocolError

    inner = error.args[0]
    return isinstance(inner, ProtocolError) and isinstance(inner.args[-1], ConnectionResetError | BrokenPipeError)


def _cause(error: Exception) -> str:
    """'Connection refused' out of the layers that requests puts around it."""
    text = str(error)
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", text)
    return f"{found[1]}; does a server run there?" if found else text


def _tokens_so_far(piece: dict[str, Any]) -> int:
    return piece.get("meta_info", {}).get("completion_tokens", 0)


def _either(meta: dict[str, Any], name: str, old_name: str, default: Any) -> Any:
    """0.5.23's spelling, else 0.5.16's; null counts as absent."""
    value = meta.get(name, meta.get(old_name))
    return default if value is None else value


def _rows(hidden_states: list) -> "np.ndarray":
    """Flatten SGLang's nesting: a list of rows for the prompt (its last chunk), then a row a generated token."""
    import numpy as np

    rows: list[list[float]] = []
    for part in hidden_states:
        if isinstance(part[0], list):
            rows.extend(part)
        else:
            rows.append(part)
    states = np.asarray(rows, dtype=np.float32)
    if states.ndim != 2:
        raise ValueError(f"hidden states of {states.ndim} dimensions")
    return states

"""A server's command line as text: `python -m sglang.launch_server ...` or `sglang serve ...`, nothing is started."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.common.errors import DraftlineError

_ALIASES = {
    "--model": "--model-path",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-algo": "--speculative-algorithm",
}
# Flags that a rule reads. argparse takes an unambiguous beginning for the flag, and so does the doctor.
_KNOWN = (
    "--model-path",
    "--dtype",
    "--device",
    "--context-length",
    "--page-size",
    "--quantization",
    "--modelopt-quant",
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--disable-radix-cache",
    "--forward-hooks",
    "--cuda-graph-backend-prefill",
    "--enable-return-hidden-states",
    "--enable-return-aux-hidden-states",
    "--return-aux-hidden-state-layer-ids",
    "--config",
    "--json-model-override-args",
    "--speculative-adaptive",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-draft-model-revision",
    "--speculative-draft-model-quantization",
    "--speculative-draft-attention-backend",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)


@dataclass(frozen=True)
class CommandLine:
    """Flags by name with their values; a later one replaces an earlier one, as argparse does it.

    Attributes:
        said_in: where people wrote it, for errors.
    """

    flags: dict[str, tuple[str, ...]]
    said_in: str = "--plan"

    @classmethod
    def parse(cls, text: str) -> "CommandLine":
        """Read a line, environment variables before it and line continuations in it included.

        Raises:
            DraftlineError: the quotes do not match, or it starts no SGLang server.
        """
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise DraftlineError(f"--plan: {error}; quote the line as a shell would read it.") from None
        start = _start(words)
        if start is None:
            raise DraftlineError(
                "--plan: no SGLang server: expected `python -m sglang.launch_server ...` or `sglang serve ...`."
            )
        return cls.of(words[start:])

    @classmethod
    def of(cls, arguments: Iterable[str]) -> "CommandLine":
        """A server's own arguments, as a program would start it."""
        flags: dict[str, tuple[str, ...]] = {}
        name = None
        for word in arguments:
            if word.startswith("--"):
                written, equals, value = word.partition("=")
                name = _name(written)
                flags[name] = (value,) if equals else ()
            elif name is not None:
                flags[name] = (*flags[name], word)
        return cls(flags)

    def __contains__(self, name: str) -> bool:
        return name in self.flags

    def value(self, name: str) -> str | None:
        """The flag's first value, None where it is absent or has none."""
        return next(iter(self.flags.get(name, ())), None)

    def number(self, name: str) -> int | None:
        """The flag's value as an integer.

        Raises:
            DraftlineError: it is none.
        """
        value = self.value(name)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise DraftlineError(f"{self.said_in}: {name} is {value!r}, expected an integer.") from None


def _start(words: list[str]) -> int | None:
    """Where the server's own arguments begin."""
    for position, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("sglang/launch_server.py"):
            return position + 1
        if word == "serve" and position and words[position - 1].rsplit("/", 1)[-1] == "sglang":
            return position + 1
    return None


def _name(written: str) -> str:
    written = _ALIASES.get(written, written)
    longer = [name for name in _KNOWN if name.startswith(written)]
    return longer[0] if written not in _KNOWN and len(longer) == 1 else written

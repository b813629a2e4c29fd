"""A server that may be the fastest: the draft's numbers, and settings beside those of params.yaml."""

from dataclasses import dataclass, replace
from functools import cached_property

from tasks.common.params import Params, Serve, reserved_tokens
from tasks.common.server_plan import ServerPlan, baseline_plan
from tasks.common.speculative_plan import speculative_plan

_NUMBERS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
# What SGLang 0.5.16 to 0.5.23 choose where no number is given (`_auto_choose_speculative_params`), by architecture.
_AUTOMATIC_TREE = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")


@dataclass(frozen=True, order=True)
class Shape:
    """How much is drafted: `steps` passes of the draft, `topk` branches at each, `draft_tokens` of them verified."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.draft_tokens}"

    @property
    def reserved(self) -> int:
        """Tokens of a round beside a request's own."""
        return reserved_tokens(self.steps, self.topk, self.draft_tokens)

    @classmethod
    def chain(cls, steps: int) -> "Shape":
        """Without branches a round verifies the last token and the draft behind it."""
        return cls(steps, 1, steps + 1)

    @classmethod
    def of(cls, serve: Serve) -> "Shape":
        return cls(serve.num_steps, serve.eagle_topk, serve.num_draft_tokens)

    @classmethod
    def automatic(cls, architecture: str) -> "Shape":
        """What SGLang chooses for a target on its own."""
        return cls(5, 4, 8) if architecture in _AUTOMATIC_TREE else cls(3, 1, 4)


@dataclass(frozen=True)
class Option:
    """A setting beside the draft's numbers, which a plain server can have as well.

    Attributes:
        group: of those of one group a server has at most one.
        flags: words for `serve.extra_args`.
        environment: pairs for `serve.environment`.
        max_running_requests: None leaves it.
        chains_only: whether it refuses top-k > 1.
    """

    name: str
    group: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    max_running_requests: int | None = None
    chains_only: bool = False


@dataclass(frozen=True)
class Candidate:
    """One server.

    Attributes:
        shape: None for the plain server.
        is_automatic: started without numbers, so that SGLang chooses; `shape` is what it is expected to choose.
    """

    shape: Shape | None
    options: tuple[Option, ...] = ()
    is_automatic: bool = False

    @cached_property
    def name(self) -> str:
        shape = str(self.shape or "plain server")
        return " + ".join([shape + " (automatic)" * self.is_automatic, *(option.name for option in self.options)])

    def params(self, params: Params) -> Params:
        """The parameters that make this server; what only other stages refuse, such as more steps than trained, passes.

        Raises:
            ValueError: pydantic's, for numbers that contradict each other.
        """
        serve = params.serve.model_dump()
        for option in self.options:
            serve["extra_args"] = (*serve["extra_args"], *option.flags)
            serve["environment"] = serve["environment"] | dict(option.environment)
            serve["max_running_requests"] = option.max_running_requests or serve["max_running_requests"]
        if self.shape:
            serve["num_steps"], serve["eagle_topk"] = self.shape.steps, self.shape.topk
            serve["num_draft_tokens"] = self.shape.draft_tokens
        return params.model_copy(update={"serve": Serve.model_validate(serve)})

    def plan(self, params: Params, port: int) -> ServerPlan:
        """
        Args:
            params: those of params.yaml.

        Raises:
            DraftlineError: it cannot be served, or not as the draft was trained.
        """
        changed = self.params(params)
        if self.shape is None:
            return baseline_plan(changed, port=port)
        plan = speculative_plan(changed, port=port)
        if not self.is_automatic:
            return plan
        return replace(plan, flags=tuple(flag for flag in plan.flags if flag.name not in _NUMBERS))


PLAIN = Candidate(None)

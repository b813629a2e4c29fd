"""What is searched: the draft's numbers and the open settings, and the servers that the result is compared with."""

from dataclasses import dataclass
from itertools import product

from tasks.common.params import PARAMS, Params, tree_tokens
from tasks.tune_server.candidates import Candidate, Option, Shape
from tasks.tune_server.options import Device, open_options

AUTOMATIC, CURRENT = "automatic", "current"
_REFERENCES = (Shape(5, 4, 8), Shape(3, 1, 4))
_MOST_STEPS = 7
_TREES = tuple(product((7, 6, 5, 4, 3, 2), (32, 16, 64, 8, 4), (8, 4, 2)))


@dataclass(frozen=True)
class Space:
    """
    Attributes:
        rows: servers that the result is compared with, by the name of their row; several rows may name one.
        shapes: others, by their numbers alone.
        options: settings that may be added to the best of them.
        unfit: of the rows, those that params.yaml would refuse; they are compared with, and never chosen.
        notes: sentences on what is left out.
    """

    rows: dict[str, Candidate]
    shapes: tuple[Candidate, ...]
    options: tuple[Option, ...]
    unfit: frozenset[Candidate]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, params: Params, concurrency: int, architecture: str, device: Device, is_latent: bool = False
    ) -> "Space":
        """
        Args:
            concurrency: requests at once that count.
            architecture: of the target.
            is_latent: whether the target has multi-head latent attention.
        """
        trained = params.train_draft.ttt_length
        automatic = Candidate(Shape.automatic(architecture), is_automatic=True)
        # Of the same numbers the server that chooses them itself is started, and stands for both.
        known = {automatic.shape: automatic}
        named = {
            AUTOMATIC: automatic.shape,
            **{str(shape): shape for shape in _REFERENCES},
            CURRENT: Shape.of(params.serve),
        }
        rows = {name: known.setdefault(shape, Candidate(shape)) for name, shape in named.items()}
        unfit = frozenset(candidate for shape, candidate in known.items() if shape.steps > trained)
        shapes = [Candidate(shape) for shape in _shapes(trained) if shape not in known]
        options, notes = open_options(params, concurrency, device, is_latent)
        if trained < _MOST_STEPS:
            compared = ", ".join(candidate.name for candidate in sorted(unfit, key=lambda one: one.shape))
            notes.append(
                f"More than {trained} draft steps are not tried: the draft was trained on {trained} (train_draft.ttt_length in "
                f"{PARAMS})." + (f" For comparison alone: {compared}." if compared else "")
            )
        return cls(rows, tuple(shapes), tuple(options), unfit, tuple(notes))

    @property
    def required(self) -> tuple[Candidate, ...]:
        """The rows' servers, each once, the current one first."""
        return tuple(dict.fromkeys((self.rows[CURRENT], *self.rows.values())))

    @property
    def most_reserved(self) -> int:
        """Tokens of a round beside a request's own, of the candidate with the most."""
        return max(candidate.shape.reserved for candidate in (*self.required, *self.shapes))


def _shapes(most_steps: int) -> list[Shape]:
    """Chains, the longest first since it tells most about the others; trees, those first that tell most of what trees reach."""
    chains = [Shape.chain(steps) for steps in range(min(most_steps, _MOST_STEPS), 0, -1)]
    trees = [Shape(steps, topk, tokens) for steps, tokens, topk in _TREES if steps <= most_steps]
    # Fewer draft tokens than steps + 1 would leave the deepest ones unverified.
    return [*chains, *(s for s in trees if s.steps < s.draft_tokens <= tree_tokens(s.steps, s.topk))]

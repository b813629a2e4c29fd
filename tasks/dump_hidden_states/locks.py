"""Who works on the shards now: a lock a rank for the whole dump, and one under which a split is closed."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.locks import alone_on, locks_alone, opened, read, write
from tasks.dump_hidden_states.share import Share

_CLOSING = HIDDEN_STATES.with_suffix(".lock")
_RANKS = HIDDEN_STATES.with_suffix(".ranks.lock")


@contextmanager
def working_on(share: Share) -> Iterator[None]:
    """Nobody else computes this share, or any shard of it in a dump of another number of ranks.

    Raises:
        DraftlineError: somebody does; names the process. Or the lock cannot be written.
    """
    with ExitStack() as stack:
        # Whoever is alone says how many ranks there are; all hold the lock together from then on.
        ranks = stack.enter_context(opened(_RANKS))
        if locks_alone(ranks):
            write(ranks, str(share.ranks))
        fcntl.flock(ranks, fcntl.LOCK_SH)
        if (others := read(ranks)) != str(share.ranks):
            raise DraftlineError(
                f"{HIDDEN_STATES}: another dump, of {others} ranks and not {share.ranks}, works on these shards. Wait until it "
                f"ends, or stop it: {HIDDEN_STATES}.rank-*.lock name its processes."
            )
        path = HIDDEN_STATES.with_suffix(f".rank-{share.rank}.lock")
        refusal = (
            f"{HIDDEN_STATES}: another dump ({{}}) works on these shards, as rank {share.rank} of {share.ranks}. Wait until it "
            f"ends, or stop it."
        )
        stack.enter_context(alone_on(path, refusal))
        yield


@contextmanager
def closing_a_split() -> Iterator[None]:
    """Ranks that finish together close a split one after the other, on several hosts too."""
    with opened(_CLOSING) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

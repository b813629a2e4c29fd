"""Ports for servers that tests start."""

import random

from tasks.common.server_session import port_is_free


def free_port_pair() -> int:
    """A port that is free now, as the next one is; ask when the server starts, not before.

    Below the ephemeral range, from which the kernel takes ports for any connection, and away from the default
    serve.port. In random order, so that two runs of the tests seldom meet.
    """
    candidates = random.SystemRandom().sample(range(20_000, 29_000, 2), 100)
    return next(port for port in candidates if port_is_free(port) and port_is_free(port + 1))

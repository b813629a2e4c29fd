"""The one exception that people at a terminal are meant to read."""


class DraftlineError(Exception):
    """A sentence or two: what is wrong, where (file, line, field, sample), what was expected, the fix.

    `run_stage` prints it without a traceback and exits 1. Anything else that is raised is a bug and
    keeps its traceback.
    """

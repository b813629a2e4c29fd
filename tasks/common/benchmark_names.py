"""Names that the benchmark gives in its report, its tables and MLflow; no set and no draft may bear one."""

BASELINE, OURS = "baseline", "speculative"
HELDOUT, POOLED = "heldout", "all"
RESERVED_NAMES = (BASELINE, OURS, HELDOUT, POOLED)

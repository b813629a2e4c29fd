"""Gates: Great Expectations suites between the stages; a breach stops the chain and names the samples.

Each boundary has a module that turns files into tables (one row a sample, shard, tensor, ...) and states what
must hold of them. `suite.py` runs it, `report.py` writes reports/gates/<name>.json and one HTML page.
"""

import os

# Read when Great Expectations is imported: a gate reports to its user and to nobody else.
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")

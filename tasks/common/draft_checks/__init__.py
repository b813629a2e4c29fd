"""Every silent failure that a draft's files can show, a check each, by the ids of the failure-mode table."""

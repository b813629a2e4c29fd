"""Stage collect_prompts: the conversations that the target will answer, by split."""

"""Stage regenerate_responses: the target's own answers, since a draft must learn the target's distribution."""

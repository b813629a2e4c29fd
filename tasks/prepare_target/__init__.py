"""Stage prepare_target: the target as a Hugging Face folder with a recorded identity."""

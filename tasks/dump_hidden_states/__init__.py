"""Stage dump_hidden_states: what the target computes for each token of its own answers."""

"""Which settings of the server are fastest with this draft, found by successive halving on real measurements."""

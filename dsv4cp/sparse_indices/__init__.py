"""Building and planning the lists of keys that queries attend to."""

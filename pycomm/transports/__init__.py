"""Roads between ranks; `base` is the protocol that each of them implements."""

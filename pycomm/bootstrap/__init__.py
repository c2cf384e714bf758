"""Who am I: which launcher started this process, and which road follows from that."""

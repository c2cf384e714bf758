"""What looks at a machine: each probe looks at one thing, returns findings, and never raises."""

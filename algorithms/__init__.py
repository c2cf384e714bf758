"""Collective algorithms as data: pure functions of (rank, size) that return what one rank does.

Nothing here knows arrays, transports or clocks. `schedule` holds the records, `ring` and
`recursive` build schedules, `verify` proves them right for all ranks together.
"""

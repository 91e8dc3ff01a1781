"""The step time of one layout as an assignment problem of hosts."""

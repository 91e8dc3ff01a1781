"""Throughput that a job keeps while its hosts are lost: jobs, ways to go on, a day of losses, tables."""

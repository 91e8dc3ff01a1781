"""A plan as one HTML file that needs no network: what was chosen and why, drawn and as tables."""

from pipette_launch.report.page.page import plan_page, with_outcome

__all__ = ["plan_page", "with_outcome"]

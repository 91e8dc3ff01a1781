"""A plan as one HTML file without network requests: the choice and its reasons, as drawings and tables."""

from pipette_launch.report.page.page import plan_page, with_outcome

__all__ = ["plan_page", "with_outcome"]

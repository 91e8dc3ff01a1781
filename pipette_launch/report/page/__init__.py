"""HTML page of a plan, which shows the choice and the reasons as drawings and tables, without network requests."""

from pipette_launch.report.page.page import plan_page, with_outcome

__all__ = ["plan_page", "with_outcome"]

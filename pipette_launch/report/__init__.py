"""Shows plans, predictions and outcomes as text for a terminal; measures, prices and decides nothing."""

from pipette_launch.report.checkup import checkup_screen
from pipette_launch.report.comparison import comparison_screen
from pipette_launch.report.measured import measured_screen
from pipette_launch.report.parts import NOT_MODELLED, arguments_diff, rank_ranges
from pipette_launch.report.plan import outcome_line, plan_screen
from pipette_launch.report.planned import planned_screen
from pipette_launch.report.prediction import prediction_screen

__all__ = [
    "NOT_MODELLED",
    "arguments_diff",
    "checkup_screen",
    "comparison_screen",
    "measured_screen",
    "outcome_line",
    "plan_screen",
    "planned_screen",
    "prediction_screen",
    "rank_ranges",
]

"""Shows plans, predictions and outcomes as text for a terminal; measures, prices and decides nothing."""

from pipette_launch.report.measured import checkup_screen, measured_screen
from pipette_launch.report.plan import chosen_line, outcome_line, plan_file_screen, plan_screen
from pipette_launch.report.prediction import comparison_screen, prediction_screen

__all__ = [
    "checkup_screen",
    "chosen_line",
    "comparison_screen",
    "measured_screen",
    "outcome_line",
    "plan_file_screen",
    "plan_screen",
    "prediction_screen",
]

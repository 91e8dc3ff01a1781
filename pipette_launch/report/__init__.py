"""Shows plans, predictions and outcomes as text for a terminal; measures, prices and decides nothing."""

from pipette_launch.report.plan import NOT_MODELLED, arguments_diff, outcome_line, plan_screen, rank_ranges
from pipette_launch.report.prediction import prediction_screen

__all__ = ["NOT_MODELLED", "arguments_diff", "outcome_line", "plan_screen", "prediction_screen", "rank_ranges"]

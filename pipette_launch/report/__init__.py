"""Shows plans, predictions and outcomes as text for a terminal; measures, prices and decides nothing."""

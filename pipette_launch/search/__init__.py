"""The best layout and placement that fit."""

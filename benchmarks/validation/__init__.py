"""Predicted against measured: memory and step time, on measurements that others published."""

"""Problems of bench_mapping: Pipette's cost function, synthetic fabrics, and their descriptions."""

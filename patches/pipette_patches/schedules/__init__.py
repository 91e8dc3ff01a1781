"""Optional: execute pipeline schedules that Megatron lacks. `registry.apply("schedules")` is the only entry."""

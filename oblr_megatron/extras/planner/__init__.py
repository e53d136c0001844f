"""The planner: a cost model of step time, the trainer's memory model, and a search over layouts."""

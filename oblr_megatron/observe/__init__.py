"""What a person sees of a run: metrics of a step, alarms, console, status, report, performance."""

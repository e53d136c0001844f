"""Everything a person sees of a run: step metrics, alarms, console, status, report, performance."""

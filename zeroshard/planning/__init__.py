"""The planner: seconds and bytes of a configuration, predicted; and the best for a cluster."""

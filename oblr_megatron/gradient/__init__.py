"""The policy gradient of a step, and the passes that compute it with or without per-sample norms."""

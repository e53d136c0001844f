"""Special cases of engines on a CPU: weights that an update reaches, routes, and faster steps."""

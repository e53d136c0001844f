"""Worker processes for rewards: every call has a hard deadline."""

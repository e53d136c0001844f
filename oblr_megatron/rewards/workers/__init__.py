"""Worker processes for rewards, with a hard deadline for every call."""

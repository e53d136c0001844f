"""Everything that starts a vLLM process or runs inside one."""

"""Helper processes that run a user's code: one fork server, and a pool with a hard deadline for every call.

fork_server.py  has imported the user's module, and forks workers; children.py ends what they leave behind
client.py       starts it, and asks it for workers
pool.py         lends workers to callers; calls.py is the work of such a worker; patience.py gives up a batch
watch.py        which of its jobs a worker runs that has many, read while it is blocked
"""

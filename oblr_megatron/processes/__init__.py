"""Helper processes that run a user's code: one fork server, and a pool with a hard deadline for every call.

fork_server.py  has imported the user's module, and forks workers; children.py ends what they leave behind
client.py       starts it, and asks it for workers
pool.py         lends workers to callers; calls.py is what a worker does with a request; patience.py gives up a batch
"""

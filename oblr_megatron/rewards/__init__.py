"""How responses are judged: `registry` finds a reward by name, `pool` runs the judging where it can be stopped.

A response goes through these files:

    registry.py   rewards by name: base.py (what one is), exact.py, math.py, format.py, overlong.py, function.py (the
                  user's own), http.py (a service, by http_client.py), combined.py (a weighted sum)
    extract.py    where a response states its answer
    normalize.py  one spelling for what is written in several ways; characters.py does it for Unicode
    structure.py  lists, sets, tuples, intervals, matrices, relations
    compare.py    are two answers equal; leaf.py for what has no outer form, quantity.py for exact numbers and units
    symbolic.py   computer algebra, in workers only; latex.py reads the LaTeX for it
    pool.py       worker processes with hard deadlines; workers.py starts nursery.py, the process that forks them;
                  calls.py is what they do with a request
    shared.py     the judging divided among the replicas of a run
"""

"""How responses are judged: `registry` finds a reward by name, `pool` runs the judging where it can be stopped.

base.py       what a reward is;  exact.py, math.py, function.py  the rewards
extract.py    where a response states its answer
normalize.py  one spelling for what is written in several ways; structure.py reads lists, tuples, intervals, matrices
quantity.py   exact rational numbers, units, percent, degrees;  compare.py  are two answers equal
symbolic.py   what needs computer algebra (in workers only)
pool.py       worker processes with hard deadlines;  nursery.py  the process that forks them
"""

"""How responses are judged: `registry` finds a reward by name, `pool` runs the judging where it can be stopped.

    extract.py    where a response states its answer
    normalize.py  one spelling for what is written in several ways; structure.py reads lists, tuples, intervals, matrices
    quantity.py   exact rational numbers, units, percent, degrees;  compare.py  are two answers equal
    symbolic.py   what needs computer algebra (in workers only);  math.py  the reward and `grade`
    pool.py       worker processes with hard deadlines;  nursery.py  the process that forks them
"""

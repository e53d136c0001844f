"""Rewards: score responses. `registry` builds a reward from its name; the processes of `processes/` run untrusted code.

registry.py   rewards by name, and "exact_match": base.py (the interface), math.py, format.py, overlong.py,
              function.py (the user's), http.py (a service), combined.py (weighted sum)
shared.py     divides the scoring among the replicas of a run
votes.py      groups equal answers for majority votes
verifier/     exact comparison of mathematical answers:
    extract.py    finds the answer in a response
    normalize.py  one spelling for equivalent notations
    structure.py  parses lists, sets, tuples, intervals, matrices, relations
    compare.py    decides equality; leaf.py for single expressions, quantity.py for exact numbers and units
    tolerance.py  benchmarks that accept approximate numbers
    symbolic.py   computer algebra, in worker processes only; latex.py parses LaTeX for it
"""

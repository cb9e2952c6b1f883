"""Random programs of Functions beside the same programs of plain JAX.

`python -m tests.fuzz --programs 2000 --seed 0` draws programs, runs each with jaxfn's Functions and with their twins,
and prints what differs, shrunk, as Python that runs by itself.

    draw -> program -> source -> check -> shrink -> report

`formulas` has the mathematics of the Functions, `functions` the ways of writing one down, `operations` plain JAX.
"""

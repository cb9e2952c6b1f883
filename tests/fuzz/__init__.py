"""Random programs of Functions compared with their equivalents in plain JAX.

`python -m tests.fuzz --programs 2000 --seed 0` draws programs, runs each with jaxfn's Functions and with their twins,
and prints what differs, shrunk, as a complete Python program.

    draw -> program -> source -> check -> shrink -> report

`formulas` has the mathematics of the Functions, `functions` the ways of writing one down, `operations` plain JAX.
"""

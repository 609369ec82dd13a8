"""`python -m ares_exp.ctl RUN|SWEEP ORDER`: the state of a run or a sweep under way, and orders to it.

Imports control, pages and sweeps; imported by view and by its command.
"""

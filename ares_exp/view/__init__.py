"""`python -m ares_exp.view [RUN|DIR]`: the page of runs in a browser, live while they go on.

Imports pages, report and ctl; imported by its command alone. It is a process of its own that only reads files, and with
`--control` writes orders: it costs a run nothing, and shows runs that were killed, or are played elsewhere.
"""

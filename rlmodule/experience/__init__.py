"""Scored responses -> rows ready to train on: facts gathered, step planned, samples moved, scores and advantages added.

Facts are lengths and rewards, never tokens: they are gathered once, and everything that must be the same on every rank
(order, plan, advantages, logged rewards) is computed from them on every rank alike. Tokens travel once, to the rank
that trains on them. ``maker.py`` tells the story; leaves out where responses come from (``experience/sources.py``) and
how rows are trained on (``training/update.py``).
"""

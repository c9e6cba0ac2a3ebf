"""Functions and programs of others in child processes with limits; standard library only, for children import it.

In a child this package is called ``rlmodule_sandbox``, because ``rlmodule.core`` brings torch along.
"""

"""`minigpt bench`: this package's speed on this machine, beside that of others.

    shapes.py   what is measured: configs, batches, weights       machine.py   the processor, versions, the vendor hook
    run.py      the parent: one fresh process for each run         table.py     gates, ratios and tables
    ours.py     a run of this package                              peers.py     a run of a model in PyTorch

The parent imports neither jax nor torch. Torch is imported by peers.py alone, which runs in a process of its own.
"""

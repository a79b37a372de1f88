"""`minigpt bench`: this package's speed on this machine, beside that of others.

    plan.py     what the user asked for                       ours.py     a run of this package
    shapes.py   the configs, batches and prompts              peers.py    a run of a model in PyTorch
    contenders.py   who is measured, in which settings        table.py    gates, ratios, tables
    machine.py  processor, versions, the vendor hook          report.py   the whole report
    run.py      the parent: one fresh process for each run

The parent imports neither jax nor torch, and stays small beside its children. Torch is imported by peers.py alone.
"""

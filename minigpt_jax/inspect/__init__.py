"""Looking inside: where the parameters are, the tied gradient by use, the lens, the table's geometry, pictures."""

from .accounting import ParamTable, kv_cache_bytes, param_table, tree_report
from .geometry import interface_consistency, neighbours, norms_by_frequency
from .lens import LensTable, lens_points, lens_table, logit_lens
from .tied import TiedGradient, tied_gradient, tied_stats, token_table
from .tuned import init_probes, load_probes, save_probes, train_probes

__all__ = [
    "LensTable",
    "ParamTable",
    "TiedGradient",
    "init_probes",
    "interface_consistency",
    "kv_cache_bytes",
    "lens_points",
    "lens_table",
    "load_probes",
    "logit_lens",
    "neighbours",
    "norms_by_frequency",
    "param_table",
    "save_probes",
    "tied_gradient",
    "tied_stats",
    "token_table",
    "train_probes",
    "tree_report",
]

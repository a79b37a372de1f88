"""Looking inside: where the parameters are, and the two parts of the tied table's gradient."""

from .accounting import ParamTable, kv_cache_bytes, param_table
from .tied import TiedGradient, tied_gradient, tied_norms

__all__ = ["ParamTable", "TiedGradient", "kv_cache_bytes", "param_table", "tied_gradient", "tied_norms"]

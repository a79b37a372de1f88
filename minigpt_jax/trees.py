"""Pytrees by path: a leaf's name is its path, written as in `block_0/ffn/up/kernel`."""

import jax


def leaf_paths(tree) -> dict[str, jax.Array]:
    """Path to leaf, in the tree's own order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(leaves: dict) -> dict:
    """The inverse of `leaf_paths` for nested dicts."""
    tree = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        folder = tree
        for name in folders:
            folder = folder.setdefault(name, {})
        folder[last] = leaf
    return tree


def tree_differences(expected, given, where: str, limit: int = 5) -> list[str]:
    """What keeps `given`, a tree in `where`, from being used as `expected`: a phrase for each leaf that is missing,
    unknown, or of another shape or dtype."""
    want, have = leaf_paths(expected), leaf_paths(given)
    lines = [f"{path} is missing" for path in want if path not in have]
    lines += [f"{path} is unknown" for path in have if path not in want]
    for path in want.keys() & have.keys():
        a, b = want[path], have[path]
        if (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype):
            lines.append(f"{path} is {b.dtype}{list(b.shape)} in {where}, {a.dtype}{list(a.shape)} by the config")
    lines.sort()
    return lines[:limit] + ([f"and {len(lines) - limit} more"] if len(lines) > limit else [])

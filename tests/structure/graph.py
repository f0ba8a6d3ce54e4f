"""Paths in a graph."""


def path_between(graph: dict[str, list[tuple[str, int]]], start: str, end: str) -> list[str]:
    """Return the shortest path of imports from one module to another, or an empty list."""
    paths, seen = [[start]], {start}
    for path in paths:
        if path[-1] == end:
            return path
        for target, _ in graph.get(path[-1], []):
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []

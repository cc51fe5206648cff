"""The house: which module imports which. ``python tests/test_house.py`` writes docs/house.md anew.

Every import counts, in functions and under ``TYPE_CHECKING`` too. To import ``a.b.c`` from outside of ``a.b`` is to
run ``a/b/__init__.py`` as well, so that is an import of ``a.b``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tova.policies import POLICIES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "house.md"
PACKAGES = ("tova", "experiments")
ENGINES = ("scan", "decode", "rules", "backends", "kernels", "replay", "closed_forms", "simulation_engine")
"""Rooms of ``tova`` that take whatever policy there is, and so name none."""
Graph = dict[str, set[str]]


# -- the graph ------------------------------------------------------------------------------------------------


def modules(root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Our modules by name; a package's is its ``__init__``."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if "__pycache__" in parts:  # what rules were written as, for numba and Triton
                continue
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def named(tree: ast.AST, module: str, package: bool) -> Iterator[tuple[str, str | None]]:
    """What a module's source imports, wherever it stands: module, and the name taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            up = here[: len(here) - node.level + package] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((a.value, None) for a in node.args[:1] if isinstance(a, ast.Constant))


def imports(sources: dict[str, Path]) -> Graph:
    """Module -> those of ``sources`` it imports."""
    graph: Graph = {}
    for module, path in sources.items():
        found = set()
        for base, name in named(ast.parse(path.read_text("utf-8")), module, path.name == "__init__.py"):
            whole = f"{base}.{name}"
            target = whole if name and whole in sources else base
            found.add(target)
            parents = [target[:at] for at, letter in enumerate(target) if letter == "."]
            found.update(parent for parent in parents if not f"{module}.".startswith(f"{parent}."))
        graph[module] = (found & sources.keys()) - {module}
    return graph


@functools.cache
def house() -> Graph:
    """The graph as it stands."""
    return imports(modules())


def circles(graph: Graph) -> list[list[str]]:
    """Modules that import each other, directly or through others: the strongly connected parts of more than one."""
    reach = {module: reached(graph, module) for module in graph}
    parts = {frozenset({m, *(o for o in reach[m] if m in reach[o])}) for m in graph}
    return sorted(sorted(part) for part in parts if len(part) > 1)


def reached(graph: Graph, module: str) -> set[str]:
    """All that is imported when ``module`` is."""
    found: set[str] = set()
    todo = [module]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def layers(graph: Graph) -> list[list[str]]:
    """Modules from the ground up: each stands one above the highest of what it imports; a circle is one floor."""
    reach = {module: reached(graph, module) for module in graph}
    floor: dict[str, int] = {}
    # Whoever reaches less stands lower; those of a circle reach the same and stand together.
    for module in sorted(graph, key=lambda m: (len(reach[m] | {m}), m)):
        together = {m for m in reach[module] if module in reach[m]} | {module}
        below = {other for one in together for other in graph[one]} - together
        floor[module] = max((floor[other] for other in below), default=-1) + 1
    return [sorted(m for m in graph if floor[m] == number) for number in range(max(floor.values(), default=-1) + 1)]


def within(graph: Graph, package: str) -> Graph:
    """The graph of one package alone."""
    keep = {module for module in graph if f"{module}.".startswith(f"{package}.")}
    return {module: graph[module] & keep for module in keep}


# -- the page -------------------------------------------------------------------------------------------------


def first_line(path: Path) -> str:
    """What a module's docstring says first, up to its full stop or colon."""
    said = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said).replace("``", "`").replace("|", "\\|")


def short(module: str, package: str) -> str:
    return module.removeprefix(f"{package}.")


def room(module: str, package: str = "tova") -> str:
    """The room of ``package`` a module is in: a folder, or the module by itself."""
    return short(module, package).split(".")[0]


def picture(graph: Graph) -> list[str]:
    """The rooms of ``tova`` in mermaid; an arrow where no longer way says the same, from who imports to what."""
    rooms: Graph = defaultdict(set)
    for module, found in within(graph, "tova").items():
        if module != "tova":
            rooms[room(module)] |= {room(other) for other in found if other != "tova"} - {room(module)}
    arrows = []
    for one in sorted(rooms):
        for other in sorted(rooms[one]):
            others = rooms[one] - {other}
            through = {r for between in others for r in reached(rooms, between) if one not in reached(rooms, between)}
            if other not in through:
                arrows.append(f"    {one} --> {other}")
    return ["```mermaid", "graph BT", *arrows, "```"]


def page(root: Path = ROOT) -> str:
    """The house as Markdown."""
    sources = modules(root)
    graph = house() if root == ROOT else imports(sources)
    lines = [
        "# The house",
        "",
        "Which module imports which, drawn from the source by `python tests/test_house.py`; the tests hold it to that.",
        "Imports in functions and for types only count as well. Each floor needs only floors below it: read from the",
        "ground up, nothing is used before it was explained. `experiments` uses `tova`, never the reverse.",
        "",
        "## The rooms of `tova`",
        "",
        "An arrow leads to what is imported; those that a longer way implies are left out.",
        "",
        *picture(graph),
    ]
    for package in PACKAGES:
        own = within(graph, package)
        lines += ["", f"## `{package}`, from the ground up"]
        for group in circles(own):
            lines += ["", f"A circle: {', '.join(f'`{short(module, package)}`' for module in group)}."]
        for number, names in enumerate(layers(own)):
            lines += ["", f"### {'Ground' if not number else f'Floor {number}'}", ""]
            lines += ["| module | what it is | imports |", "|---|---|---|"]
            for module in names:
                used = [f"`{short(other, package)}`" for other in sorted(own[module])]
                used += sorted({f"`tova.{room(o)}`" if o != "tova" else "`tova`" for o in graph[module] - own.keys()})
                name = module if module == package else short(module, package)
                lines.append(f"| `{name}` | {first_line(sources[module])} | {', '.join(used)} |")
    return "\n".join(lines) + "\n"


# -- what must be so ------------------------------------------------------------------------------------------


def test_no_circle() -> None:
    assert circles(within(house(), "tova")) == []


def test_imports_run_one_way() -> None:
    graph = house()
    assert not [m for m in within(graph, "tova") if any(other.startswith("experiments") for other in graph[m])]
    assert any(other.startswith("tova") for other in graph["experiments.runner"])


def test_the_page_is_what_the_imports_give() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python tests/test_house.py"


def test_every_module_says_what_it_is() -> None:
    assert not [module for module, path in modules().items() if not first_line(path)]


# -- no engine knows a policy ---------------------------------------------------------------------------------

WORDS = ("full", "window", "random", "tova")
"""Names that are English, or the library's own: only in quotes are they a policy's."""


def policies_named(source: str) -> list[str]:
    """Where a source names a built-in policy or its class, in comments and docstrings too: ``line: name``."""
    found = set()
    for name in POLICIES:
        # Underscores end a name: what is called h2o_step is made for h2o.
        pattern = rf"""(["']){name}\1""" if name in WORDS else rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])"
        found |= {(source.count("\n", 0, m.start()) + 1, name) for m in re.finditer(pattern, source)}
    classes = {policy.__name__ for policy in POLICIES.values()}
    sure = "|".join(name for name in classes if name.lower() not in WORDS)
    found |= {(source.count("\n", 0, m.start()) + 1, m[0]) for m in re.finditer(rf"\b({sure})\b", source)}
    for node in ast.walk(ast.parse(source)):  # Window begins a sentence, too: as a name only in code
        names = {
            ast.Name: lambda n: [n.id],
            ast.Attribute: lambda n: [n.attr],
            ast.ImportFrom: lambda n: [alias.name for alias in n.names],
        }.get(type(node), lambda n: [])(node)
        found |= {(node.lineno, name) for name in names if name in classes}
    return [f"{line}: {name}" for line, name in sorted(found)]


def test_no_engine_names_a_policy() -> None:
    engines = {m: path for m, path in modules(packages=["tova"]).items() if room(m) in ENGINES}
    assert {room(module) for module in engines} == set(ENGINES)
    found = {module: policies_named(path.read_text("utf-8")) for module, path in engines.items()}
    assert {module: where for module, where in found.items() if where} == {}


# -- these tests can fail -------------------------------------------------------------------------------------


def built(root: Path, **sources: str) -> Path:
    """A package ``tova`` of these modules below ``root``; ``_`` in a name is a folder."""
    for name, source in {"__init__": "", **sources}.items():
        path = root / "tova" / f"{name.replace('_', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Module {name}."""\n{source}\n')
    return root


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    built(
        tmp_path,
        a="",
        b="def f():\n    from tova import a",
        c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tova.a import x",
        d="import tova.b as b, os",
        e="import importlib\nimportlib.import_module('tova.d')",
        p_one="from . import two\nfrom ..a import x",
        p_two="",
        f="from tova.p.one import x",
    )
    (tmp_path / "tova/p/__init__.py").write_text('"""P."""\nfrom tova.p.one import x\n')
    graph = imports(modules(tmp_path, ["tova"]))
    assert {short(module, "tova"): {short(m, "tova") for m in found} for module, found in graph.items()} == {
        "tova": set(), "a": set(), "b": {"a"}, "c": {"a"}, "d": {"b"}, "e": {"d"}, "p": {"p.one"},
        "p.one": {"p.two", "a"}, "p.two": set(), "f": {"p.one", "p"},
    }  # fmt: skip
    assert circles(graph) == []
    assert layers(within(graph, "tova"))[:3] == [["tova", "tova.a", "tova.p.two"], ["tova.b", "tova.c", "tova.p.one"],
                                                 ["tova.d", "tova.p"]]  # fmt: skip


def test_circles_are_found(tmp_path: Path) -> None:
    """Of two, of three by way of a function, and through a package that is run on the way."""
    built(
        tmp_path,
        a="from tova import b",
        b="from tova.a import x",
        c="from tova import d",
        d="def f():\n    import tova.e",
        e="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tova.c import x",
        g="from tova.p.one import x",
        p_one="",
    )
    (tmp_path / "tova/p/__init__.py").write_text('"""P."""\nimport tova.g\n')
    graph = imports(modules(tmp_path, ["tova"]))
    assert circles(graph) == [["tova.a", "tova.b"], ["tova.c", "tova.d", "tova.e"], ["tova.g", "tova.p"]]
    assert layers(graph)[0] == ["tova", "tova.a", "tova.b", "tova.c", "tova.d", "tova.e", "tova.p.one"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1  # as h2o does", ["1: h2o"]),
        ('"""Of ``tova_value``."""', ["1: tova_value"]),
        ("def _h2o_step(): ...", ["1: h2o"]),
        ("if policy.name == 'window': ...", ["1: window"]),
        ("from tova.policies import Random, Slots", ["1: Random"]),
        ("isinstance(p, policies.Full)", ["1: Full"]),
        ("# the Tova rule\nH2OHead", ["2: H2OHead"]),
        ('"""Window, full, random words."""\nimport tova.layer\nfull = window(random)  # "tova" s', ['3: tova']),
        ("# a full window at random, of tova", []),
    ],
)  # fmt: skip
def test_policies_are_found_in_a_source(source: str, found: list[str]) -> None:
    assert policies_named(source) == found


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

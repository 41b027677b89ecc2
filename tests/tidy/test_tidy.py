"""The style of this codebase as tests: what a reviewer would otherwise have to remember."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TOP_LEVEL = {
    # folders
    ".ci",
    "client",
    "deploy",
    "engine_plugins",
    "kvservice",
    "protos",
    "tests",
    # files
    ".dockerignore",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.py",
}
# Built, ignored by git, and looked at by none of these tests.
BUILT = re.compile(r"build|dist|.*\.egg-info|__pycache__|\..*")
TEXT_SUFFIXES = {
    "",
    ".c",
    ".h",
    ".json",
    ".md",
    ".proto",
    ".py",
    ".pyi",
    ".service",
    ".sh",
    ".toml",
    ".yaml",
    ".yml",
}

PRODUCT = ("kvservice", "client", "engine_plugins")
GENERATED = ("protos/kvproto/", "client/kvclient/sync/")

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "common", "misc"}
# The one exception: what the connectors of every engine share.
COMMON_ALLOWED = "engine_plugins/kvplugins/common/"

# `except Exception` is right only where a stranger's failure must not take down more than its own work. The
# line says which border it is (`# border: rpc`), logs, and counts.
BORDERS = {
    "rpc": ("kvservice/service/",),  # a request fails alone; the daemon serves on
    "task": (
        "kvservice/engine/",
        "kvservice/daemon/",
        "kvservice/transports/",
        "client/kvclient/",
    ),  # supervised
    "plugin": ("engine_plugins/kvplugins/",),  # the engine recomputes; it never fails because of us
    "main": ("kvservice/cli/", "engine_plugins/demo/", "tests/bench/"),  # the process says why, and exits
}

# Settings enter a process in these places alone.
ENV_READERS = ("kvservice/daemon/config.py", "client/kvclient/config.py", "engine_plugins/demo/")

# Of the standard library, what computes. Nothing that reads a clock, a file, a socket, or randomness.
CORE_STANDARD_LIBRARY = {
    *("__future__", "abc", "array", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses"),
    *(
        "decimal",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "itertools",
        "math",
        "numbers",
    ),
    *("operator", "re", "string", "struct", "types", "typing", "zlib"),
}
CORE_BANNED_CALLS = re.compile(
    r"(open|print|input|eval|exec)|(np|numpy)\.(random\..*|fromfile|load\w*|save\w*|memmap|genfromtxt)|.*\.tofile"
)

# Each word holds a bracket, so that this file passes its own test.
UNFINISHED = re.compile(r"\b(T[O]DO|F[I]XME|H[A]CK|X[X]X)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}{~-])/(work|root|opt/pypi|opt/wheels)(/|\b)(?!\w)")
REGISTRY_HOST = re.compile(
    r"\b(pypi|npmjs|pythonhosted|anaconda|nuget|proxy\.golang|crates|download\.pytorch|wheels\.vllm)\.(org|com|ai|io)\b"
)


def files(*folders: str, suffixes: set[str] = TEXT_SUFFIXES) -> list[Path]:
    """List our files below `folders` (everywhere, if none), generated ones too, as paths from the root."""
    found = []
    for start in folders or sorted(TOP_LEVEL):
        base = ROOT / start  # where it does not exist yet, nothing is found
        paths = [base] if base.is_file() else sorted(base.rglob("*"))
        for path in paths:
            below = path.relative_to(ROOT)
            is_built = any(BUILT.fullmatch(part) for part in below.parts[1:])
            if path.is_file() and path.suffix in suffixes and not is_built:
                found.append(below)
    return found


def sources(*folders: str) -> list[Path]:
    """List the Python files below `folders` that people write."""
    return [path for path in files(*folders, suffixes={".py"}) if not str(path).startswith(GENERATED)]


def text(path: Path) -> str:
    """Read one of our files."""
    return (ROOT / path).read_text(encoding="utf-8")


def tree(path: Path) -> ast.Module:
    """Parse one of our Python files."""
    return ast.parse(text(path), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a file, methods and inner ones included."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call below `node` with the dotted name of what is called ("" if it has none)."""
    return ((dotted(call.func), call) for call in ast.walk(node) if isinstance(call, ast.Call))


def dotted(node: ast.expr) -> str:
    """Write names and attributes as they stand in the source; "?" for what comes before them."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that a file imports: `from a import b` is a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def words(name: str) -> set[str]:
    """Split a snake_case or CamelCase name into its words, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """List the places where `pattern` occurs, as file:line: text."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(text(path).splitlines(), start=1)
        if pattern.search(line)
    ]


def check(found: list[str], rule: str) -> None:
    """Fail with every place that breaks the rule, one a line."""
    assert not found, "\n".join([rule, *found])


def test_the_tree_is_there() -> None:
    """These tests look at real files: a moved folder must not turn them into checks of nothing."""
    assert Path(__file__).relative_to(ROOT) in files("tests")
    assert Path("pyproject.toml") in files()


def test_the_top_level_holds_only_what_the_layout_names() -> None:
    """The folder list is the architecture diagram: nothing lands at the top without a decision."""
    present = {path.name for path in ROOT.iterdir()}
    found = {name for name in present - TOP_LEVEL if not BUILT.fullmatch(name)}
    check(sorted(found), "not in the layout:")


def test_a_file_has_at_most_600_lines() -> None:
    """A file has one noun; a longer one is two."""
    found = []
    for path in files(*PRODUCT, "protos", "tests", "setup.py"):
        lines_count = len(text(path).splitlines())
        if lines_count > FILE_LINES_MAX and not str(path).startswith(GENERATED):
            found.append(f"{path}: {lines_count} lines")
    check(found, f"more than {FILE_LINES_MAX} lines:")


def test_a_generated_file_says_so_in_its_first_line() -> None:
    """Generated code is exempt from style, so nobody may mistake it for written code."""
    found = []
    for path in files(*GENERATED, suffixes={".py", ".pyi"}):
        first_line = text(path).partition("\n")[0]
        if path.name != "__init__.py" and "generated" not in first_line.lower():
            found.append(f"{path}: {first_line}")
    check(found, "the first line does not say that the file is generated:")


def test_a_function_has_at_most_70_lines() -> None:
    """A function does one thing and fits a screen."""
    found = []
    for path in sources(*PRODUCT, "protos"):
        for function in functions(path):
            lines_count = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines_count > FUNCTION_LINES_MAX:
                found.append(f"{path}:{function.lineno}: {function.name}: {lines_count} lines")
    check(found, f"more than {FUNCTION_LINES_MAX} lines:")


def test_a_name_says_what_the_thing_does() -> None:
    """A module named for nothing in particular collects everything in particular."""
    found = []
    for path in sources(*PRODUCT):
        named = [(0, path.stem), *((0, part) for part in path.parent.parts)]
        if str(path).startswith(COMMON_ALLOWED):
            named = [(0, path.stem)]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                named.append((node.lineno, node.name))
        found += [f"{path}:{line}: {name}" for line, name in named if words(name) & BANNED_WORDS]
    check(found, f"names that say nothing ({', '.join(sorted(BANNED_WORDS))}):")


def test_no_test_sleeps() -> None:
    """A test waits for a fact, or moves the virtual clock; a sleep is either too short or too long."""
    found = []
    for path in sources("tests"):
        if path.parts[1] == "bench":
            continue  # a workload has arrival times
        for name, call in calls(tree(path)):
            is_yield = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
            if name == "time.sleep" or (name == "asyncio.sleep" and not is_yield):
                found.append(f"{path}:{call.lineno}: {name}")
        found += [f"{path}:{line}: {name}" for line, name in imports(path) if name.endswith(".sleep")]
    check(found, "sleeps in tests:")


def test_exceptions_are_caught_broadly_only_at_a_named_border() -> None:
    """Catch what you can handle; a border says which it is, as `# border: rpc`, and is listed here."""
    found = []
    for path in sources(*PRODUCT, "protos", "tests"):
        lines = text(path).splitlines()
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler) or not is_broad(node):
                continue
            marker = re.search(r"# border: (\w+)", lines[node.lineno - 1])
            if marker is None or not str(path).startswith(BORDERS.get(marker[1], ())):
                found.append(f"{path}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    check(found, "a broad except that is not at a border (rpc, task, plugin, main):")


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler keeps any exception; one that ends in a bare `raise` only tidies up."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in caught)


def test_nothing_unfinished_merges() -> None:
    """What is left to do is an issue, not a comment."""
    check(lines_matching(UNFINISHED, files()), "unfinished:")


def test_the_core_imports_only_what_computes() -> None:
    """core/ is pure: no clock, I/O, thread or randomness, so that a simulator can run it from one seed."""
    found = []
    for path in sources("kvservice/core"):
        for line, name in imports(path):
            top = name.partition(".")[0]
            is_pure = top in CORE_STANDARD_LIBRARY or top == "numpy" or name.startswith("kvservice.core")
            if not is_pure:
                found.append(f"{path}:{line}: imports {name}")
        found += [
            f"{path}:{call.lineno}: calls {name}"
            for name, call in calls(tree(path))
            if CORE_BANNED_CALLS.fullmatch(name)
        ]
    check(found, "not pure:")


def test_the_pure_part_of_the_standard_library_exists() -> None:
    """The list of allowed modules has no misspelt entry that would allow nothing."""
    assert sys.stdlib_module_names >= CORE_STANDARD_LIBRARY


def test_the_environment_is_read_only_where_settings_are_made() -> None:
    """A setting has one way in, where it is checked; elsewhere it is an argument."""
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import .*\b(environ|getenv|putenv)\b")
    paths = [path for path in sources(*PRODUCT, "protos") if not str(path).startswith(ENV_READERS)]
    check(lines_matching(reads, paths), "reads the environment:")


def test_plugins_use_only_the_public_names_of_the_client() -> None:
    """What is in kvclient's packages' __init__ is public; the modules behind it may move."""
    public = re.compile(r"kvclient(\.(aio|sync))?\.[A-Za-z]\w*")
    found = []
    for path in sources("engine_plugins"):
        for line, name in imports(path):
            if name.startswith("kvclient.") and not public.fullmatch(name):
                found.append(f"{path}:{line}: imports {name}")
            if name.partition(".")[0] in {"kvservice", "kvproto"}:
                found.append(f"{path}:{line}: imports {name}")
    check(found, "not a public name of kvclient:")


def test_no_file_names_this_machine_or_a_package_registry() -> None:
    """A checkout builds anywhere, from whatever registry the machine is set up to use."""
    paths = files()
    found = lines_matching(MACHINE_PATH, paths) + lines_matching(REGISTRY_HOST, paths)
    check(found, "paths of one machine, or hosts of a registry:")


def test_every_test_states_its_rule_and_checks_it() -> None:
    """A test's docstring is the rule it protects; a test that asserts nothing protects none."""
    checks = re.compile(r"(.*\.)?_?(raises|check|check_\w+|assert_\w+|fail|run_state_machine_as_test)")
    found = []
    for path in sources("tests"):
        for function in functions(path):
            if not function.name.startswith("test_"):
                continue
            has_check = any(isinstance(node, ast.Assert) for node in ast.walk(function))
            has_check = has_check or any(checks.fullmatch(name) for name, _ in calls(function))
            if ast.get_docstring(function) is None:
                found.append(f"{path}:{function.lineno}: {function.name} has no docstring")
            if not has_check:
                found.append(f"{path}:{function.lineno}: {function.name} checks nothing")
    check(found, "tests without a rule or a check:")

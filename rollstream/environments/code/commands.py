"""How the repositories of SWE-bench run their tests, for instances that bring no script of their own. Pure.

Source: `test_cmd` of the SWE-bench harness's specifications (version 4), and its rule which tests a test patch means.
"""

from collections.abc import Sequence

CONDA = "/opt/miniconda3/bin/activate"
ACTIVATE = f"if [ -f {CONDA} ]; then . {CONDA}; conda activate testbed; fi"
"""Images of SWE-bench keep what a repository needs in this environment of conda's."""
DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
COMMANDS: dict[str, str] = {
    "django/django": DJANGO,
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""Any other repository has `PYTEST`."""
PYTEST = "pytest -rA"
OF_VERSION: dict[tuple[str, str], str] = {
    ("django/django", "1.9"): "./tests/runtests.py --verbosity 2",
    **{
        ("astropy/astropy", version): "pytest -rA -vv -o console_output_style=classic --tb=no"
        for version in ("0.1", "0.2", "0.3", "0.4", "1.1", "1.2", "1.3")
    },
}
NO_TESTS = (
    ".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml",
)  # fmt: skip
"""Files of a test patch that are no tests."""
SPEAKS_UTF8 = "export LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8"


def test_command(repository: str, version: str, paths: Sequence[str]) -> str:
    """The command that runs the tests in the files of a test patch."""
    command = OF_VERSION.get((repository, version)) or COMMANDS.get(repository, PYTEST)
    return " ".join([command, *(_quoted(directive) for directive in directives(repository, paths))])


def directives(repository: str, paths: Sequence[str]) -> list[str]:
    """What names the tests of files: their paths, and modules for Django's own runner."""
    files = [path for path in paths if not path.endswith(NO_TESTS)]
    if repository != "django/django":
        return files
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files if _is_django_test(path)]


def _is_django_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name == "tests.py" or name.startswith("test_") or "/tests/" in path or "/test_" in path


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"

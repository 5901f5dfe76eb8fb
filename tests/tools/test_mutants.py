"""Every mutant still applies to the code, and the tool tells those that a test sees from those that none sees."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.mutants import MARK, ROOT, ROW, SOURCE, Mutant, live_functions, read_mutants

import pacorl
from pacorl.core.sampler import Tree

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'campaign', 'vllm']\n",
    "src/pacorl/__init__.py": "",
    "src/pacorl/sums.py": (
        "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
        "    return result\n\n\n"
        "def mean(numbers):\n    return total(numbers) / len(numbers)\n"
    ),
    "tests/sums/test_sums.py": (
        "from pacorl.sums import mean, total\n\n\n"
        "def test_total():\n    assert total([1, 2]) == 3\n\n\ndef test_mean():\n    assert mean([0]) == 0\n"
    ),
    "tools/mutants.yaml": (
        "- {name: minus, file: sums.py, old: result += number, new: result -= number, why: a sign}\n"
        "- {name: undivided, file: sums.py, old: ' / len(numbers)', new: '', why: the sum is enough}\n"
        "- {name: forever, file: sums.py, old: '    return result', new: '        numbers.append(1)', why: an indent}\n"
    ),
    "tests/sums/test_broken.py": "def test_nothing():\n    assert False\n",
    "docs/page.md": (
        "# Bugs\n\n<!-- What follows is written by tools/mutants.py. -->\n\nold\n"
        "| minus | `sums.py` | it fails without it too | `sums/test_broken.py`: `test_nothing` | 1.0 |\n"
    ),
}


@pytest.mark.slow
def test_every_mutant_changes_a_function() -> None:
    faults = []
    for mutant in read_mutants(ROOT / "tools" / "mutants.yaml"):
        try:
            assert mutant.changes((ROOT / SOURCE / mutant.file).read_text(encoding="utf-8"))
        except ValueError as fault:
            faults.append(str(fault))
    assert faults == []


def test_a_mutant_that_no_longer_applies_is_named() -> None:
    mutant = Mutant("sign", "sums.py", old="a + b", new="a - b", why="a sign")
    with pytest.raises(ValueError, match=r"mutant sign: its old text occurs 2 times in src/pacorl/sums\.py"):
        mutant.changes("def f(a, b):\n    return a + b + (a + b)\n")
    with pytest.raises(ValueError, match=r"mutant sign changes no function of src/pacorl/sums\.py"):
        mutant.changes("def f(a, b):\n    return a  # a + b\n")


@pytest.mark.slow
def test_functions_that_the_garbage_collector_passes_over_are_found() -> None:
    """As everything is that pytest collected, by conftest.py."""
    code = Tree.leaves.__code__
    assert gc.get_freeze_count()
    found = live_functions(Path(pacorl.__file__).parent)
    assert found["core/sampler.py", code.co_qualname, code.co_firstlineno] == [Tree.leaves]
    assert gc.get_freeze_count()


def slow_tests(path: Path) -> set[str]:
    """Test functions of a file that are marked slow as a whole."""
    slow = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(decorator) for decorator in node.decorator_list}
            if "pytest.mark.slow" in marks:
                slow.add(node.name)
    return slow


def test_the_table_names_fast_tests() -> None:
    """A bug that only slow tests see is not seen by the tool, which runs fast tests alone."""
    _, _, written = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8").partition(MARK)
    rows = [row for row in map(ROW.fullmatch, written.splitlines()) if row]
    assert len(rows) > 300
    slow = {file: slow_tests(ROOT / "tests" / file) for file in {row[2] for row in rows}}
    assert [row[1] for row in rows if row[3] in slow[row[2]]] == []


def test_names_are_told_apart(tmp_path: Path) -> None:
    entry = "- {name: minus, file: sums.py, old: a, new: b, why: c}\n"
    (tmp_path / "mutants.yaml").write_text(2 * entry)
    with pytest.raises(ValueError, match="minus occurs twice"):
        read_mutants(tmp_path / "mutants.yaml")


@pytest.mark.slow
def test_it_says_which_test_sees_which_bug(tmp_path: Path) -> None:
    """A package of two functions, one of whose tests sees less than it should."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    code = "import sys; from pathlib import Path; from tools import mutants; mutants.PATIENCE = 2.0\n"
    code += "mutants.main(['--page', 'docs/page.md'], root=Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = []
    for _ in range(2):  # the second time the table says which test to begin with
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (1, "survives without a reason, or is seen and has one: undivided\n")
        page = (tmp_path / "docs" / "page.md").read_text()
        assert page.startswith("# Bugs\n\n<!--")
        assert "2 of 3 bugs are seen." in page
        assert "| minus | `sums.py` | a sign | `sums/test_sums.py`: `test_total` |" in page
        assert re.search(r"\| forever \| .* \| `sums/test_sums.py`: `test_(total|mean)`, which hangs \|", page)
        assert "| undivided | `sums.py` | the sum is enough | none |" in page
        assert "old" not in page
        said.append(run.stdout)
    assert "tests/sums/test_broken.py::test_nothing fails without a bug" in said[0]
    assert "0 tests of the table pass" in said[0]
    assert re.search("[12] tests of the table pass", said[1])
    assert (tmp_path / "src" / "pacorl" / "sums.py").read_text() == FILES["src/pacorl/sums.py"]

"""Programs, tests and scores; and what a program can and cannot do to the machine."""

import os
import time

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.code import Code
from rlmodule.rewards.parts.code_tests import code_of
from tests.rewards.samples import sample, value_of

ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
PRINTED = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = "def add(a, b): return a + b\n"


def block(*lines):
    return "Here it is:\n```python\n" + "\n".join(lines) + "\n```\nDone."


@pytest.fixture(scope="module")
def reward():
    made = Code(num_workers=1, test_seconds=2, timeout_seconds=4, memory_mb=256)
    yield made
    made._pool.close()


@pytest.mark.parametrize(
    ("text", "tests", "score"),
    [
        (block(ADD), ASSERTS, 1),
        (ADD, ASSERTS, 1),
        (block("def add(a, b): return a - b"), ASSERTS, 0),
        (block("import os, sys", ADD, "if __name__ == '__main__': sys.exit(1)"), ASSERTS, 1),
        (block("from dataclasses import dataclass", "@dataclass", "class P: x: int", ADD), ASSERTS, 1),
        (block(ADD), "assert add(1, 2) == 3\nassert add(2, 2) == 4\n", 1),
        (block("print(sum(map(int, input().split())))"), PRINTED, 1),
        (block("print(3)"), PRINTED, 0),
        (block("print(sum(map(int, input().split())))", "raise SystemExit(3)"), PRINTED, 0),
        (block("print(0.1 + 0.2)"), [{"input": "", "output": "0.3"}], 1),
        (block("print('Yes')"), [{"input": "", "output": "yes"}], 0),
        (block("print(' 1  2 \\n')"), [{"input": "", "output": "1 2"}], 1),
        (block("def f(x): return [x, x]"), {"inputs": [[1]], "outputs": [[[1, 1]]], "fn_name": "f"}, 1),
        (block("def f(x): return (x, x)"), {"inputs": [[1]], "outputs": [[1, 1]], "fn_name": "f"}, 1),
        (block("class Solution:", "  def f(self, x): return x + 1"), [{"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}], 1),
        (block("def add(a, b): return a + b"), "def check(candidate):\n    assert candidate(1, 2) == 3\n", 1),
        (block("def add(a, b): return 0"), "def check(candidate):\n    assert candidate(1, 2) == 3\n", 0),
        # pytest's functions, which import the solution (KodCode), and HumanEval's, whatever calls them
        (block(ADD), "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n", 1),
        (block("def add(a, b): return 7"), "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n", 0),
        (block("def add(a, b): return 7"), ["import math", "def test_add():\n    assert add(1, 2) == 3\n"], 0),
        (block("def add(a, b): return 7"), "def check(f):\n    assert f(1, 2) == 3\ncheck(add)\n", 0),
        # annotations of LeetCode, and numbers that differ in their last digit
        (block("class Solution:", "  def f(self, x: List[int]) -> Optional[int]: return len(x)"), {"inputs": [[[4]]], "outputs": [1], "fn_name": "f"}, 1),
        (block("def f(x): return [0.1 + 0.2]"), {"inputs": [[1]], "outputs": [[0.3]], "fn_name": "f"}, 1),
        (block("def f(x): return 0.31"), {"inputs": [[1]], "outputs": [0.3], "fn_name": "f"}, 0),
        # more tests than a pipe holds words
        (block("def f(x): return x"), {"inputs": [[i] for i in range(2500)], "outputs": list(range(2500)), "fn_name": "f"}, 1),
        # signs that end a line for Unicode, and not for Python
        (block("def f(x): return 'a\u2028b\x0c'"), {"inputs": [[1]], "outputs": ["a\u2028b\x0c"], "fn_name": "f"}, 1),
        # what a program leaves behind is not there in its next test
        (block("import os", "print(len(os.listdir()))", "open('mine', 'w')", "open('solution.py', 'w')"), {"inputs": ["", ""], "outputs": ["1", "1"]}, 1),
        (block("import os", "for i in range(1500): os.mkdir('d'); os.chdir('d')", "print(1)"), {"inputs": [""], "outputs": ["1"]}, 1),
        (block("foo("), ASSERTS, 0),
        ("I do not know", ASSERTS, 0),
        ("", ASSERTS, 0),
        # the exit code says nothing, and equality can be claimed
        (block("import os", "os._exit(0)"), ASSERTS, 0),
        (block("import sys", "sys.exit(0)"), ASSERTS, 0),
        (block("class Equal:", "  def __eq__(self, other): return True", "def f(x): return Equal()"), {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, 0),
        (block("import os", *[f"os.write({n}, b'0\\n1\\n')" for n in (1, 2)], "def add(a, b): return 0"), ASSERTS, 0),
    ],
)  # fmt: skip
def test_a_program_is_right_when_every_test_passes(reward, text, tests, score):
    assert value_of(reward, text, tests, entry_point="add") == score


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["while True: pass"], "timed_out"),
        (["import time", "time.sleep(100)"], "timed_out"),
        (["import time", "try: time.sleep(100)", "except BaseException: time.sleep(100)"], "timed_out"),
        (["x = bytearray(10**9)", ADD], ""),
        (["x = 9**9**9**9", ADD], "timed_out"),
    ],
)
def test_time_and_memory_have_limits(reward, lines, says):
    before = time.monotonic()
    [result] = reward([sample(block(*lines), ASSERTS)])
    assert time.monotonic() - before < 30
    assert result.value == 0
    assert result.counts["timed_out"] == float(says == "timed_out")


def test_endless_output_ends(reward):
    assert value_of(reward, block("while True: print('x' * 10**6)"), PRINTED) == 0


def test_what_a_program_starts_ends_with_it(reward, tmp_path):
    """It leaves the process group, and is orphaned."""
    lines = [
        "import os, time",
        "if os.fork() == 0:",
        "  os.setsid()",
        "  if os.fork() == 0: time.sleep(987)",
        "  os._exit(0)",
    ]
    assert value_of(reward, block(*lines, ADD), ASSERTS) == 1
    left = [entry for entry in os.listdir("/proc") if entry.isdigit() and "solution" in _command(entry)]
    assert not left


def _command(process):
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def test_the_trainer_s_environment_stays_away(reward, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    test = ["import os", "assert 'WANDB_API_KEY' not in os.environ and 'PYTHONPATH' not in os.environ"]
    assert value_of(reward, block("pass"), test) == 1


def test_no_network_where_the_system_allows(reward):
    if not reward.isolated["network"]:
        pytest.skip("this machine has no network namespaces for this user")
    lines = [
        "import socket",
        "try: socket.create_connection(('127.0.0.1', 22), 1)",
        "except OSError as error: why = error.errno",
    ]
    assert value_of(reward, block(*lines), ["assert why == 101  # unreachable, not refused"]) == 1


def test_no_other_files_where_the_system_allows(reward, tmp_path):
    if not reward.isolated["files"]:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "secret").write_text("5")
    tests = [
        f"try: open({str(tmp_path / 'secret')!r}).read()\nexcept PermissionError: pass\nelse: assert False",
        f"try: open({str(tmp_path / 'new')!r}, 'w')\nexcept PermissionError: pass\nelse: assert False",
        "import os, tempfile\nopen('mine', 'w').write('x')\nos.mkdir('d')\nos.rename('mine', 'd/x')\ntempfile.TemporaryFile()",
    ]
    assert value_of(reward, block("pass"), tests) == 1


def test_few_processes_where_they_can_be_counted(reward):
    if not reward.isolated["processes"]:
        pytest.skip("the processes of this user cannot be counted apart")
    lines = [
        "import os, time",
        "n = 0",
        "try:",
        "  for n in range(200):",
        "    if os.fork() == 0: time.sleep(9)",
        "except OSError: pass",
    ]
    assert value_of(reward, block(*lines), ["assert n < 30"]) == 1


def test_a_share_of_tests_where_it_is_asked_for():
    reward = Code(partial=True, num_workers=1)
    half = [{"input": "1", "output": "1"}, {"input": "2", "output": "1"}]
    assert value_of(reward, block("print(1)"), half) == 1
    assert value_of(reward, block("print(input())"), half) == 0.5
    assert value_of(reward, block("def add(a, b): return 3"), ASSERTS) == 0.5
    assert (
        value_of(reward, block("def add(a, b):", "  if a == 0: import os; os._exit(0)", "  return 3"), ASSERTS) == 0.5
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```py\nb\n```", "b"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```\na\n```", "a"),
        ("~~~python\na\n~~~", "a"),
        ("````python\n```\n````", "```"),
        ("```python\na", None),
        ("a", None),
        ("  ```Python\n  a\n  ```", "  a"),
    ],
)
def test_the_last_closed_block_of_python_counts(text, code):
    assert code_of(text, fenced_only=True) == code


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("assert x ==", "is no Python"),
        ("[]", "there is no test in it"),
        ('{"a": 1}', "tests are asserts, or inputs and outputs"),
        ("5", "tests are asserts"),
        ('[{"input": 1}]', "a test needs 'input' and 'output'"),
        ('{"inputs": ["1"], "outputs": []}', "lists of one length"),
        ("so\n#### 4", "nothing that runs is a test"),
        # nothing of these would run, so that every program would pass
        ("def check(candidate):\n    assert candidate(1) == 2\n", "no column says what is to be checked"),
        ("def test_f(tmp_path):\n    assert f(1) == 2\n", "test_f takes arguments or is a coroutine"),
        ("async def test_f():\n    assert f(1) == 2\n", "test_f takes arguments or is a coroutine"),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n",
            "nothing that runs",
        ),
        (
            "class T:\n    def test_f(self):\n        assert f(1) == 2\nif __name__ == '__main__':\n    T().test_f()\n",
            "nothing that runs",
        ),
        ("[" * 50_000, "nested too deeply"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "the input of f is a list of its arguments"),
        ('[{"input": "1", "output": "2", "metadata": [1]}]', "the metadata of a test is a mapping"),
        ("", "a test is code"),
        ("[5]", "a test is code"),
    ],
)
def test_rows_without_tests_are_refused(reward, tests, says):
    assert says in (reward.missing_fields(tests, {}) or "")


def test_tests_may_stand_in_another_column():
    reward = Code(tests_key="test_list", num_workers=1)
    assert "it has no column 'test_list'" in (reward.missing_fields("5", {}) or "")
    assert reward.missing_fields(None, {"test_list": ASSERTS}) is None
    assert value_of(reward, block(ADD), test_list=ASSERTS) == 1


@pytest.mark.parametrize("keys", [{"test_seconds": 0}, {"timeout_seconds": 1}, {"memory_mb": 1}, {"num_workers": 0}])
def test_limits_are_checked(keys):
    with pytest.raises(ConfigError):
        Code(**keys)

"""What runs the tests in a box, as a script that marks where their output begins and ends. Pure.

The markers carry a word that is new for every verification, so that what an agent's code prints cannot end the log early
or say with which status the tests ended.
"""

from dataclasses import dataclass
from typing import Literal

from rollstream.environments.code.grading import END, EXIT_CODE, START, InvalidLog, TestRun, between_markers, mark
from rollstream.environments.code.logs import shortened

Shell = Literal["sh", "bash"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A test command, or a whole script of SWE-bench's that brings markers of its own.

    Attributes:
        prologue: goes before the command, in the same shell.
        timeout_s: longest that all of it may take.
    """

    command: str
    timeout_s: float
    prologue: str = ""
    shell: Shell = "sh"
    is_script: bool = False

    def script(self, word: str) -> str:
        """What the shell is given."""
        if self.is_script:
            return _marked(self.command, word)
        return (
            f"exec 2>&1\n{self.prologue}\nprintf '\\n%s\\n' '{mark(START, word)}'\n{self.command}\ncode=$?\n"
            f"printf '\\n%s\\n%s %s\\n' '{mark(END, word)}' '{mark(EXIT_CODE, word)}' \"$code\"\nexit \"$code\"\n"
        )

    def read(self, log: str, exit_code: int | None, word: str) -> TestRun:
        """What the tests did, by the log of the script.

        Args:
            exit_code: the script's, from whoever ran it: the one word that nothing in the box can have written.

        Raises:
            InvalidLog: a marker is missing, or what is marked is not how the script ended.
        """
        run = between_markers(shortened(log), word)
        if not self.is_script and run.exit_code != exit_code:
            raise InvalidLog(f"expected tests that ended as their shell did, with {exit_code}, found {run.exit_code}")
        return run


def _marked(script: str, word: str) -> str:
    """A script of SWE-bench's, with the markers of one verification, that tells the exit status of its test command.

    Its own markers are commands that do nothing and are printed by `set -x`.
    """
    lines: list[str] = []
    for line in script.splitlines():
        bare = line.strip()
        if bare.startswith((":", "echo")) and START in bare:
            lines.append(f"printf '\\n%s\\n' '{mark(START, word)}'")
        elif bare.startswith((":", "echo")) and END in bare:
            lines.append("rollstream_code=$?")
            lines.append(f"printf '\\n%s\\n%s %s\\n' '{mark(END, word)}' '{mark(EXIT_CODE, word)}' \"$rollstream_code\"")
        else:
            lines.append(line)
    return "exec 2>&1\n" + "\n".join(lines) + "\n"

"""Reports on a job: rank 0 asks all ranks, and looks for the first difference between them.

A rank that does not report is looked at by another one on its machine: a stopped process, or one
whose interpreter is locked, cannot speak for itself.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.guard.verdict import RankStatus
from tfdml.runtime.hang_report import job_files, rank_report
from tfdml.runtime.hang_report.exchange_collector import ExchangeCollector
from tfdml.runtime.hang_report.exchange_log import EXCHANGE_LOG
from tfdml.runtime.hang_report.first_difference import Difference, first_difference
from tfdml.runtime.hang_report.rank_report import RankReport
from tfdml.runtime.hang_report.stacks import StackFile
from tfdml.runtime.hang_report.summary import summarize

# Seconds that ranks get to report, and then to look at those that have not.
REPORT_SECONDS = 3.0
LOOK_SECONDS = 3.0
_ENDED = "has ended its program"


class OwnReports:
    """This process's reports.

    Args:
        status: This process's rank, host and id.
        directory: Directory of the job's reports; it is made on this machine.
        activity: Current activity of the main thread.

    Raises:
        OSError: If the directory cannot be written to.
    """

    def __init__(self, status: RankStatus, directory: str, activity: Activity):
        self.directory = job_files.join_job_directory(directory)
        self._status = status
        self._activity = activity
        self._stack_file = StackFile(job_files.stacks_path(self.directory, status.rank))
        self._collector = ExchangeCollector(EXCHANGE_LOG)

    def was_asked(self) -> bool:
        """Returns whether another process, or a signal, has asked this one for a report."""
        return self._stack_file.was_asked()

    def report(self, name: str) -> RankReport:
        """Reports on this process, and writes its file.

        Args:
            name: Name of the report.
        """
        status = self._status
        report = rank_report.report_this_rank(
            status.rank, where(status), self._activity.describe(), EXCHANGE_LOG, self._stack_file
        )
        self._write(name, report)
        return report

    def look_at(self, name: str, report: RankReport, pid: int) -> RankReport:
        """Reports on a rank of this machine that does not do so itself.

        Args:
            name: Name of the report.
            report: Report on the rank as far as it is known.
            pid: Its process.
        """
        report = rank_report.report_silent_rank(report, pid, self.directory)
        self._write(name, report)
        return report

    def conclude(self, name: str, reports: Sequence[RankReport]) -> tuple[Difference | None, str]:
        """Returns the first difference between ranks, and the summary, which it writes."""
        difference = first_difference(reports)
        text = summarize(reports, difference, self.path(name))
        self.write_summary(name, text)
        return difference, text

    def write_summary(self, name: str, text: str) -> None:
        """Writes a report's summary on this machine."""
        job_files.write_whole(self.path(name) / job_files.SUMMARY, text)

    def path(self, name: str) -> Path:
        """Returns a report's directory."""
        return self.directory / name

    def close(self) -> None:
        """Deletes what is of no use without a report, when the program ends."""
        self._collector.close()
        self._stack_file.remove()
        with contextlib.suppress(OSError):  # Reports, or another rank's file.
            self.directory.rmdir()

    def _write(self, name: str, report: RankReport) -> None:
        job_files.write_whole(self.path(name) / f"rank{report.rank}.txt", report.in_words())


class JobReport:
    """A report that rank 0 collects: first all ranks report, then some look at those that have not.

    Args:
        members: State of all ranks.
        silence: Seconds after which a rank that was not heard is not waited for.
        now: Current time, in seconds of the monotonic clock.
    """

    def __init__(self, members: Sequence[RankStatus], silence: float, now: float):
        self.name = job_files.new_report_name()
        self._members = members
        self._found: dict[int, RankReport] = {}
        self._expected = {m.rank for m in members if m.runs and now - m.heard <= silence}
        self._deadline = now + REPORT_SECONDS
        self._looking = False

    def receive(self, report: RankReport) -> None:
        """Takes a rank's report. One of its own counts more than another's about it."""
        known = self._found.get(report.rank)
        if known is None or known.exchanges is None:
            self._found[report.rank] = report

    def is_over(self, now: float) -> bool:
        """Returns whether all ranks that are waited for have reported, or had time for it."""
        return self._expected <= self._found.keys() or now > self._deadline

    def looks(self, now: float) -> list[tuple[int, RankStatus]]:
        """Returns, once, who looks at whom: a rank, and the one of its host to be looked at."""
        if self._looking:
            return []
        self._looking = True
        reported = [m for m in self._members if m.rank in self._found]
        looks = []
        for member in self._members:
            if member.rank in self._found or not member.runs:
                continue
            looker = next((m for m in reported if m.host == member.host), None)
            if looker is not None:
                looks.append((looker.rank, member))
        self._expected = {member.rank for _, member in looks}
        self._deadline = now + LOOK_SECONDS
        return looks

    @property
    def reports(self) -> list[RankReport]:
        """The reports, those that are missing from what the guard knows."""
        return [self._found.get(m.rank) or known_of(m) for m in self._members]


def where(status: RankStatus) -> str:
    """Returns a rank's host and process in words."""
    return f"host {status.host}, pid {status.pid}"


def known_of(status: RankStatus) -> RankReport:
    """Returns a report on a rank from its last messages."""
    activity = (
        status.failure.activity if status.failure else status.beat.get("activity", "starting")
    )
    report = RankReport(status.rank, where(status), str(activity), rank_report.UNHEARD)
    if status.bye is not None:
        return dataclasses.replace(report, state=_ENDED)
    # Its connection breaks a moment before its process is gone.
    return dataclasses.replace(report, state=rank_report.GONE) if status.lost else report

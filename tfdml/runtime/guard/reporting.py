"""A process's part in its job's reports: it asks, is asked, or collects.

Rank 0 asks all ranks, then has some look at those that have not answered, and concludes. If rank 0
does not answer, a rank that was asked for a report from outside concludes alone.
"""

import os
import threading
import traceback
from collections.abc import Callable, Mapping

from tfdml.runtime.guard.activity import Activity
from tfdml.runtime.guard.job_report import JobReport, OwnReports, known_of
from tfdml.runtime.guard.verdict import RankStatus
from tfdml.runtime.hang_report.first_difference import Difference
from tfdml.runtime.hang_report.job_files import new_report_name
from tfdml.runtime.hang_report.rank_report import RankReport

# Seconds after which a rank that was asked for a report makes it without rank 0.
_ALONE_SECONDS = 8.0
# Heartbeats after which a rank that was not heard is not waited for.
_SILENT_BEATS = 3


class Reporting:
    """A process's part in reports.

    Args:
        directory: Directory of the job's reports.
        rank: This process's rank.
        members: State of the ranks that this one knows.
        activity: Current activity of the main thread.
        send_to: Function of a rank and a message, which sends it.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        members: Mapping[int, RankStatus],
        activity: Activity,
        send_to: Callable[[int, dict], None],
    ):
        self._rank = rank
        self._members = members
        self._send_to = send_to
        self._own = OwnReports(members[rank], directory, activity)
        # On rank 0: the report that is collected now, and whether another rank wants one.
        self._job: JobReport | None = None
        self._wanted = False
        # On the others: when a report was asked for that rank 0 has not begun since.
        self._asked: float | None = None

    def hear(self, message: dict) -> None:
        """Takes a message about reports, if it is one; answers from another thread."""
        kind = message.get("kind")
        if kind == "want report":
            self._wanted = True
        elif kind == "reported" and self._job and message["name"] == self._job.name:
            self._job.receive(RankReport.from_message(message["report"]))
        elif kind == "report":
            self._asked = None
            self._answer(message["name"], lambda: self._own.report(message["name"]))
        elif kind == "look":
            known = RankReport.from_message(message["report"])
            look = message["name"], known, message["pid"]
            self._answer(message["name"], lambda: self._own.look_at(*look))
        elif kind == "summary":
            self._own.write_summary(message["name"], message["text"])

    def _answer(self, name: str, report: Callable[[], RankReport]) -> None:
        def answer() -> None:
            try:
                message = {"kind": "reported", "name": name, "report": report().to_message()}
                self._send_to(0, message)
            except Exception:  # noqa: BLE001 (whatever it is, a report must not end the job)
                os.write(2, f"tfdml: no report of this rank: {traceback.format_exc()}\n".encode())

        threading.Thread(target=answer, name="tfdml-report", daemon=True).start()

    # -- Rank 0 --------------------------------------------------------------------------------

    def collect(self, now: float, beat: float, ending: bool) -> str | None:
        """Begins a report if one is wanted, and goes on with it.

        Args:
            now: Current time, in seconds of the monotonic clock.
            beat: Seconds between heartbeats.
            ending: Whether the job ends, so that a report is wanted.

        Returns:
            When a report is complete, the lines about it for people; None before.
        """
        if self._own.was_asked() or self._wanted or ending:
            self._wanted = False
            self._begin(now, beat)
        if self._job is None or not self._job.is_over(now):
            return None
        looks = self._job.looks(now)
        for looker, member in looks:
            report = known_of(member).to_message()
            look = {"kind": "look", "name": self._job.name, "report": report, "pid": member.pid}
            self._send_to(looker, look)
        if looks:
            return None
        job, self._job = self._job, None
        difference, text = self._own.conclude(job.name, job.reports)
        for rank in self._members:
            if rank != 0:
                self._send_to(rank, {"kind": "summary", "name": job.name, "text": text})
        return self._in_lines(difference, job.name)

    def _begin(self, now: float, beat: float) -> None:
        if self._job is not None:
            return
        members = [self._members[rank] for rank in sorted(self._members)]
        self._job = JobReport(members, _SILENT_BEATS * beat, now)
        for rank in self._members:
            self._send_to(rank, {"kind": "report", "name": self._job.name})

    # -- The other ranks -----------------------------------------------------------------------

    def answer_request(self, now: float) -> None:
        """Asks rank 0 for a report if this process was asked for one, or reports alone.

        Args:
            now: Current time, in seconds of the monotonic clock.
        """
        if self._own.was_asked():
            self._asked = now
            self._send_to(0, {"kind": "want report"})
        if self._asked is not None and now - self._asked > _ALONE_SECONDS:
            self._asked = None
            self.report_alone()

    def report_alone(self) -> str:
        """Reports without rank 0, which does not answer; returns the lines about it for people."""
        name = new_report_name()
        rank_0, own = known_of(self._members[0]), self._members[self._rank]
        if self._members[0].host == own.host and self._members[0].runs:
            rank_0 = self._own.look_at(name, rank_0, self._members[0].pid)
        difference, _ = self._own.conclude(name, [rank_0, self._own.report(name)])
        return self._in_lines(difference, name)

    # -- Both ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes part in no reports any more: the program ends."""
        self._own.close()

    def _in_lines(self, difference: Difference | None, name: str) -> str:
        lines = [f"  first difference: {difference.sentence}."] if difference else []
        return "\n".join([*lines, f"  report: {self._own.path(name)}"])

"""The index of a campaign: SQLite tables that a reader builds from the log, in a place of its own.

The running campaign never opens it. It may be deleted at any time; a damaged one, or one of another version of this
program or of another log, is built anew without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from mdcampaign.errors import CampaignError, LedgerCorrupt
from mdcampaign.layout import EVENTS
from mdcampaign.segments import EventReader, Position, read_events, segment_path
from mdcampaign.state import ENDED, Attempt, CampaignState, JobState

VERSION = 1
_WAIT_S = 30.0
_BATCH = 20_000
_JSON = {"observables", "outcome", "index"}
_NOTES = {"campaign_started", "campaign_ended", "node_joined", "node_lost", "warning", "steering", "directive"}
_JOB_COLUMNS = [f.name for f in fields(JobState) if f.name != "attempts"]
_ATTEMPT_COLUMNS = ["job", *(f.name for f in fields(Attempt))]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE jobs ({_quoted(_JOB_COLUMNS)}, PRIMARY KEY ("job")) WITHOUT ROWID;
CREATE TABLE attempts ({_quoted(_ATTEMPT_COLUMNS)}, PRIMARY KEY ("job", "number")) WITHOUT ROWID;
CREATE TABLE notes (t REAL, event TEXT, job TEXT, data TEXT);
CREATE INDEX jobs_by_state ON jobs (state);
PRAGMA user_version = {VERSION};
"""


class CampaignIndex:
    """Reads a campaign through an index that catches up with the log at each `refresh`.

    Args:
        directory: the campaign directory.
        path: the index file; by default one for each campaign in a directory of the user's on the local disk (a
            home directory on a network file system cannot be trusted with SQLite's locks). Where that cannot be
            written the index is kept in memory.
    """

    def __init__(self, directory: Path, path: Path | None = None) -> None:
        self._directory, self._events = directory, directory / EVENTS
        if not self._events.is_dir():
            raise CampaignError(f"{directory} is no campaign directory: it has no {EVENTS}/")
        self.path = path or default_path(directory)
        self._db = self._open()

    def refresh(self) -> int:
        """Take in what the log says since the last time; return the number of new events.

        Raises:
            LedgerCorrupt: the log is damaged; nothing is taken in.
            CampaignError: another reader holds the index for too long.
        """
        try:
            return self._catch_up()
        except LedgerCorrupt:
            pass  # perhaps it is another log than the one that was indexed
        except sqlite3.DatabaseError as exc:
            _raise_if_locked(exc)
        self._rebuild()
        return self._catch_up()

    def jobs(
        self, state: str | Iterable[str] | None = None, group: str | None = None, limit: int | None = None
    ) -> list[JobState]:
        """Return jobs in the order of their names, without their attempts; all, or those of a state or group."""
        wanted = [state] if isinstance(state, str) else list(state) if state is not None else None
        where, values = ["1"], []
        if wanted is not None:
            where.append(f"state IN ({', '.join('?' * len(wanted))})")
            values += wanted
        if group is not None:
            where.append('"group" = ?')
            values.append(group)
        sql = f"SELECT {_quoted(_JOB_COLUMNS)} FROM jobs WHERE {' AND '.join(where)} ORDER BY job LIMIT ?"
        return [_job(row) for row in self._rows(sql, (*values, -1 if limit is None else limit))]

    def job(self, job: str) -> JobState | None:
        """Return one job, by "GROUP/NAME", with its attempts."""
        rows = self._rows(f"SELECT {_quoted(_JOB_COLUMNS)} FROM jobs WHERE job = ?", (job,))
        if not rows:
            return None
        found = _job(rows[0])
        found.attempts = self.attempts(job)
        return found

    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job in their order."""
        sql = f"SELECT {_quoted(_ATTEMPT_COLUMNS)} FROM attempts WHERE job = ? ORDER BY number"
        return [_attempt(row) for row in self._rows(sql, (job,))]

    def all_attempts(self) -> list[tuple[str, Attempt]]:
        """Return every attempt with its job, in the order of their placement."""
        sql = f"SELECT {_quoted(_ATTEMPT_COLUMNS)} FROM attempts ORDER BY placed_s, job, number"
        return [(row[0], _attempt(row)) for row in self._rows(sql)]

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state that occurs."""
        return dict(self._rows("SELECT state, count(*) FROM jobs GROUP BY state ORDER BY state"))

    def notes(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return events that are not about the course of one job (nodes, warnings, directives, steering, ...)."""
        sql = "SELECT data FROM notes WHERE ? IS NULL OR event = ? ORDER BY rowid"
        return [json.loads(data) for (data,) in self._rows(sql, (event, event))]

    def close(self) -> None:
        """Close the index file."""
        self._db.close()

    def __enter__(self) -> CampaignIndex:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _catch_up(self) -> int:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
            since = Position(*json.loads(meta["position"])) if "position" in meta else Position()
            if since != Position() and meta.get("log") != self._log_id():
                raise LedgerCorrupt(f"{self._events} is another log than before")
            count, position = self._take_in(read_events(self._directory, since))
            values = [("position", json.dumps([position.segment, position.byte])), ("log", self._log_id())]
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)
            self._db.execute("COMMIT")
            return count
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _take_in(self, reader: EventReader) -> tuple[int, Position]:
        count, events = 0, iter(reader)
        while batch := list(islice(events, _BATCH)):
            state = _StoredState(self._db)
            state.extend(batch)
            state.save()
            notes = [
                (event["t"], event["event"], event.get("job"), json.dumps(event))
                for event in batch
                if event["event"] in _NOTES
            ]
            self._db.executemany("INSERT INTO notes VALUES (?, ?, ?, ?)", notes)
            count += len(batch)
        return count, reader.position

    def _log_id(self) -> str:
        """Return what tells this log from one that is begun later under the same path."""
        try:
            with segment_path(self._events, 1).open("rb") as file:
                return hashlib.sha256(file.readline()).hexdigest()
        except FileNotFoundError:
            return ""

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as exc:
            _raise_if_locked(exc)
            self._rebuild()
            self._catch_up()
            return self._db.execute(sql, values).fetchall()

    def _rebuild(self) -> None:
        self._db.close()
        self.path.unlink(missing_ok=True)
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        for _ in range(2):
            try:
                return _connect(str(self.path))
            except sqlite3.DatabaseError as exc:
                _raise_if_locked(exc)
                try:
                    self.path.unlink(missing_ok=True)
                except OSError:
                    break
        return _connect(":memory:")


class _StoredState(CampaignState):
    """A campaign's state whose jobs are fetched from the index when an event is about them."""

    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__()
        self._db = db
        self._empty = db.execute("SELECT NOT EXISTS (SELECT 1 FROM jobs)").fetchone()[0]

    def job(self, job: str) -> JobState:
        if job not in self.jobs and not self._empty:
            self._fetch("job = ?", (job,))
        return super().job(job)

    def unfinished(self) -> Iterator[JobState]:
        if not self._empty:
            self._fetch(f"state NOT IN ({', '.join('?' * len(ENDED))})", tuple(ENDED))
        return super().unfinished()

    def save(self) -> None:
        """Write the jobs that were fetched or made back into the index."""
        jobs = ([_stored(state, name) for name in _JOB_COLUMNS] for state in self.jobs.values())
        attempts = (
            [state.job, *(_stored(attempt, name) for name in _ATTEMPT_COLUMNS[1:])]
            for state in self.jobs.values()
            for attempt in state.attempts
        )
        self._db.executemany(f"INSERT OR REPLACE INTO jobs VALUES ({', '.join('?' * len(_JOB_COLUMNS))})", jobs)
        marks = ", ".join("?" * len(_ATTEMPT_COLUMNS))
        self._db.executemany(f"INSERT OR REPLACE INTO attempts VALUES ({marks})", attempts)

    def _fetch(self, where: str, values: tuple[Any, ...]) -> None:
        """Load the jobs that `where` selects, but never over one that is loaded and may have changed."""
        rows = self._db.execute(f"SELECT {_quoted(_JOB_COLUMNS)} FROM jobs WHERE {where}", values).fetchall()
        sql = f"SELECT {_quoted(_ATTEMPT_COLUMNS)} FROM attempts WHERE job = ? ORDER BY number"
        for row in rows:
            state = _job(row)
            if state.job not in self.jobs:
                state.attempts = [_attempt(found) for found in self._db.execute(sql, (state.job,))]
                self.jobs[state.job] = state


def default_path(directory: Path) -> Path:
    """Return where the index of a campaign is kept if nothing else is said: `$TMPDIR/mdcampaign-UID/`."""
    place = Path(tempfile.gettempdir()) / f"mdcampaign-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        place = Path(tempfile.mkdtemp(prefix="mdcampaign-"))  # somebody else sits on the name
    real = directory.resolve()
    return place / f"{real.name}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}.sqlite"


def _connect(path: str) -> sqlite3.Connection:
    """Open an index of this version, made if it is new; DatabaseError where the file is no such thing."""
    db = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous = OFF")  # it can be built again
        db.execute("PRAGMA cache_size = -65536")  # KiB; jobs come in no order of their names
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if empty:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"index of version {version}")
        db.execute("COMMIT")
        return db
    except BaseException:
        db.close()
        raise


def _raise_if_locked(exc: sqlite3.DatabaseError) -> None:
    if "locked" in str(exc):
        raise CampaignError(f"another reader holds the index for more than {_WAIT_S:g} s; try again") from exc


def _stored(record: JobState | Attempt, name: str) -> Any:
    value = getattr(record, name)
    return json.dumps(value) if name in _JSON else value


def _loaded(names: list[str], row: tuple[Any, ...]) -> dict[str, Any]:
    return {name: json.loads(value) if name in _JSON else value for name, value in zip(names, row)}


def _job(row: tuple[Any, ...]) -> JobState:
    values = _loaded(_JOB_COLUMNS, row)
    return JobState(**{**values, "exclusive": bool(values["exclusive"])})


def _attempt(row: tuple[Any, ...]) -> Attempt:
    return Attempt(**_loaded(_ATTEMPT_COLUMNS[1:], row[1:]))

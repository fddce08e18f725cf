#!/usr/bin/env python
"""Keep a list of tasks in a JSON file.

Usage examples::

    tasks add "Water the plants" --due 2024-05-01 --tag home
    tasks list --tag home
    tasks done 3
    tasks remove 3
"""

import argparse
import datetime
import enum
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

DATE_FORMAT = "%Y-%m-%d"
DEFAULT_PATH = Path.home() / ".tasks.json"
FILE_VERSION = 2


class TaskError(Exception):
    """An error that is reported to the user without a traceback."""


class Priority(enum.IntEnum):
    """How urgent a task is."""

    LOW = 1
    NORMAL = 2
    HIGH = 3

    @classmethod
    def from_name(cls, name: str) -> "Priority":
        """Look up a priority without regard to case."""
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(member.name.lower() for member in cls)
            raise TaskError(f"unknown priority {name!r}, choose from {names}")


def parse_date(text: str) -> datetime.date:
    """Convert a date given on the command line.

    Besides the ISO format, the words "today" and "tomorrow" are understood.
    """
    today = datetime.date.today()
    if text == "today":
        return today
    if text == "tomorrow":
        return today + datetime.timedelta(days=1)
    try:
        return datetime.datetime.strptime(text, DATE_FORMAT).date()
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a valid date: {text!r}")


@dataclass
class Task:
    """Something to be done."""

    id: int
    title: str
    priority: Priority = Priority.NORMAL
    due: Optional[datetime.date] = None
    tags: List[str] = field(default_factory=list)
    done: bool = False

    def is_overdue(self, today: Optional[datetime.date] = None) -> bool:
        """Tell whether the task should have been finished before today."""
        if self.done or self.due is None:
            return False
        return self.due < (today or datetime.date.today())

    def to_dict(self) -> Dict[str, Any]:
        """Convert the task to a dictionary that can be stored as JSON."""
        data = asdict(self)
        data["priority"] = self.priority.name.lower()
        if self.due is not None:
            data["due"] = self.due.strftime(DATE_FORMAT)
        return data

    @classmethod
    def from_dict(cls, data: Dict[str, Any]) -> "Task":
        """Create a task from the dictionary made by to_dict."""
        values = dict(data)
        values["priority"] = Priority.from_name(values.get("priority", "normal"))
        if values.get("due"):
            values["due"] = parse_date(values["due"])
        return cls(**values)


class TaskStore:
    """A collection of tasks saved in a file."""

    def __init__(self, path: Path = DEFAULT_PATH) -> None:
        self.path = Path(path)
        self.tasks: Dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(sorted(self.tasks.values(), key=lambda task: task.id))

    def load(self) -> None:
        """Read the tasks from the file, which may be missing."""
        if not self.path.exists():
            self.tasks = {}
            return
        with self.path.open(encoding="utf-8") as stream:
            try:
                data = json.load(stream)
            except json.JSONDecodeError as error:
                raise TaskError(f"cannot read {self.path}: {error}")
        if data.get("version") != FILE_VERSION:
            raise TaskError(f"{self.path} was written by another version")
        tasks = [Task.from_dict(item) for item in data["tasks"]]
        self.tasks = {task.id: task for task in tasks}

    def save(self) -> None:
        """Write the tasks to the file, replacing it in one step."""
        data = {
            "version": FILE_VERSION,
            "tasks": [task.to_dict() for task in self],
        }
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=2)
            stream.write("\n")
        os.replace(temporary, self.path)

    def get(self, task_id: int) -> Task:
        """Return the task with the given number."""
        try:
            return self.tasks[task_id]
        except KeyError:
            raise TaskError(f"there is no task {task_id}")

    def add(self, title: str, **options: Any) -> Task:
        """Create a task with the next free number."""
        task_id = max(self.tasks, default=0) + 1
        task = Task(id=task_id, title=title, **options)
        self.tasks[task_id] = task
        return task

    def remove(self, task_id: int) -> Task:
        """Delete a task."""
        task = self.get(task_id)
        del self.tasks[task_id]
        return task

    def filter(self, predicate: Callable[[Task], bool]) -> List[Task]:
        """Return the tasks for which the predicate is true."""
        return [task for task in self if predicate(task)]


def format_task(task: Task) -> str:
    """Describe a task in one line."""
    mark = "x" if task.done else " "
    parts = [f"[{mark}] {task.id:3d} {task.title}"]
    if task.priority is not Priority.NORMAL:
        parts.append(f"({task.priority.name.lower()})")
    if task.due is not None:
        parts.append(f"due {task.due.strftime(DATE_FORMAT)}")
    if task.tags:
        parts.append(" ".join("#" + tag for tag in task.tags))
    return " ".join(parts)


def cmd_add(store: TaskStore, args: argparse.Namespace) -> int:
    """Handle ``tasks add``."""
    task = store.add(
        args.title,
        priority=Priority.from_name(args.priority),
        due=args.due,
        tags=args.tag,
    )
    store.save()
    print(format_task(task))
    return 0


def cmd_done(store: TaskStore, args: argparse.Namespace) -> int:
    """Handle ``tasks done``."""
    for task_id in args.ids:
        task = store.get(task_id)
        task.done = True
        print(format_task(task))
    store.save()
    return 0


def cmd_remove(store: TaskStore, args: argparse.Namespace) -> int:
    """Handle ``tasks remove``."""
    for task_id in args.ids:
"""Log lines as JSON objects, one a line, for the service and its worker."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FORMATS = ("text", "json")
_HANDLER = "stemserve"

Context = Callable[[], Mapping[str, str]]


class JsonFormatter(logging.Formatter):
    """What a record's `fields` holds (logging's `extra`) becomes keys of the object."""

    def __init__(self, process: str, context: Context) -> None:
        """`context` gives what is known where the line is written, such as the call's id."""
        super().__init__()
        self._process = process
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(
    *, level: str, form: str, process: str, context: Context = dict[str, str]
) -> None:
    """`form`: one of FORMATS. May be called again; handlers of others stay."""
    root = logging.getLogger()
    for known in [handler for handler in root.handlers if handler.get_name() == _HANDLER]:
        root.removeHandler(known)
    handler = logging.StreamHandler()
    handler.set_name(_HANDLER)
    handler.setFormatter(
        JsonFormatter(process, context) if form == "json" else logging.Formatter(TEXT_FORMAT)
    )
    root.addHandler(handler)
    root.setLevel(level.upper())

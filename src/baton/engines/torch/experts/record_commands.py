"""The commands `experts/record/*`: start, stop, and write what is recorded."""

from baton.config.environment import expert_record_directory
from baton.engines.torch.experts.dump import write_records
from baton.engines.torch.experts.pass_counter import PassCounter
from baton.engines.torch.experts.recorder import ExpertRecorder, Records
from baton.errors import EngineFailed, InvalidRequest, Unsupported
from baton.protocol.commands import Outcome, StartExpertRecord, StopExpertRecord


class RecordCommands:
    """Executes the commands on the recorder of one engine. Between two steps, except `write`."""

    def __init__(self, counter: PassCounter | None) -> None:
        self._counter = counter

    def execute(self, command: StartExpertRecord | StopExpertRecord) -> Outcome:
        """Begin a new record, without what was recorded before; or stop. What is recorded can still be written."""
        recorder = self._recorder()
        if isinstance(command, StopExpertRecord):
            recorder.stop()
            return Outcome(message=f"stopped recording; {recorder.passes} passes can be written")
        again = recorder.recording
        recorder.start()
        return Outcome(message="recording again from the start" if again else f"recording {recorder.mode}")

    def take(self) -> Records:
        """Return what is to be written. Raises InvalidRequest if that is nothing."""
        recorder = self._recorder()
        if not recorder.passes:
            raise InvalidRequest("no pass has been recorded: use experts/record/start, and send requests")
        return recorder.records(self._counting().layout)

    def write(self, records: Records) -> str:
        """Write the file and return its path. Any thread; blocks. Raises EngineFailed."""
        directory = expert_record_directory()
        try:
            return str(write_records(records, self._counting().layers, directory))
        except (OSError, RuntimeError) as error:
            raise EngineFailed(f"the record cannot be written to {directory}: {error}") from error

    def forget(self, records: Records, path: str) -> Outcome:
        """Drop what has been written to `path`, so that the next file begins after it."""
        self._recorder().forget(records)
        dropped = (
            f"; {records.dropped} older ones were dropped, see --experts-recorder-buffer" if records.dropped else ""
        )
        return Outcome(message=f"{len(records.passes)} passes written{dropped}", path=path)

    def _recorder(self) -> ExpertRecorder:
        recorder = self._counting().recorder
        if recorder is None:
            raise Unsupported("the recorder of experts is off: start the worker with --experts-recorder")
        return recorder

    def _counting(self) -> PassCounter:
        if self._counter is None:
            raise Unsupported("this model has no experts")
        return self._counter

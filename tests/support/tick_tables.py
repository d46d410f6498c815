"""Runs a tick table on names: every slot holds the name of what an array would hold, and every read
is compared.
"""

import collections

from shardlib.schedules import Task
from shardlib.tick_tables import TickTable


def check_tick_table(table: TickTable, m: int, training: bool = True) -> None:
    """Asserts that nothing is overwritten before its last read, read before it arrived, done twice
    or not at all, with `m` microbatches. The `stages` and `halves` of the table are trusted.
    """
    columns, p = table.columns, len(table.stages)
    last = sum(map(len, table.stages)) - 1
    one_message = not (columns["forward"] * columns["backward"]).any()
    held = [collections.defaultdict(dict) for _ in range(p)]
    sizes = {"arrivals": table.arrivals, "residuals": table.residuals, "kept": table.kept}
    sent: list[tuple[Task | None, Task | None]] = [(None, None)] * p
    done = collections.Counter()

    def run(tick: int, device: int) -> tuple[Task | None, Task | None]:
        """Does what a device does in a tick; what it sends: results of a forward and a backward."""
        row = {name: int(column[tick, device]) for name, column in columns.items()}
        buffers, tasks = held[device], {}

        def write(buffer: str, column: str, task: Task | None) -> None:
            # the last slot of arrivals takes what nobody reads
            assert row[column] < sizes[buffer] + (buffer == "arrivals"), (tick, device, column)
            buffers[buffer][row[column]] = task

        def read(buffer: str, column: str, needed: Task) -> None:
            found = buffers[buffer].get(row[column])
            assert found == needed, (tick, device, buffer, row[column], found, needed)

        def head() -> None:
            """The loss: its gradient replaces the output of the last stage."""
            if row["backward_last"]:
                k = row["backward_microbatch"]
                read("arrivals", "backward_cotangent", Task("forward", last, k))
                write("arrivals", "backward_cotangent", Task("backward", last + 1, k))

        for slot in ("forward", "backward", "weights"):
            if row[slot]:
                stage, k = table.stages[device][row[f"{slot}_chunk"]], row[f"{slot}_microbatch"]
                tasks[slot] = Task(slot, stage, k)
                if slot != "weights":
                    ends = row[f"{slot}_first"], row[f"{slot}_last"]
                    assert ends == (stage == 0, stage == last), (tick, device, tasks[slot])
        done.update(tasks.values())
        if row["forward_first"]:
            write("arrivals", "forward_input", Task("forward", -1, row["forward_microbatch"]))
        if one_message:
            head()
        if forward := tasks.get("forward"):
            read("arrivals", "forward_input", forward._replace(stage=forward.stage - 1))
            if training:
                write("residuals", "forward_residuals", forward)
        write("arrivals", "forward_output", forward)
        if not one_message:
            head()
        if backward := tasks.get("backward"):
            read("residuals", "backward_residuals", backward._replace(kind="forward"))
            read("arrivals", "backward_cotangent", backward._replace(stage=backward.stage + 1))
            if table.halves:
                write("kept", "backward_kept", backward)
        if weights := tasks.get("weights"):
            read("kept", "weights_kept", weights._replace(kind="backward"))
            read("residuals", "weights_residuals", weights._replace(kind="forward"))
        return forward, backward

    for tick in range(len(columns["forward"])):
        for device in range(p):
            (left, left_back), (right_forward, right) = sent[device - 1], sent[(device + 1) % p]
            # A device that has only one result sends it everywhere.
            arrived = {
                "from_left": left or (left_back if one_message else None),
                "from_right": right or (right_forward if one_message else None),
                "from_self": sent[device][0] or sent[device][1],
            }
            for column, task in arrived.items():
                held[device]["arrivals"][int(columns[column][tick, device])] = task
        sent = [run(tick, device) for device in range(p)]
    kinds = ("forward", *(("backward",) * training), *(("weights",) * table.halves))
    every = [Task(kind, s, k) for kind in kinds for s in range(last + 1) for k in range(m)]
    assert done == collections.Counter(every)

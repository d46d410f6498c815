"""A server of ClearML for tests, with tasks and queues in memory, and agents that run what is in a queue."""

import base64
import copy
import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.support.local_server import LocalServer, SilentHandler

_STATUS = {"started": "in_progress", "stopped": "stopped", "completed": "completed", "close": "closed"}


class ClearMLServer(LocalServer):
    """Tasks by their id. A context manager.

    Attributes:
        tasks: what `tasks.get_by_id` answers, by id.
        queue: ids of the tasks that wait for an agent.
        scalars: (task, metric, variant, iteration, value) of the events.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.tasks: dict[str, dict] = {}
        self.queue: list[str] = []
        self.scalars: list[tuple] = []

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a process that works with this server, and reaches no other one."""
        hosts = {f"CLEARML_{name}_HOST": self.url for name in ("API", "WEB", "FILES")}
        keys = {"CLEARML_API_ACCESS_KEY": "key", "CLEARML_API_SECRET_KEY": "secret"}
        files = {"CLEARML_CONFIG_FILE": str(home / "clearml.conf"), "CLEARML_CACHE_DIR": str(home / "clearml")}
        closed = {"https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
        return os.environ | hosts | keys | files | closed | {"HOME": str(home)}

    def edit(self, task: str, **settings: str) -> None:
        """What a user does in the settings of a task: changes values, or adds some."""
        section = self.tasks[task]["hyperparams"]["settings"]
        for name, value in settings.items():
            section[name] = {"section": "settings", "name": name, "value": value}

    def clone(self, task: str) -> str:
        """Puts a copy of a task into the queue, as a user does; returns its id."""
        copied = self.copied(task, status="queued")
        self.queue.append(copied)
        return copied

    def copied(self, task: str, **changes: Any) -> str:
        """Copies a task with these changes; returns its id."""
        new = uuid.uuid4().hex
        self.tasks[new] = copy.deepcopy(self.tasks[task]) | {"id": new, "runtime": {}} | changes
        return new

    def agent(self, checkout: Path, env: dict[str, str]) -> subprocess.Popen:
        """Starts the next task of the queue, with what clearml-agent takes of it."""
        task = self.tasks[self.queue.pop(0)]
        task["status"] = "in_progress"
        words = shlex.split(os.path.expandvars(task["script"]["entry_point"]))
        where = (checkout / task["script"]["working_dir"]).resolve()
        env = env | {"CLEARML_TASK_ID": task["id"], "TRAINS_TASK_ID": task["id"]}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, "-u", *words], cwd=where, env=env, **output)


class _Handler(SilentHandler):
    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        call = self.path.partition("?")[0].rsplit("/", 1)[-1]
        self.server.requests.append((self.command, call))
        lines = [json.loads(line) for line in body.splitlines() if line.strip()] or [{}]
        meta = {"id": "1", "trx": "1", "result_code": 200, "result_subcode": 0, "result_msg": "OK", "error_stack": ""}
        meta["endpoint"] = {"name": call, "requested_version": "2.13", "actual_version": "2.13"}
        text = json.dumps({"meta": meta, "data": answer(self.server, call, lines)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = answer


def token() -> str:
    """A token that states the version of the API, and ends in a day. Clients do not check its signature."""
    parts = {"alg": "HS256", "typ": "JWT"}, {"exp": int(time.time()) + 86400, "api_version": "2.13", "env": "test"}
    words = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*words, "c2ln"])


def answer(server: ClearMLServer, call: str, lines: list[dict]) -> dict:
    """What the server answers to a call."""
    kind, _, verb = call.partition(".")
    asked = lines[0]
    if call == "auth.login":
        return {"token": token()}
    if kind == "events":
        names = "task", "metric", "variant", "iter", "value"
        server.scalars += [tuple(map(event.get, names)) for event in lines if "value" in event]
        return {"added": len(lines), "errors": 0}
    if kind in ("projects", "queues"):
        name = (asked.get("name") or "gpus").removeprefix("^").removesuffix("$")
        return {kind: [{"id": name, "name": name}], "id": name}
    if kind != "tasks":
        return {}
    if verb == "create":
        made = {"id": uuid.uuid4().hex, "status": "created", "hyperparams": {}, "configuration": {}, "runtime": {}}
        made |= {"script": {}, "execution": {}, "system_tags": [], "tags": [], "type": "training", "last_iteration": 0}
        server.tasks[made["id"]] = made | asked
        return {"id": made["id"]}
    if verb.startswith("get_all"):
        wanted = asked.get("id") or []
        return {"tasks": [server.tasks[i] for i in ([wanted] if isinstance(wanted, str) else wanted)]}
    task = server.tasks[asked["task"]]
    if verb.startswith("get_by_id"):
        return {"task": task}
    if verb == "enqueue":
        task |= {"status": "queued", "execution": task["execution"] | {"queue": asked.get("queue") or "gpus"}}
        server.queue.append(task["id"])
        return {"queued": 1, "updated": 1}
    if verb == "edit_hyper_params":
        if asked.get("replace_hyperparams") == "all":
            task["hyperparams"].clear()
        for item in asked["hyperparams"]:
            task["hyperparams"].setdefault(item["section"], {})[item["name"]] = item
    elif verb == "edit_configuration":
        task["configuration"] |= {item["name"]: item for item in asked["configuration"]}
    elif verb == "set_requirements":
        task["script"]["requirements"] = asked["requirements"]
    elif verb in ("edit", "update"):
        task |= {key: value for key, value in asked.items() if key not in ("task", "force")}
    elif verb in _STATUS:
        task["status"] = _STATUS[verb]
    return {"updated": 1, "fields": {}}

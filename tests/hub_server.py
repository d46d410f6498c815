"""A server of the hub for tests: repositories in memory, as `upload_folder` of huggingface_hub fills them.

Large files come by the LFS protocol, in one part. A commit is taken only if all of its files have come.
"""

import base64
import hashlib
import json
import re
import urllib.parse

from local_server import LocalServer, SilentHandler

TOKEN = "hf_of_the_test"
_LFS = (".safetensors", ".png")
"""Endings of files that come by LFS, whatever their size."""


class HubServer(LocalServer):
    """Repositories by <owner>/<name>. A context manager.

    Attributes:
        repositories: of each, whether it is private, its files, and the messages of its commits.
        objects: contents that came by LFS, by their SHA-256.
        failing: pattern of the paths that are answered with the status `failure`.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.repositories: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.failing, self.failure = re.compile("$^"), 500

    def add(self, name: str, private: bool) -> dict:
        self.repositories[name] = {"private": private, "files": {}, "commits": []}
        return self.repositories[name]


class _Handler(SilentHandler):
    def answer(self, status: int, content: dict | None = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        server = self.server
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size) if "chunked" not in self.headers.get("Transfer-Encoding", "") else self.chunks()
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        server.requests.append((self.command, path))
        if server.failing.search(path):
            return self.answer(server.failure, {"error": "the server says no"})
        if put := re.fullmatch(r"/objects/(\w+)", path):  # its address is the secret
            server.objects[put[1]] = body
            return self.answer(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        found = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w-]+)(?:\.git/info/lfs/objects)?(?:/(.*))?", path)
        if found is None or found[1] not in server.repositories:
            return self.answer(404, {"error": "Repository not found"})
        repository, what = server.repositories[found[1]], found[2]
        if what is None or what == "revision/main":
            return self.answer(200, {"id": found[1], "private": repository["private"], "sha": "0" * 40, "siblings": []})
        if what == "preupload/main":
            modes = [(f["path"], "lfs" if f["path"].endswith(_LFS) else "regular") for f in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]
            return self.answer(200, {"files": files})
        if what == "batch":
            objects = [x | {"actions": self.actions(found[1], x["oid"])} for x in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if what == "verify":
            asked = json.loads(body)
            content = server.objects.get(asked["oid"], b"")
            right = len(content) == asked["size"] and hashlib.sha256(content).hexdigest() == asked["oid"]
            return self.answer(200 if right else 422, {})
        if what == "commit/main":
            return self.commit(found[1], repository, [json.loads(line) for line in body.splitlines()])
        return self.answer(404, {"error": f"no {what}"})

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def create(self, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.server.repositories else 200
        if status == 200:
            self.server.add(name, asked.get("visibility") == "private" or asked.get("private") is True)
        self.answer(status, {"url": f"{self.server.url}/{name}"})

    def actions(self, name: str, oid: str) -> dict:
        verify = {"href": f"{self.server.url}/{name}.git/info/lfs/objects/verify"}
        return {"upload": {"href": f"{self.server.url}/objects/{oid}"}, "verify": verify}

    def commit(self, name: str, repository: dict, lines: list[dict]) -> None:
        new = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] in self.server.objects:
                new[value["path"]] = self.server.objects[value["oid"]]
            else:
                return self.answer(400, {"error": f"no such object: {value}"})
        repository["files"] |= new
        repository["commits"].append(message)
        url = f"{self.server.url}/{name}/commit/{'1' * 40}"
        self.answer(200, {"success": True, "commitUrl": url, "commitOid": "1" * 40})

    do_GET = do_PUT = do_POST = do_HEAD = handle_any

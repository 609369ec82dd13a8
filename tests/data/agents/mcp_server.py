"""A small MCP server over stdin and stdout, or with a port over HTTP; its count tells it from another one.

With the first argument `plain`, it offers one valid tool and keeps to the specification.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

count = 0
PLAIN = sys.argv[1:2] == ["plain"]
PORTS = [int(word) for word in sys.argv[1:] if word != "plain"]
SCHEMA = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}


def answered(message):
    global count
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "c", "version": "1"},
        }
    if method == "tools/list" and PLAIN:
        return {"tools": [{"name": "add", "description": "Adds.", "inputSchema": SCHEMA}]}
    if method == "tools/list":
        if "cursor" in params:
            return {"tools": [{"name": "die", "inputSchema": {"type": "object"}}]}
        wrong = {"name": "wrong", "inputSchema": {"type": "string"}}
        return {"tools": [{"name": "add/it", "description": "Adds.", "inputSchema": SCHEMA}, wrong], "nextCursor": "2"}
    if params["name"] == "die":
        print("I die.", file=sys.stderr, flush=True)
        sys.exit(3)
    if not isinstance(params["arguments"].get("by"), int):
        return {"isError": True, "content": [{"type": "text", "text": "by is no number"}]}
    count += params["arguments"]["by"]
    if PLAIN:
        return {"content": [{"type": "text", "text": f"{count} units"}]}
    return {"content": [{"type": "text", "text": f"{count} ünits"}, {"type": "image", "mimeType": "image/png"}]}


def reply(message):
    if PLAIN and message["method"] not in ("initialize", "ping", "tools/list", "tools/call"):
        error = {"code": -32601, "message": "Method not found"}
        return json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answered(message)})


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(405)

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if message["method"] != "initialize" and self.headers["Mcp-Session-Id"] != "s-1":
            self.send_error(404)
            return
        if "id" not in message:
            self.send_response(202)
            self.end_headers()
            return
        is_stream = message["method"] == "tools/call"
        text = reply(message)
        body = (f"event: message\ndata: {text}\n\n" if is_stream else text).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Mcp-Session-Id", "s-1")
        self.end_headers()
        self.wfile.write(body)


if PORTS:
    ThreadingHTTPServer(("127.0.0.1", PORTS[0]), Handler).serve_forever()
for line in sys.stdin:
    said = json.loads(line)
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}), flush=True)
    if "id" in said:
        print(reply(said), flush=True)

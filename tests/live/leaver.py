"""A client that leaves in the middle of an answer and sends the identical body again, as every harness does
after a time-out.

Run inside a container with nothing but Python's standard library. Its arguments: the API, "stream" or
"whole", and how many pieces of text it hears before it leaves. What it heard is in `before.txt` and
`heard.txt` of its working folder.
"""

import http.client
import json
import os
import sys
import time

HOST, PORT = "127.0.0.1", 8080
# seconds after which it leaves an answer that does not stream: the prompt is read by then, the answer is not
# made
WHOLE_S = 0.5


def main() -> None:
    api, streamed, pieces = sys.argv[1], sys.argv[2] == "stream", int(sys.argv[3])
    before = first(api, streamed, pieces)
    connection, response = asked(api, streamed)
    heard = "".join(texts(api, response)) if streamed else whole(api, json.load(response))
    connection.close()
    for name, text in (("before.txt", before), ("heard.txt", heard)):
        with open(name, "w") as file:
            file.write(text)
    print(len(before), len(heard))


def first(api, streamed, pieces) -> str:
    """Ask, hear a little, and leave."""
    connection, response = asked(api, streamed, wait=streamed)
    heard = []
    if streamed:
        for text in texts(api, response):
            heard.append(text)
            if len(heard) >= pieces:
                break
    else:
        time.sleep(WHOLE_S)
    if response is not None:
        response.close()
    connection.close()
    return "".join(heard)


def asked(api, streamed, wait=True):
    path, headers, body = request(api, streamed)
    connection = http.client.HTTPConnection(HOST, PORT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
    if not wait:
        return connection, None
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status} {response.read()!r}")
    return connection, response


def request(api, streamed):
    key, text = os.environ["OPENAI_API_KEY"], os.environ["POLARNODE_INSTRUCTION"]
    bearer, said = {"Authorization": f"Bearer {key}"}, [{"role": "user", "content": text}]
    if api == "chat":
        return "/v1/chat/completions", bearer, {"model": "m", "messages": said, "stream": streamed}
    if api == "responses":
        return "/v1/responses", bearer, {"model": "m", "input": said, "stream": streamed}
    if api == "anthropic":
        return (
            "/v1/messages",
            {"x-api-key": key},
            {"model": "m", "messages": said, "max_tokens": 16000, "stream": streamed},
        )
    verb = "streamGenerateContent?alt=sse" if streamed else "generateContent"
    return (
        f"/v1beta/models/m:{verb}",
        {"x-goog-api-key": key},
        {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    )


def texts(api, response):
    """The visible text of a stream, piece by piece."""
    for line in response:
        if line.startswith(b"data: {"):
            text = piece(api, json.loads(line[6:]))
            if text:
                yield text


def piece(api, event) -> str:
    if api == "chat":
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if api == "responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    if api == "anthropic":
        return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
    return whole(api, event)


def whole(api, answer) -> str:
    if api == "chat":
        return answer["choices"][0]["message"]["content"]
    if api == "responses":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if api == "anthropic":
        return "".join(block["text"] for block in answer["content"])
    return "".join(
        part.get("text", "")
        for candidate in answer["candidates"]
        for part in candidate["content"].get("parts", ())
    )


if __name__ == "__main__":
    main()

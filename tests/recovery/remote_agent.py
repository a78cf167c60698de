"""An agent on another machine: it has a URL, a key and the file of an authority, all by its environment.

`talk`: the official SDKs, as in any program. `try`: what somebody without the key gets. `stream`: a call that
is still running when its node dies. Each prints lines of JSON.
"""

import json
import os
import sys

import anthropic
import httpx
import openai
from google import genai


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def talk() -> None:
    with openai.OpenAI(max_retries=0) as client:
        history: list = [{"role": "user", "content": "hi"}]
        for more in ("Go on.", ""):
            answer = client.chat.completions.create(model="m", messages=history).choices[0].message
            say(text=answer.content)
            history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": more}]
    with (
        anthropic.Anthropic(max_retries=0) as client,
        client.messages.stream(
            model="m", max_tokens=64, messages=[{"role": "user", "content": "Say a word."}]
        ) as stream,
    ):
        say(text="".join(stream.text_stream))
    with genai.Client(api_key=os.environ["GEMINI_API_KEY"]) as client:
        say(text=client.models.generate_content(model="m", contents="Say another.").text)


def attempt() -> None:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    plain = url.replace("https://", "http://")
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for name, where, with_key in (
        ("right", url, key),
        ("wrong", url, "sk-guessed"),
        ("none", url, ""),
        ("plain", plain, key),
    ):
        headers = {"Authorization": f"Bearer {with_key}"} if with_key else {}
        answer = httpx.post(f"{where}/chat/completions", json=chat, headers=headers, timeout=60)
        say(name=name, status=answer.status_code, text=answer.text)
    try:  # the environment's authority is what makes the address trusted
        httpx.get(url, verify=True, trust_env=False)
    except httpx.ConnectError as error:
        say(name="untrusted", text=str(error))
    for other in json.loads(sys.argv[2]):  # ports of the node's machine
        try:
            httpx.get(other, timeout=2, trust_env=False)
            say(name="reached", text=other)
        except httpx.TransportError:
            say(name="closed", text=other)


def stream() -> None:
    with openai.OpenAI(max_retries=0) as client:
        messages: list = [{"role": "user", "content": "hi"}]
        said = ""
        try:
            for chunk in client.chat.completions.create(
                model="m", messages=messages, stream=True, max_tokens=4000
            ):
                said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                say(text=said)
        except (openai.APIError, httpx.TransportError) as error:
            say(error=type(error).__name__)


{"talk": talk, "try": attempt, "stream": stream}[sys.argv[1]]()

import re,os,sysconfig,json,builtins
std=sysconfig.get_paths()["stdlib"]; site="@W@/main/.venv/lib/python3.11/site-packages"
libs=[std]+[f"{site}/{l}" for l in "trio hypercorn quart quart_trio werkzeug podman openai anthropic google/genai google/protobuf attrs attr cattrs psycopg ray/_private ray/actor.py ray/util/state hypothesis pytest _pytest httpx httpcore numpy requests urllib3 cryptography jinja2 tokenizers transformers/tokenization_utils_base.py transformers/configuration_utils.py orjson fsspec h11 sglang/srt regex zstandard playwright tinker verl skyrl trl peft datasets pyarrow pandas xgrammar schemathesis jsonschema anyio outcome sniffio importlinter websockets wsproto h2 hpack torch/nn/modules torch/_tensor.py torch/optim torch/utils/data yaml msgpack zmq pydantic".split()]
pat=re.compile(r"\b(?:def|class) (\w+)|^\s*(?:self\.)?(\w+) ?(?::[^=\n]+)?=(?!=)|^\s+(\w+): ",re.M)
S=set()
for lib in libs:
    it=[(os.path.dirname(lib),[],[os.path.basename(lib)])] if lib.endswith(".py") else os.walk(lib)
    for d,_,fs in it:
        if ("site-packages" in d and lib==std) or "/test" in d or "/idlelib" in d or "/lib2to3" in d: continue
        for f in fs:
            if f.endswith((".py",".pyi")):
                try: t=open(os.path.join(d,f)).read()
                except Exception: continue
                for a in pat.findall(t): S.update(x for x in a if x)
for o in (str,bytes,bytearray,list,dict,set,frozenset,tuple,int,float,complex,type,object,memoryview,slice,range,BaseException,OSError,property): S.update(dir(o))
import array,collections,re as _re,sqlite3,threading,datetime,io,socket,ssl,zlib,select,decimal
for o in (array.array,collections.deque,collections.Counter,collections.OrderedDict,_re.Pattern,_re.Match,sqlite3.Connection,sqlite3.Cursor,datetime.datetime,io.BytesIO,io.TextIOWrapper,io.BufferedReader,socket.socket,ssl.SSLContext,ssl.SSLSocket,memoryview,select.epoll,decimal.Decimal): S.update(dir(o))
for m in ("os","sys","time","signal","math","itertools","functools","operator","socket","select","zlib","sqlite3","json","ctypes","resource","fcntl","gc","marshal","errno","stat","hashlib","builtins"): S.update(dir(__import__(m)))
try:
    import orjson,regex,xxhash,zstandard
    for m in (orjson,regex,xxhash,zstandard): S.update(dir(m))
except Exception as e: print(e)
json.dump(sorted(S),open("@T@/words/lib_names.json","w")); print(len(S))

"""The example proxy: alone with engines that are made up, and with real ones, of which one is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from tests.engines.vllm.engine import Prompt, wait_until
from tests.engines.vllm.workload import draw

ROOT = Path(__file__).parents[3]
PROXY = ROOT / "examples" / "prefill_decode_proxy.py"
PREFILL, DECODE = "http://prefill", "http://decode"


def load_proxy():
    spec = importlib.util.spec_from_file_location("prefill_decode_proxy", PROXY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(engines, path, body, prefill=(PREFILL,), decode=(DECODE,), headers=None, **options):
    """Send one request through the proxy to ``engines``, a function from request to response."""

    async def send():
        app = load_proxy().make_app(
            prefill, decode, transport=httpx.MockTransport(engines), **options
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://proxy"
        ) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(send())


class Engines:
    """Engines that note what they are asked."""

    def __init__(self, prefill=None, decode=None):
        self.asked = []
        self._prefill, self._decode = prefill, decode

    def __call__(self, request):
        body = json.loads(request.content)
        self.asked.append((request.url.host, request.url.path, body))
        answer = self._prefill if request.url.host.startswith("prefill") else self._decode
        if isinstance(answer, Exception):
            raise answer
        return answer or httpx.Response(200, json={})


class TestProxyAlone:
    def test_the_prompt_is_computed_first_and_the_decode_engine_is_told(self):
        stored = {"kvstore.expect_tokens": 64}
        engines = Engines(
            prefill=httpx.Response(200, json={"kv_transfer_params": stored}),
            decode=httpx.Response(200, json={"choices": [{"text": "yes"}]}),
        )
        body = {
            "prompt": [1, 2, 3],
            "max_tokens": 50,
            "min_tokens": 7,
            "n": 3,
            "logprobs": 2,
            "cache_salt": "salt",
        }
        answer = ask(engines, "/v1/completions", body)
        assert answer.json() == {"choices": [{"text": "yes"}]}
        assert engines.asked == [
            (
                "prefill",
                "/v1/completions",
                {"prompt": [1, 2, 3], "max_tokens": 1, "cache_salt": "salt"},
            ),
            ("decode", "/v1/completions", body | {"kv_transfer_params": stored}),
        ]

    def test_chats_are_cut_short_by_either_limit(self):
        engines = Engines()
        body = {"messages": [], "max_completion_tokens": 50, "stream": True, "stream_options": {}}
        ask(engines, "/v1/chat/completions", body)
        (_, path, short), (_, _, whole) = engines.asked
        assert path == "/v1/chat/completions"
        assert short == {"messages": [], "max_completion_tokens": 1, "max_tokens": 1}
        assert whole == body

    def test_what_the_caller_says_of_the_store_reaches_both(self):
        stored = {"kvstore.expect_tokens": 64}
        engines = Engines(prefill=httpx.Response(200, json={"kv_transfer_params": stored}))
        given = {"kvstore.skip_write": True}
        ask(engines, "/v1/completions", {"prompt": "x", "kv_transfer_params": given})
        (_, _, short), (_, _, whole) = engines.asked
        assert short["kv_transfer_params"] == given
        assert whole["kv_transfer_params"] == given | stored

    @pytest.mark.parametrize(
        "failure",
        [
            httpx.ConnectError("down"),
            httpx.ReadTimeout("slow"),
            httpx.RemoteProtocolError("killed"),
            httpx.Response(500, json={"error": {}}),
            httpx.Response(200, text="no JSON"),
        ],
    )
    def test_without_a_prefill_engine_the_decode_engine_is_asked_alone(self, failure):
        engines = Engines(prefill=failure, decode=httpx.Response(200, json={"id": 1}))
        answer = ask(engines, "/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert answer.json() == {"id": 1}
        assert engines.asked[1] == ("decode", "/v1/completions", {"prompt": "x", "max_tokens": 5})

    @pytest.mark.parametrize("stored", [None, {"kvstore.expect_tokens": 64}])
    def test_a_prefill_engine_that_says_nothing_is_named_once(self, stored, caplog):
        engines = Engines(prefill=httpx.Response(200, json={"kv_transfer_params": stored}))

        async def send_twice():
            app = load_proxy().make_app(
                (PREFILL,), (DECODE,), transport=httpx.MockTransport(engines)
            )
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://proxy"
            ) as client:
                for _ in range(2):
                    await client.post("/v1/completions", json={"prompt": "x"})

        asyncio.run(send_twice())
        told = [record.message for record in caplog.records if "stored tokens" in record.message]
        assert len(told) == (0 if stored else 1)
        assert all(PREFILL in message for message in told)

    def test_an_engine_that_is_no_url_is_refused_at_the_start(self):
        arguments = ["--prefill", "127.0.0.1:8100", "--decode", DECODE]
        result = CliRunner().invoke(load_proxy().main, arguments)
        assert result.exit_code == 2
        assert "write http://HOST:PORT" in result.output

    def test_an_error_of_the_decode_engine_is_passed_on(self):
        engines = Engines(decode=httpx.Response(400, json={"error": {"message": "too long"}}))
        answer = ask(engines, "/v1/completions", {"prompt": "x"})
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})

    def test_a_decode_engine_that_is_down_is_a_bad_gateway(self):
        engines = Engines(decode=httpx.ConnectError("down"))
        answer = ask(engines, "/v1/completions", {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)

    def test_a_stream_is_passed_on_as_it_is(self):
        text = 'data: {"a": 1}\n\ndata: [DONE]\n\n'
        reply = httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
        answer = ask(Engines(decode=reply), "/v1/completions", {"prompt": "x", "stream": True})
        assert answer.text == text
        assert answer.headers["content-type"].startswith("text/event-stream")

    def test_engines_take_turns_and_see_who_asks(self):
        seen = []

        def engines(request):
            seen.append((request.url.host, request.headers.get("authorization")))
            return httpx.Response(200, json={})

        async def send():
            app = load_proxy().make_app(
                ["http://p0", "http://p1"], ["http://d0"], transport=httpx.MockTransport(engines)
            )
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://proxy"
            ) as client:
                for _ in range(3):
                    headers = {"authorization": "Bearer me"}
                    await client.post("/v1/completions", json={}, headers=headers)

        asyncio.run(send())
        assert [host for host, _ in seen] == ["p0", "d0", "p1", "d0", "p0", "d0"]
        assert {who for _, who in seen} == {"Bearer me"}


# -- real engines -----------------------------------------------------------------------------------

BLOCK_TOKENS = 32
NEW_TOKENS = 12
PROMPTS = [list(draw(900 + index, n)) for index, n in enumerate((1000, 333, 65, 64, 31))]
LATER = [list(draw(950 + index, 200)) for index in range(4)]


class Server:
    """A process that serves HTTP, in a process group of its own, which ends whole."""

    def __init__(self, log, *command):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HOME": str(log.parent),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "kvstore",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command, "--port", str(self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, path):
        """Wait until it answers at ``path``."""

        def answers():
            end = self._process.poll()
            assert end is None, f"ended with {end}:\n{self._log.read_text()[-4000:]}"
            try:
                return httpx.get(self.url + path, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, 200)

    def signal(self, number):
        os.killpg(self._process.pid, number)

    def kill(self):
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def complete(self, tokens, **more):
        body = {
            "model": "llama",
            "prompt": tokens,
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = self.url + "/v1/completions"
        answer = httpx.post(url, json=body | more, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer

    def tokens(self, tokens, **more):
        """What it generates."""
        return self.complete(tokens, **more).json()["choices"][0]["token_ids"]

    def metric(self, name):
        text = httpx.get(self.url + "/metrics", trust_env=False).text
        values = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    @property
    def hit_tokens(self):
        """Tokens that the connector has provided so far."""
        return self.metric("external_prefix_cache_hits_total")

    def has_unread_request(self):
        """Whether something was sent to it that it has not read."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        waiting = [row[4].partition(":")[2] for row in rows if row[1].endswith(f":{self.port:04X}")]
        return any(int(num_bytes, 16) for num_bytes in waiting)


def serve_engine(log, model, role, url):
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"url": url, "wait_s": 30.0},
    }
    return Server(
        log,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "llama", "--skip-tokenizer-init"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "200"),
        *("--kv-transfer-config", json.dumps(transfer)),
    )


@pytest.mark.timeout(480)
def test_a_decode_engine_answers_from_what_a_prefill_engine_has_stored(
    llama, reference, start_daemon, tmp_path
):
    daemon = start_daemon()
    with ExitStack() as stack:

        def start(server):
            stack.callback(server.kill)
            return server

        prefill, decode = (
            start(serve_engine(tmp_path / f"{role}.log", llama, role, daemon.url))
            for role in ("kv_producer", "kv_consumer")
        )
        urls = ("--prefill", prefill.url, "--decode", decode.url)
        proxy = start(Server(tmp_path / "proxy.log", str(PROXY), *urls))
        prompts = [
            Prompt(tokens=tuple(tokens), max_tokens=NEW_TOKENS) for tokens in PROMPTS + LATER
        ]
        expected = [list(reference.generate(prompt)[0].tokens) for prompt in prompts]
        prefill.wait_for("/health")
        decode.wait_for("/health")
        proxy.wait_for("/openapi.json")

        check_prompts_are_loaded(proxy, prefill, decode, expected[: len(PROMPTS)])
        check_a_stream(proxy, expected[0])
        first, *others = expected[len(PROMPTS) :]
        check_blocks_are_waited_for(prefill, decode, first)
        check_a_dead_prefill_engine_costs_hits_only(proxy, prefill, decode, others)


def check_prompts_are_loaded(proxy, prefill, decode, expected):
    for tokens, answer in zip(PROMPTS, expected, strict=True):
        before = decode.hit_tokens
        assert proxy.tokens(tokens) == answer
        whole = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert decode.hit_tokens - before == whole, len(tokens)
    assert prefill.hit_tokens == 0
    stored = sum(len(tokens) // BLOCK_TOKENS for tokens in PROMPTS)
    wait_until(lambda: prefill.metric("kvstore_saved_blocks_total") == stored)
    assert decode.metric("kvstore_saved_blocks_total") == 0


def check_a_stream(proxy, expected):
    lines = proxy.complete(PROMPTS[0], stream=True).text.splitlines()
    pieces = [line.removeprefix("data: ") for line in lines if line]
    assert pieces.pop() == "[DONE]"
    choices = [choice for piece in pieces for choice in json.loads(piece)["choices"]]
    assert len(choices) > 1
    assert [token for choice in choices for token in choice["token_ids"]] == expected


def check_blocks_are_waited_for(prefill, decode, expected):
    """A decode engine that is asked too early loads what is stored a moment later."""
    parameters, before = {"kvstore.expect_tokens": 192}, decode.hit_tokens
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(decode.tokens, LATER[0], kv_transfer_params=parameters)
        wait_until(lambda: decode.metric("num_requests_waiting") == 1)
        answer = prefill.complete(LATER[0], max_tokens=1).json()
        assert answer["kv_transfer_params"] == parameters
        assert waiting.result() == expected
    assert decode.hit_tokens == before + 192


def check_a_dead_prefill_engine_costs_hits_only(proxy, prefill, decode, expected):
    before = decode.hit_tokens
    with ThreadPoolExecutor(1) as thread:
        prefill.signal(signal.SIGSTOP)
        waiting = thread.submit(proxy.tokens, LATER[1])
        wait_until(prefill.has_unread_request)
        prefill.kill()
        assert waiting.result() == expected[0]
    assert [proxy.tokens(tokens) for tokens in LATER[2:]] == expected[1:]
    assert decode.hit_tokens == before

"""The demo without an engine: its order of requests, its readings, its verdict, its table and its picture."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvbm.demo import counters, picture, report, workload
from kvbm.demo.client import Client, RequestError
from kvbm.demo.report import AnsweredRequest, Results, Run
from kvbm.demo.runs import (
    CONNECTOR,
    Options,
    make_arguments,
    make_environment,
    make_runs,
    make_workload,
)
from kvbm.demo.server import Server, ServerError, log_tail
from kvbm.observe.exposition import render as render_page
from kvbm.observe.metrics import Metrics
from rigs.manager_probe import wait_for


def make_run(name: str, seen_s: list[float], hits: dict[str, int], required: str = "") -> Run:
    requests = tuple(
        AnsweredRequest(
            document=0,
            question=number % 3,
            seen=number > 0,
            ttft_s=seconds,
            total_s=seconds + 0.1,
            prompt_tokens=1000,
            cached_tokens=0,
            text=f"answer {number}",
            token_ids=(7, number),
        )
        for number, seconds in enumerate([1.0, *seen_s])
    )
    return Run(
        name=name,
        title=name.title(),
        environment={"DYN_KVBM_X": "1"} if required else {},
        required_tier=required,
        start_s=12.5,
        requests=requests,
        hit_tokens=hits,
    )


def make_results() -> Results:
    runs = (
        make_run("plain", [1.0, 1.2, 1.1], {"device": 0, "host": 0, "disk": 0}),
        make_run("host", [0.1, 0.2, 0.1], {"device": 0, "host": 2500, "disk": 0}, "host"),
        make_run("disk", [0.2, 0.2, 0.4], {"device": 128, "host": 500, "disk": 2000}, "disk"),
    )
    return Results(machine={"machine": "a machine"}, settings={"model": "a model"}, runs=runs)


def with_answer(results: Results, run: int, request: int, text: str, token_ids: tuple[int, ...]) -> Results:
    runs = list(results.runs)
    requests = list(runs[run].requests)
    requests[request] = msgspec.structs.replace(requests[request], text=text, token_ids=token_ids)
    runs[run] = msgspec.structs.replace(runs[run], requests=tuple(requests))
    return msgspec.structs.replace(results, runs=tuple(runs))


def test_good_results_have_no_problems() -> None:
    assert report.problems(make_results()) == []
    assert report.speedup(make_results(), make_results().runs[1]) == pytest.approx(11.0)


def test_other_text_is_a_problem_that_says_where() -> None:
    results = with_answer(make_results(), run=2, request=1, text="wrong", token_ids=(7, 9))
    (problem,) = report.problems(results)
    assert (
        "request 2" in problem and "token 2" in problem and "'answer 1'" in problem and "'wrong'" in problem
    )
    assert report.problems(results, same_text_required=False) == []


def test_other_tokens_behind_equal_text_are_a_problem() -> None:
    results = with_answer(make_results(), run=1, request=0, text="answer 0", token_ids=(7, 0, 3))
    assert "token 3" in report.problems(results)[0]


def test_a_difference_at_a_tie_is_told_and_is_no_problem() -> None:
    differing = with_answer(make_results(), run=1, request=2, text="other", token_ids=(7, 9))
    ((plain, host, disk), request) = differing.runs, differing.runs[1].requests[2]
    for apart_nats, tied in ((report.TIE_NATS / 2, True), (report.TIE_NATS * 2, False), (None, False)):
        judged = msgspec.structs.replace(request, apart_nats=apart_nats)
        requests = (*host.requests[:2], judged, *host.requests[3:])
        results = msgspec.structs.replace(
            differing, runs=(plain, msgspec.structs.replace(host, requests=requests), disk)
        )
        assert report.ties(results) == tied
        assert (not report.problems(results)) == tied


def test_missing_answers_are_a_problem() -> None:
    results = make_results()
    short = msgspec.structs.replace(results.runs[1], requests=results.runs[1].requests[:-1])
    runs = (results.runs[0], short, results.runs[2])
    assert "3 requests" in report.problems(msgspec.structs.replace(results, runs=runs))[0]


@pytest.mark.parametrize(("run", "tier"), [(1, "host"), (2, "disk")])
def test_a_tier_that_served_nothing_is_a_problem(run: int, tier: str) -> None:
    results = make_results()
    runs = list(results.runs)
    runs[run] = msgspec.structs.replace(runs[run], hit_tokens={**runs[run].hit_tokens, tier: 0})
    (problem,) = report.problems(msgspec.structs.replace(results, runs=tuple(runs)))
    assert f"no {tier} hits" in problem


def test_the_table_fits_a_narrow_terminal_and_names_everything() -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.render(make_results()))
    text = console.export_text()
    for wanted in ("Plain", "Host", "Disk", "11.0 ×", "2,500", "a machine", "DYN_KVBM_X=1", "computed"):
        assert wanted in text
    assert "…" not in text


def test_json_holds_summary_and_raw_values(tmp_path: Path) -> None:
    report.save(make_results(), tmp_path / "results.json")
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["summary"]["host"]["ttft_seen_p50_s"] == 0.1
    assert read["summary"]["disk"]["hit_tokens"]["disk"] == 2000
    assert read["first_difference"] is None
    assert len(read["runs"]) == 3 and read["runs"][0]["requests"][1]["text"] == "answer 1"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert picture.draw(make_results(), tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["results.png"]


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not picture.draw(make_results(), tmp_path / "results.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("documents", "requests"), [(5, 30), (4, 10), (1, 3), (3, 4)])
def test_the_order_is_fair_and_always_the_same(documents: int, requests: int) -> None:
    asks = workload.schedule(documents, requests)
    assert asks == workload.schedule(documents, requests)
    counts = [sum(ask.document == document for ask in asks) for document in range(documents)]
    assert len(asks) == requests and max(counts) - min(counts) <= 1
    assert sum(not ask.seen for ask in asks) == documents
    pairs = {(ask.document, ask.question) for ask in asks}
    assert len(pairs) == requests, "the same question was asked twice"


@pytest.mark.parametrize("counts", [(0, 5), (3, 2), (99, 100)])
def test_impossible_orders_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        workload.schedule(*counts)


@pytest.mark.parametrize("short", [False, True])
def test_gaps_call_for_both_tiers_of_the_third_run(short: bool) -> None:
    sizes = make_workload(Options(output=Path("unused"), short=short))
    asks = workload.schedule(sizes.document_count, sizes.request_count)
    gaps = []
    recent: list[int] = []
    for ask in asks:
        if ask.seen:
            gaps.append(len(recent) - recent.index(ask.document))
            recent.remove(ask.document)
        recent.append(ask.document)
    assert gaps.count(1) == 0, "the device alone would serve it"
    # Two and a half requests fit into the small host tier.
    assert sum(gap == 2 for gap in gaps) >= 2 and sum(gap >= 4 for gap in gaps) >= 2


def test_sizes_keep_the_device_small_and_the_host_tier_too_small() -> None:
    sizes = make_workload(Options(output=Path("unused")))
    assert sizes.request_blocks < sizes.device_blocks < 2 * sizes.request_blocks
    assert sizes.request_blocks < sizes.small_host_blocks < sizes.working_set_blocks
    assert sizes.max_model_len % sizes.block_tokens == 0


def test_runs_are_started_as_a_user_would(tmp_path: Path) -> None:
    sizes = make_workload(Options(output=tmp_path))
    plain, host, disk = make_runs(sizes, tmp_path, (5001, 5002))
    assert "--kv-transfer-config" not in make_arguments(sizes, plain, "float32")
    arguments = make_arguments(sizes, host, "float32")
    assert (
        json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector"]
        == "DynamoConnector"
    )
    assert "kvbm.vllm_integration.connector" in CONNECTOR
    inherited = {"PATH": "/bin", "DYN_KVBM_CPU_CACHE_GB": "7", "DYN_KVBM_MANAGER": "elsewhere"}
    environment = make_environment(disk, inherited, cuda=False, local_model=True)
    assert "DYN_KVBM_CPU_CACHE_GB" not in environment and "DYN_KVBM_MANAGER" not in environment
    assert environment["DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER"] == "true"
    assert environment["DYN_KVBM_METRICS_PORT"] == "5002"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in make_environment(plain, inherited, cuda=True, local_model=False)


def test_counters_are_read_from_our_own_page() -> None:
    metrics = Metrics()
    before = counters.read(render_page(metrics))
    metrics.add("kvbm_transfer_bytes_total", 4096, source="host", target="device")
    metrics.add("kvbm_onboard_blocks_h2d", 3)
    moved = counters.difference(before, counters.read(render_page(metrics)))
    assert counters.total(moved, "kvbm_transfer_bytes") == 4096
    assert counters.hit_tokens({}, moved, block_tokens=128) == {"device": 0, "host": 384, "disk": 0}
    assert counters.total(moved, "kvbm_transfer_bytes", source="disk") == 0


def test_what_the_engine_says_of_tiers_comes_first() -> None:
    page = (
        "# TYPE vllm:prefix_cache_hits counter\n"
        'vllm:prefix_cache_hits_total{engine="0"} 256\n'
        "# TYPE vllm:prompt_tokens_cached_by_source counter\n"
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 512\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 0\n'
    )
    kvbm = {("kvbm_onboard_blocks_h2d", ()): 9.0, ("kvbm_onboard_blocks_d2d", ()): 2.0}
    hits = counters.hit_tokens(counters.read(page), kvbm, block_tokens=16)
    assert hits == {"device": 256, "host": 512, "disk": 32}


class FakeEngine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does: a chunk with the role, two with tokens, one with usage; in one where that is asked for."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        if self.server.fail:  # type: ignore[attr-defined]
            self.send_error(500, "no")
            return
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            top = [{"token": "token_id:4", "logprob": -0.25}, {"token": "token_id:9", "logprob": -1.5}]
            choice = {"token_ids": [4], "logprobs": {"content": [{"top_logprobs": top}]}}
            self.wfile.write(json.dumps({"choices": [choice]}).encode())
            return
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}, "token_ids": [4]}]},
            {"choices": [{"delta": {"content": "b"}, "token_ids": [5, 6]}]},
            {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
        ]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    server.bodies, server.fail = [], False  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_streamed_answer_is_put_together(engine: http.server.ThreadingHTTPServer) -> None:
    answer = Client("127.0.0.1", engine.server_port, timeout_s=5).chat("m", workload.messages("text", 0), 3)
    assert (answer.text, answer.token_ids) == ("ab", (4, 5, 6))
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 8)
    assert 0 < answer.ttft_s <= answer.total_s
    (body,) = engine.bodies  # type: ignore[attr-defined]
    assert (body["temperature"], body["max_tokens"], body["ignore_eos"]) == (0.0, 3, True)


def test_likelihoods_are_computed_without_a_cache_and_told_by_token(
    engine: http.server.ThreadingHTTPServer,
) -> None:
    client = Client("127.0.0.1", engine.server_port, timeout_s=5)
    told = client.likelihoods("m", workload.messages("text", 0), 1, salt="s")
    assert told == ((4,), ({4: -0.25, 9: -1.5},))
    (body,) = engine.bodies  # type: ignore[attr-defined]
    assert (body["cache_salt"], body["logprobs"], body["temperature"], body["max_tokens"]) == (
        "s",
        True,
        0.0,
        1,
    )


def test_failed_requests_name_what_was_asked(engine: http.server.ThreadingHTTPServer) -> None:
    engine.fail = True  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="POST /v1/chat/completions: HTTP 500"):
        Client("127.0.0.1", engine.server_port, timeout_s=5).chat("m", [], 3)
    with pytest.raises(RequestError, match="GET /health"):
        Client("127.0.0.1", 1, timeout_s=1).is_ready()


def make_server(code: str, log: Path, start_timeout_s: float) -> Server:
    """A server that runs this code and listens nowhere."""
    return Server(
        "code",
        [sys.executable, "-c", code],
        1,
        dict(os.environ),
        log,
        start_timeout_s=start_timeout_s,
        request_timeout_s=1.0,
    )


def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    with pytest.raises(ServerError, match="status 3") as caught, make_server(code, tmp_path / "log", 20):
        pass
    assert str(caught.value).endswith("98\n99") and "\n69\n" not in str(caught.value)


def test_a_server_that_never_answers_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(ServerError, match="not ready after"), make_server(code, tmp_path / "log", 1.5):
        pass
    pid = int((tmp_path / "log").read_text().split()[0])

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def kill() -> str:
        os.kill(pid, signal.SIGKILL)
        return "a child of the server is still running"

    wait_for(ended, 5.0, kill)


def test_log_tails_have_no_colours(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\x1b[31mred\x1b[0m\n")
    assert log_tail(tmp_path / "log") == "red"
    assert log_tail(tmp_path / "none") == ""
